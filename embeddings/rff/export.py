"""A view, which is a fixed map of item vectors, as the first layer of a consumer's model: safetensors and ONNX.

The safetensors file has U and its description, the ONNX file the whole map. Either gives the served features, to 1e-6,
for item vectors of any norm. For torch, see :mod:`embeddings.rff.torch_module`.

    phi(h) = m^{-1/2} [cos(U h), sin(U h)], h brought to unit length first; a zero row gives a zero row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from embeddings.rff.features import RandomFourierFeatures, digest
from embeddings.vectors.item_vectors import Array

FORMULA = "phi(h) = [cos(U h), sin(U h)] / sqrt(m), with h brought to unit length and m rows in U; phi(0) = 0"
TENSOR = "frequencies"
ONNX_OPSET = 17
# The IR version that came with the opset, so that runtimes of that age can read the file.
_ONNX_IR = 8


def layer_metadata(features: RandomFourierFeatures, described: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata that both formats store with U: ``described``, the formula, and the sha256 of U."""
    return {
        **{key: str(value) for key, value in described.items()},
        "formula": FORMULA,
        "frequencies_sha256": digest(_frequencies(features)),
    }


def safetensors_layer(features: RandomFourierFeatures, described: Mapping[str, Any]) -> bytes:
    """Return a safetensors file with the tensor ``frequencies``, U float32 [m, d].

    The same arguments give the same bytes.
    """
    frequencies = _frequencies(features)
    entry = {"dtype": "F32", "shape": list(frequencies.shape), "data_offsets": [0, frequencies.nbytes]}
    # Written here because the library's writer puts metadata in an order of its own at every call.
    header = json.dumps({"__metadata__": layer_metadata(features, described), TENSOR: entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + frequencies.tobytes()


def onnx_layer(features: RandomFourierFeatures, described: Mapping[str, Any]) -> bytes:
    """Return an ONNX model with input ``h`` float32 [batch, d] and output ``phi`` float32 [batch, dim].

    The layer takes any batch size, and has opset 17.
    """
    # Imported here because the import takes a quarter of a second.
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    frequencies = _frequencies(features)
    constants = {
        "weights": np.ascontiguousarray(frequencies.T),
        "scale": np.float32(1.0 / math.sqrt(len(frequencies))),
        "zero": np.float32(0.0),
        "one": np.float32(1.0),
        "last_axis": np.array([1], dtype=np.int64),
    }
    # Scaled by the largest coordinate first, so that squares neither vanish nor overflow.
    nodes = [
        helper.make_node("Abs", ["h"], ["sizes"]),
        helper.make_node("ReduceMax", ["sizes"], ["largest"], axes=[1], keepdims=1),
        helper.make_node("Equal", ["largest", "zero"], ["empty"]),
        helper.make_node("Where", ["empty", "one", "largest"], ["divisor"]),
        helper.make_node("Div", ["h", "divisor"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "scaled"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "last_axis"], ["square"], keepdims=1),
        helper.make_node("Sqrt", ["square"], ["length"]),
        helper.make_node("Where", ["empty", "one", "length"], ["norm"]),
        helper.make_node("Div", ["scaled", "norm"], ["unit"]),
        helper.make_node("MatMul", ["unit", "weights"], ["angles"]),
        helper.make_node("Cos", ["angles"], ["cosines"]),
        helper.make_node("Sin", ["angles"], ["sines"]),
        helper.make_node("Concat", ["cosines", "sines"], ["waves"], axis=1),
        helper.make_node("Mul", ["waves", "scale"], ["features"]),
        helper.make_node("Where", ["empty", "zero", "features"], ["phi"]),
    ]
    graph = helper.make_graph(
        nodes,
        "random_fourier_features",
        [helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", features.dim_in])],
        [helper.make_tensor_value_info("phi", TensorProto.FLOAT, ["batch", features.dim])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        doc_string=FORMULA,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET)],
        ir_version=_ONNX_IR,
        producer_name="evenkeel",
        doc_string=FORMULA,
    )
    helper.set_model_props(model, layer_metadata(features, described))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _frequencies(features: RandomFourierFeatures) -> Array:
    """Return U as files have it: float32, little-endian.

    Rounding a folded U to float32 changes its features by less than their own rounding.
    """
    return np.ascontiguousarray(features.frequencies, dtype="<f4")
