"""Query towers without a model: q is the sum of the rows of a query's ids, and the offset is 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from embeddings.vectors.query_tower import (
    LENGTHS,
    ML_DOMAIN,
    ML_OPSET,
    ROTATION,
    QueryTower,
    set_encoder_ids,
    table_name,
)

HISTORY_LENGTH = 4


def tower_of(tables: Mapping[str, tuple[Sequence[Any], np.ndarray]], *, history: bool = False) -> QueryTower:
    """A tower of features, {feature: (ids, rows [ids, d])}, or of histories: then of the one feature ``item``.

    The row of an unknown id is zero.
    """
    nodes: list[Any] = []
    inputs: list[Any] = []
    constants = {"one": np.int64(1), "none": np.int64(0), "axis": np.array([1]), "offset_of_all": np.float32(1)}
    dim = next(rows.shape[1] for _, rows in tables.values())
    constants[ROTATION] = np.eye(dim, dtype=np.float32)

    def node(kind: str, given: list[str], made: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, given, [made], **attributes))
        return made

    total, known = "", ""
    for name, (ids, rows) in tables.items():
        is_int = isinstance(ids[0], int)
        kind = TensorProto.INT64 if is_int else TensorProto.STRING
        shape = ["batch", HISTORY_LENGTH] if history else ["batch"]
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
        encoder = {"keys_int64s": [0]} if is_int else {"keys_strings": [""]}
        node("LabelEncoder", [name], f"{name}_codes", domain=ML_DOMAIN, doc_string=name, values_int64s=[0],
             default_int64=1, **encoder)  # fmt: skip
        set_encoder_ids(nodes[-1], ids)
        constants[table_name(name)] = np.concatenate([np.zeros((2, dim)), rows]).astype(np.float32)
        codes = f"{name}_codes"
        if history:
            inputs.append(helper.make_tensor_value_info(name + LENGTHS, TensorProto.INT64, ["batch"]))
            constants["places"] = np.arange(HISTORY_LENGTH)[None]
            node("Unsqueeze", [name + LENGTHS, "axis"], "ends")
            inside = node("Cast", [node("Less", ["places", "ends"], "is_inside")], "inside", to=TensorProto.INT64)
            codes = node("Mul", [codes, inside], "inner_codes")
        found = node("Gather", [table_name(name), codes], f"{name}_rows")
        is_known = node("Cast", [node("Greater", [codes, "one"], f"{name}_is")], f"{name}_known", to=TensorProto.INT64)
        if history:
            found = node("ReduceSum", [found, "axis"], f"{name}_sum", keepdims=0)
            is_known = node("ReduceSum", [is_known, "axis"], f"{name}_count", keepdims=0)
        total = found if not total else node("Add", [total, found], f"{name}_total")
        known = is_known if not known else node("Add", [known, is_known], f"{name}_all")
    node("MatMul", [total, ROTATION], "vector")
    node("Greater", [known, "none"], "known")
    zeros = node("Mul", [node("Cast", [known], "numbers", to=TensorProto.FLOAT), "zero"], "zeros")
    constants["zero"] = np.float32(0)
    node("Add", [zeros, "offset_of_all"], "offset")
    outputs = [
        helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["batch", dim]),
        helper.make_tensor_value_info("offset", TensorProto.FLOAT, ["batch"]),
        helper.make_tensor_value_info("known", TensorProto.BOOL, ["batch"]),
    ]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "queries", inputs, outputs, initializers)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(ML_DOMAIN, ML_OPSET)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    of = "histories" if history else "features"
    helper.set_model_props(model, {"of": of, "users_table": "user", "items_table": "item"})
    return QueryTower(model.SerializeToString())
