"""Query tower of a run's model as ONNX, with tables and ids inside (embeddings.vectors.query_tower has its form)."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from embeddings.vectors.query_tower import (
    LENGTHS,
    ML_DOMAIN,
    ML_OPSET,
    NUM_SPECIAL_ROWS,
    OUTPUTS,
    ROTATION,
    UNKNOWN_ROW,
    QueryTower,
    set_encoder_ids,
    table_name,
)
from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.warm_start import id_maps
from trainer.data.batches.keys import Key, keys_of
from trainer.distributed.materialize import ReadTables
from trainer.models.base import RankingModel
from trainer.models.next_item import NextItemModel
from trainer.models.two_tower import TwoTower
from trainer.runs.directory import Run
from trainer.spec import DatasetSpec

MAX_BYTES = 1 << 30
"""Most bytes of a tower's tables; a file of ONNX has less than 2 GiB."""
TOLERANCE = 1e-4
"""Largest difference between vectors by ONNX and by torch with which a tower is published, relative above 1."""
OPSET, IR_VERSION = 17, 8
_CODES = "__codes"
_EXAMPLE_ROWS, _EXAMPLE_IDS = 3, 5


def query_tower(run: Run, checkpoint: Checkpoint, model: RankingModel) -> QueryTower | None:
    """Return the tower of a model with a checkpoint's parameters, in the model's own coordinates.

    The tower is None, with a note in the log, if the model's users are rows of a table, if its tables are larger than
    MAX_BYTES, or if it reads other features than ids.
    """
    assert isinstance(model.embeddings, ReadTables)
    if isinstance(model, NextItemModel):
        keys = [next(key for key in keys_of(run.dataset, run.job) if key.name == "item")]
    elif isinstance(model, TwoTower):
        keys = [key for key in keys_of(run.dataset, run.job) if key.name in model.context]
    else:
        return None
    ids = {key.table: id_maps(checkpoint)[key.table].ids for key in keys}
    tables = {table: model.embeddings.tables.weight(table) for table in ids}
    reason = _obstacle(run.dataset, keys, ids, tables)
    if reason is not None:
        print(f"no query tower is published: {reason}", flush=True)
        return None
    part = _Queries(model, keys, tables, run.job.model.history_length)
    features = run.dataset.joined_features
    named = {f"{part}_table": features[name].shares or name for part, name in (("users", "user"), ("items", "item"))}
    properties = {"of": "histories" if part.history else "features", **named}
    tower = QueryTower(_onnx(part, ids, properties))
    difference = _difference(part, tower.data)
    if difference is not None and not difference <= TOLERANCE:
        print(f"no query tower is published: ONNX differs from the model by {difference:.1e}", flush=True)
        return None
    return tower


def _obstacle(
    dataset: DatasetSpec, keys: list[Key], ids: Mapping[str, pa.Array], tables: Mapping[str, Tensor]
) -> str | None:
    features = dataset.joined_features
    for key in keys:
        feature = features[key.name]
        if any(feature.made_of.values()) or feature.derive is not None or key.weighted:
            return f"'{key.name}' is made from a column when rows are read"
        if pa.types.is_uint64(ids[key.table].type):
            return f"the ids of '{key.name}' are known by hashes alone"
    empty = [table for table, known in ids.items() if not len(known)]
    if empty:
        return f"table '{empty[0]}' has no ids"
    num_bytes = sum(table.nbytes for table in tables.values())
    return f"its tables have {num_bytes:,} bytes, more than {MAX_BYTES:,}" if num_bytes > MAX_BYTES else None


