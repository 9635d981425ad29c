"""The query tower of a version: an ONNX model from a user's features, or a history of items, to the user's vector.

    input   NAME            ids of a feature: int64 or string [b]; of a list, or a history (oldest first), [b, l]
            NAME__lengths   number of ids in each list, int64 [b]; the ids after them have no meaning
    output  vector          float32 [b, d], q in the score <q, n_i z_i> + b_i + o of an item
            offset          float32 [b], o
            known           bool [b], False for a query none of whose ids the model knows

The model has its tables and ids inside, so a consumer needs only onnxruntime; an id that it lacks counts as unknown.
Torch-free; trainer.publishing.query_tower makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from embeddings.vectors.item_vectors import Array, keys_of

LENGTHS = "__lengths"
OUTPUTS = ("vector", "offset", "known")
ROTATION = "rotation"
"""Name of the matrix [d, d] that the model's own vector is multiplied with last."""
NUM_SPECIAL_ROWS = 2
"""Rows of a table before those of its ids: padding, and the unknown id."""
UNKNOWN_ROW = 1
Part = Literal["users", "items"]
ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 2


def table_name(table: str) -> str:
    """Return the initializer's name of an embedding table."""
    return f"table_{table}"


@dataclass(frozen=True)
class QueryTower:
    """The tower as bytes of an ONNX file.

    Its LabelEncoder nodes turn ids into rows of a table, which their ``doc_string`` names. The model's properties name
    the tables with ids of users and of items (``users_table``, ``items_table``), if there are any.
    """

    data: bytes

    def rotated(self, rotation: Array) -> QueryTower:
        """Return the tower with vectors q R, R [d, d] being the rotation from the model's coordinates."""
        from onnx import numpy_helper

        model = self._parsed()
        matrix = _initializer(model, ROTATION)
        matrix.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rotation, dtype=np.float32), ROTATION))
        return replace(self, data=model.SerializeToString())

    def keys(self, part: Part) -> Array:
        """Return the users or items that the tower has a row for, as keys."""
        model = self._parsed()
        table = _table_of(model, part)
        ids = [encoder_ids(node) for node in model.graph.node if _reads(node, table)]
        return keys_of(ids[0] if ids else [])

    def without(self, part: Part, is_gone: Callable[[Array], Array]) -> QueryTower:
        """Return the tower without the rows of some users or items, which become unknown ids; itself if there are none.

        ``is_gone``: function from keys (embeddings.vectors.item_vectors.keys_of) to a mask.
        """
        from onnx import numpy_helper

        model = self._parsed()
        table = _table_of(model, part)
        staying: Array | None = None
        for node in model.graph.node:
            if not _reads(node, table):
                continue
            ids = encoder_ids(node)
            staying = ~np.asarray(is_gone(keys_of(ids)), dtype=bool)
            if staying.all():
                return self
            set_encoder_ids(node, [identifier for identifier, stays in zip(ids, staying, strict=True) if stays])
        if staying is None:
            return self
        rows = _initializer(model, table_name(table))
        kept = numpy_helper.to_array(rows)[np.append(np.ones(NUM_SPECIAL_ROWS, dtype=bool), staying)]
        rows.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(kept), rows.name))
        return replace(self, data=model.SerializeToString())

    def described(self) -> dict[str, Any]:
        """Return the manifest's entry: {of: features or histories, inputs: {name: {ids: int64 or string, list}}}."""
        from onnx import TensorProto

        model = self._parsed()
        of = {prop.key: prop.value for prop in model.metadata_props}["of"]
        given = {one.name: one.type.tensor_type for one in model.graph.input}
        inputs = {
            name: {"ids": "string" if one.elem_type == TensorProto.STRING else "int64", "list": name + LENGTHS in given}
            for name, one in given.items()
            if not name.endswith(LENGTHS)
        }
        return {"of": of, "inputs": inputs}

    def _parsed(self) -> Any:
        # Imported here because the import takes a quarter of a second.
        import onnx

        return onnx.load_model_from_string(self.data)


def encoder_ids(node: Any) -> list[Any]:
    """Return the ids of a LabelEncoder node, whose rows follow one another from NUM_SPECIAL_ROWS on."""
    attributes = {one.name: one for one in node.attribute}
    if "keys_int64s" in attributes:
        return list(attributes["keys_int64s"].ints)
    return [one.decode() for one in attributes["keys_strings"].strings]


def set_encoder_ids(node: Any, ids: Sequence[Any]) -> None:
    """Give a LabelEncoder node other ids of the same type."""
    for attribute in node.attribute:
        if attribute.name == "keys_int64s":
            attribute.ints[:] = ids
        elif attribute.name == "keys_strings":
            attribute.strings[:] = [identifier.encode() for identifier in ids]
        elif attribute.name == "values_int64s":
            attribute.ints[:] = range(NUM_SPECIAL_ROWS, NUM_SPECIAL_ROWS + len(ids))


def _table_of(model: Any, part: Part) -> str:
    return next((prop.value for prop in model.metadata_props if prop.key == f"{part}_table"), "")


def _reads(node: Any, table: str) -> bool:
    return bool(node.op_type == "LabelEncoder" and node.doc_string == table)


def _initializer(model: Any, name: str) -> Any:
    return next(one for one in model.graph.initializer if one.name == name)
