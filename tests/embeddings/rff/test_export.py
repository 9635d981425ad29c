"""Layers of a view: safetensors, ONNX run by onnxruntime, and the torch module all give what ``transform`` gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load, save

from embeddings.rff import RandomFourierFeatures
from embeddings.rff.export import ONNX_OPSET, onnx_layer, safetensors_layer
from embeddings.rff.torch_module import RandomFourierLayer

DESCRIBED = {"name": "v", "sigma": 0.4}
Layer = Callable[[np.ndarray], np.ndarray]


def by_onnx(features: RandomFourierFeatures) -> Layer:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_layer(features, DESCRIBED), options, providers=["CPUExecutionProvider"])
    return lambda h: session.run(["phi"], {"h": h})[0]


def by_torch(features: RandomFourierFeatures) -> Layer:
    module = RandomFourierLayer.load(safetensors_layer(features, DESCRIBED))
    return lambda h: module(torch.from_numpy(h)).numpy()


def by_hand(features: RandomFourierFeatures) -> Layer:
    """What the formula in the file's metadata says."""
    u = load(safetensors_layer(features, DESCRIBED))["frequencies"].astype(np.float64)

    def layer(h: np.ndarray) -> np.ndarray:
        h = h.astype(np.float64)
        norms = np.linalg.norm(h, axis=1, keepdims=True)
        angles = np.divide(h, norms, where=norms > 0, out=np.zeros_like(h)) @ u.T
        return np.where(norms > 0, np.hstack([np.cos(angles), np.sin(angles)]) / np.sqrt(len(u)), 0)

    return layer


LAYERS = pytest.mark.parametrize("layer", [by_onnx, by_torch, by_hand])


@LAYERS
@pytest.mark.parametrize(("dim_in", "dim", "sigma"), [(64, 128, 0.4), (8, 6, 1.0), (32, 1024, 1.0), (1, 2, 0.4)])
@pytest.mark.filterwarnings("ignore:.*loses directions")
def test_layers_give_what_is_served(layer: Callable, dim_in: int, dim: int, sigma: float) -> None:
    features = RandomFourierFeatures(dim_in, dim, sigma, 3)
    rng = np.random.default_rng(0)
    run = layer(features)
    for num_rows in (1, 7, 500):
        h = (rng.standard_normal((num_rows, dim_in)) * np.exp(3 * rng.standard_normal((num_rows, 1)))).astype(
            np.float32
        )
        phi = run(h)
        assert phi.shape == (num_rows, dim)
        np.testing.assert_allclose(phi, features.transform(h), rtol=0, atol=1e-6)


@LAYERS
def test_layers_bring_any_row_to_unit_length(layer: Callable) -> None:
    features = RandomFourierFeatures(3, 6)
    h = np.array([[0, 0, 0], [1e-30, 0, 2e-30], [1, 0, 2], [1e30, 0, 2e30], [-0.0, 0, 0]], dtype=np.float32)
    phi = layer(features)(h)
    np.testing.assert_allclose(phi, features.transform(h), rtol=0, atol=1e-6)
    assert not phi[[0, 4]].any()
    np.testing.assert_allclose(phi[[1, 3]], phi[[2, 2]], rtol=0, atol=1e-6)


@LAYERS
def test_layers_with_a_rotation_folded_in_take_raw_vectors(layer: Callable) -> None:
    rng = np.random.default_rng(1)
    rotation = np.linalg.qr(rng.standard_normal((16, 16)))[0]
    features = RandomFourierFeatures(16, 32, 0.4, 1)
    raw = (rng.standard_normal((50, 16)) * 3).astype(np.float32)
    served = features.transform(raw.astype(np.float64) @ rotation)
    np.testing.assert_allclose(layer(features.fold(rotation))(raw), served, rtol=0, atol=1e-6)
    assert np.abs(layer(features)(raw) - served).max() > 0.1


def test_the_onnx_file_says_what_it_is() -> None:
    features = RandomFourierFeatures(4, 8)
    model = onnx.load_from_string(onnx_layer(features, DESCRIBED))
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", ONNX_OPSET)]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties["name"] == "v"
    assert properties["frequencies_sha256"] == features.sha256
    assert "unit length" in properties["formula"]
    for write in (onnx_layer, safetensors_layer):
        assert write(features, DESCRIBED) == write(features, DESCRIBED)


def test_the_torch_module_is_a_layer(tmp_path: Path) -> None:
    features = RandomFourierFeatures(4, 8)
    path = tmp_path / "v.safetensors"
    path.write_bytes(safetensors_layer(features, DESCRIBED))
    layer = RandomFourierLayer.load(path)
    assert (layer.dim_in, layer.dim, layer.metadata["name"]) == (4, 8, "v")
    assert not list(layer.parameters())
    assert list(layer.state_dict()) == ["frequencies"]
    h = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    assert layer(h).shape == (2, 3, 5, 8)
    assert torch.autograd.gradcheck(layer, h)
    zero = torch.zeros(1, 4, requires_grad=True)
    layer(zero).sum().backward()
    assert not zero.grad.any()
    expected = features.transform(h.detach().reshape(-1, 4).numpy())
    np.testing.assert_allclose(
        RandomFourierLayer(features.frequencies)(h.float()).detach().reshape(-1, 8), expected, atol=1e-6
    )


def test_a_damaged_layer_is_refused() -> None:
    features = RandomFourierFeatures(4, 8)
    data = bytearray(safetensors_layer(features, DESCRIBED))
    data[-3] ^= 1
    with pytest.raises(ValueError, match="fetch the layer again"):
        RandomFourierLayer.load(bytes(data))
    with pytest.raises(ValueError, match="not the layer of a view"):
        RandomFourierLayer.load(save({"weight": np.zeros(2, np.float32)}))
