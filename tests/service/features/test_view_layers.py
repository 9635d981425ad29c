"""Views over a real service: every way to a view's features gives what is served, and the stage is where R comes from.

Item vectors are published through the refresh stage itself, a day apart and in another basis, fetched over a socket,
and compared with the layers that were downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Gate, MovingAverage, Settings, View
from embeddings.rff.torch_module import RandomFourierLayer
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows
from service.client import Client
from tests.service.serving import Served

NUM_ITEMS, DIM = 300, 8
IDS = np.arange(NUM_ITEMS) * 3


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, served.key) as client:
        yield client


def store_of(served: Served) -> Store:
    return open_store(Path(served.settings.store_url))


def two_days(served: Served, name: str, ema: MovingAverage | None, **view: object) -> np.ndarray:
    """Publishes a day and the day after, whose model has turned everything; the second day's raw vectors."""
    rng = np.random.default_rng(5)
    first = rng.standard_normal((NUM_ITEMS, DIM))
    turn = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    second = ((first + 0.1 * rng.standard_normal(first.shape)) @ turn * 4).astype(np.float32)
    settings = Settings(ema=ema, gate=Gate("report"), views=(View(f"{name}_rff", **view),))  # type: ignore[arg-type]
    parent = None
    for day in (first.astype(np.float32), second):
        done = publish_candidate(
            store_of(served), name, RefreshRequest(ItemVectors(IDS, day), settings, parent_version=parent)
        )
        assert done.status == "published", done.reasons
        parent = done.version
    return second


def onnx_layer(data: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("materialized", [False, True])
def test_layers_of_published_vectors(served: Served, client: Client, materialized: bool) -> None:
    name = f"average-{materialized}".lower()
    two_days(served, name, MovingAverage(), materialized=materialized)
    client.add_view({"name": f"{name}-raw", "collection": name, "kind": "identity"})
    ids = IDS[::7]
    served_phi = client.vectors(name, ids).vectors
    published = client.vectors(view=f"{name}-raw", ids=ids).vectors
    assert client.view(f"{name}_rff")["materialized"] is materialized
    layer = RandomFourierLayer.load(client.layer(f"{name}_rff"))
    # The consumer may have the vectors at any length.
    for scale in (1.0, 17.0):
        h = (published * scale).astype(np.float32)
        np.testing.assert_allclose(layer(torch.from_numpy(h)).numpy(), served_phi, rtol=0, atol=1e-6)
        phi = onnx_layer(client.layer(f"{name}_rff", format="onnx")).run(["phi"], {"h": h})[0]
        np.testing.assert_allclose(phi, served_phi, rtol=0, atol=1e-6)


def test_layers_of_the_models_vectors(served: Served, client: Client) -> None:
    raw = two_days(served, "today", None)
    layers = {"model": client.layer("today_rff", takes="model"), "published": client.layer("today_rff")}
    served_phi = client.vectors("today", IDS).vectors
    layer = RandomFourierLayer.load(layers["model"])
    assert layer.metadata["averaged"] == "False"
    np.testing.assert_allclose(layer(torch.from_numpy(raw)).numpy(), served_phi, rtol=0, atol=1e-6)
    phi = onnx_layer(client.layer("today_rff", format="onnx", takes="model")).run(["phi"], {"h": raw})[0]
    np.testing.assert_allclose(phi, served_phi, rtol=0, atol=1e-6)
    unturned = RandomFourierLayer.load(layers["published"])(torch.from_numpy(raw)).numpy()
    assert np.abs(unturned - served_phi).max() > 0.01


def test_an_averaged_version_says_that_the_models_vectors_are_not_what_is_served(
    served: Served, client: Client
) -> None:
    raw = two_days(served, "averaged", MovingAverage())
    layer = RandomFourierLayer.load(client.layer("averaged_rff", takes="model"))
    assert layer.metadata["averaged"] == "True"
    rotation = store_of(served).collection("averaged").rotation()
    turned = torch.from_numpy((unit_rows(raw)[0] @ rotation).astype(np.float32))
    plain = RandomFourierLayer.load(client.layer("averaged_rff"))
    torch.testing.assert_close(layer(torch.from_numpy(raw)), plain(turned), rtol=0, atol=1e-6)


def test_advice_over_the_client(served: Served, client: Client) -> None:
    two_days(served, "advised", MovingAverage())
    body = {"name": "advised-wide", "collection": "advised", "sigma": 1.0}
    found = client.advise_view(body, epsilon=0.2)
    assert found["view"]["dim"] == 2 * DIM
    assert found["advice"]["dim"] < found["advice"]["bound_dim"]
    assert "advised-wide" not in [view["name"] for view in client.views()]
    with pytest.raises(ValueError, match="safetensors, onnx"):
        client.layer("advised_rff", format="pickle")