class _Queries(nn.Module):
    """Maps rows of tables to (vector, offset, known); ``names`` are its inputs, in order.

    ``history``: length of histories for a sequence model, else 0.
    """

    rotation: Tensor

    def __init__(self, model: RankingModel, keys: list[Key], tables: Mapping[str, Tensor], length: int):
        super().__init__()
        embeddings, model.embeddings = model.embeddings, nn.Identity()
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.embeddings = embeddings
        self.keys, self.dim = keys, model.dim
        self.history = length if isinstance(model, NextItemModel) else 0
        for table, rows in tables.items():
            self.register_buffer(table_name(table), rows.float())
        self.register_buffer(ROTATION, torch.eye(self.dim))
        self.eval()

    @property
    def names(self) -> list[str]:
        return [
            name for key in self.keys for name in (key.name + _CODES, *([key.name + LENGTHS] if key.is_list else []))
        ]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(self.names, inputs, strict=True))
        # The last input is codes of single ids, or lengths.
        blocks, num_known = {}, torch.zeros_like(inputs[-1])
        for key in self.keys:
            table: Any = getattr(self, table_name(key.table))
            codes = given[key.name + _CODES]
            if not key.is_list:
                blocks[key.name] = embedding(codes, table)
                num_known = num_known + (codes >= NUM_SPECIAL_ROWS).to(torch.int64)
                continue
            lengths = given[key.name + LENGTHS]
            inside = (torch.arange(codes.shape[1]) < lengths[:, None]).to(table.dtype)
            codes = codes * inside.to(torch.int64)
            rows = embedding(codes, table) * inside[:, :, None]
            num_known = num_known + (codes >= NUM_SPECIAL_ROWS).to(torch.int64).sum(1)
            if isinstance(self.model, NextItemModel):
                blocks[key.name] = self.model.encode(rows, lengths)
                continue
            pooled = rows.sum(1)
            blocks[key.name] = pooled / lengths[:, None].clamp(min=1) if key.pooling == "mean" else pooled
        offsets = torch.zeros_like(num_known).to(torch.float32)
        if isinstance(self.model, TwoTower):
            vectors = self.model._user(blocks, None)[:, : self.dim]
            offsets = offsets + self.model.bias.float()
        else:
            (vectors,) = blocks.values()
        return vectors.float() @ self.rotation, offsets, num_known > 0

    def example(self, rows: int = _EXAMPLE_ROWS) -> dict[str, Tensor]:
        """Return codes and lengths of ``rows`` queries, drawn from a fixed seed."""
        generator, inputs = torch.Generator().manual_seed(rows), {}
        for key in self.keys:
            num_rows = len(getattr(self, table_name(key.table)))
            most = self.history or _EXAMPLE_IDS
            shape = (rows, most) if key.is_list else (rows,)
            inputs[key.name + _CODES] = torch.randint(1, max(num_rows, 2), shape, generator=generator)
            if key.is_list:
                inputs[key.name + LENGTHS] = torch.arange(rows) % (most + 1)
        return inputs

    def dynamic(self) -> dict[str, dict[int, str]]:
        """Return each tensor's axes of variable size, and their names; the length of a history is fixed."""
        axes = {name: {0: "batch"} for name in (*self.names, *OUTPUTS)}
        for key in self.keys if not self.history else ():
            if key.is_list:
                axes[key.name + _CODES][1] = f"{key.name}__ids"
        return axes


def _onnx(part: _Queries, ids: Mapping[str, pa.Array], properties: Mapping[str, str]) -> bytes:
    """Return the module as ONNX, with nodes before it that turn ids into rows."""
    import onnx
    from onnx import TensorProto, helper

    out = io.BytesIO()
    with warnings.catch_warnings():
        # Ignore the deprecation of this exporter: its successor needs one more package (docs/adr/0035).
        warnings.simplefilter("ignore")
        torch.onnx.export(
            part,
            tuple(part.example().values()),
            out,  # type: ignore[arg-type]  # a file, which this exporter takes as well
            input_names=part.names,
            output_names=list(OUTPUTS),
            dynamic_axes=part.dynamic(),
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load_model_from_string(out.getvalue())
    graph = model.graph
    for key in part.keys:
        known = ids[key.table]
        is_int = pa.types.is_int64(known.type)
        names, value_type = ("keys_int64s", TensorProto.INT64) if is_int else ("keys_strings", TensorProto.STRING)
        ids_and_rows: dict[str, Any] = {
            names: [0] if is_int else [""], "values_int64s": [0], "default_int64": UNKNOWN_ROW,
        }  # fmt: skip
        node = helper.make_node(
            "LabelEncoder", [key.name], [key.name + _CODES], domain=ML_DOMAIN, doc_string=key.table, **ids_and_rows
        )
        set_encoder_ids(node, known.to_pylist())
        graph.node.insert(0, node)
        given = next(one for one in graph.input if one.name == key.name + _CODES)
        given.name, given.type.tensor_type.elem_type = key.name, value_type
    model.opset_import.append(helper.make_opsetid(ML_DOMAIN, ML_OPSET))
    model.ir_version, model.producer_name = IR_VERSION, "evenkeel"
    helper.set_model_props(model, dict(properties))
    return bytes(model.SerializeToString())


def _difference(part: _Queries, model: bytes) -> float | None:
    """Return the largest difference between torch's and ONNX's vectors; None if onnxruntime is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    from onnx import load_model_from_string

    from embeddings.vectors.query_tower import encoder_ids

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    nodes = {
        node.output[0]: node for node in load_model_from_string(model).graph.node if node.op_type == "LabelEncoder"
    }
    worst = 0.0
    for rows in (1, 7):
        inputs = part.example(rows)
        given: dict[str, Any] = {}
        for name, value in inputs.items():
            if name not in nodes:
                given[name] = value.numpy()
                continue
            known = encoder_ids(nodes[name])
            # An unknown id becomes another known one.
            chosen = value.clamp(min=NUM_SPECIAL_ROWS).numpy() - NUM_SPECIAL_ROWS
            inputs[name] = value.clamp(min=NUM_SPECIAL_ROWS)
            kind = np.int64 if isinstance(known[0], int) else object
            given[nodes[name].input[0]] = np.array(known, dtype=kind)[chosen]
        with torch.no_grad():
            expected = part(*inputs.values())[0].numpy()
        found = session.run(["vector"], given)[0]
        worst = max(worst, float((np.abs(found - expected) / np.maximum(1.0, np.abs(expected))).max()))
    return worst
