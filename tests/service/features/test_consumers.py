"""The downstream kit against a real service: consumers of day 0 survive refreshes, and the guide does as it says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from tests.service import serving
from tests.service.serving import Served
from tests.support.examples import run_example

ROOT = Path(__file__).resolve().parents[3]
NUM_ITEMS, DIM, NUM_CLASSES = 800, 16, 6
IDS = np.arange(1, NUM_ITEMS + 1) * 10
CLASSES = np.random.default_rng(0).integers(0, NUM_CLASSES, NUM_ITEMS)


def retrained(day: int, dim: int = DIM) -> ItemVectors:
    """What a run of that day gives: the same items about the same centres, moved a little, in a basis of its own. Two
    items are new, and two had no data, from day 1 on."""
    generator = np.random.default_rng(7)
    rows = 1.5 * generator.standard_normal((NUM_CLASSES, dim))[CLASSES] + generator.standard_normal((NUM_ITEMS, dim))
    own = np.random.default_rng(100 + day)
    rows += 0.15 * own.standard_normal(rows.shape)
    rows = (rows @ np.linalg.qr(own.standard_normal((dim, dim)))[0]).astype(np.float32)
    evidence = np.ones(NUM_ITEMS, dtype=bool)
    present = np.ones(NUM_ITEMS, dtype=bool)
    if day == 0:
        present[:2] = False
    else:
        evidence[2:4] = False
    return ItemVectors(IDS[present], rows[present], evidence=evidence[present])


def publish(store_url: str, day: int, name: str = "items", settings: Any = None, **options: Any) -> str:
    """Through the stage, gate and all; the version."""
    store = open_store(store_url)
    parent = store.collection(name).current()
    end = publish_candidate(
        store,
        name,
        RefreshRequest(retrained(day, **options), settings or Settings(), parent_version=parent, model="bpr"),
    )
    assert end.version is not None
    if end.status == "held":
        assert "dim" in options, end.reasons
        store.collection(name).promote(end.version, "another dim, consumers were told", override_gate=True)
    return end.version


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving.serving(tmp_path_factory.mktemp("consumers"), "vectors") as served:
        yield served


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Where a downstream team works: the examples and labels of all items but every seventh."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kept = np.arange(NUM_ITEMS) % 7 != 0
    names = [f"genre {number}" for number in CLASSES[kept]]
    pq.write_table(pa.table({"item": IDS[kept], "label": names}), tmp_path / "labels.parquet")
    return tmp_path


Run = Callable[..., list[dict[str, Any]]]


def test_the_example_of_the_client_runs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    if open_store(served.settings.store_url).collection("items").current() is None:
        publish(served.settings.store_url, 0)
    for name, value in served.environment(EVENKEEL_API_KEY=served.key).items():
        monkeypatch.setenv(name, value)
    run_example("service.client.client.Client")


@pytest.fixture
def run(served: Served, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example's ``main`` with these arguments: what it prints, one object per line, or its error. (The guide's
    test starts them as processes.)"""
    monkeypatch.chdir(workplace)
    for name, value in served.environment(EVENKEEL_API_KEY=served.key).items():
        monkeypatch.setenv(name, value)

    def execute(example: str, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        spec = importlib.util.spec_from_file_location("example", example)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [example, *arguments])
        assert module.main() == code
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()] if code == 0 else [{"error": said.err}]

    return execute


def environment(served: Served) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return served.environment(PATH=path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def test_the_sklearn_consumer_survives_refreshes(served: Served, run: Run) -> None:
    store_url = served.settings.store_url
    publish(store_url, 0, "films")
    example = "examples/consumer_sklearn.py"
    (trained,) = run(example, "train", "films", "labels.parquet", "model.npz")
    assert trained["trained_on"] == "v000001"
    (day0,) = run(example, "score", "films", "labels.parquet", "model.npz")
    assert day0["accuracy"] > 0.85
    for day in (1, 2, 3):
        publish(store_url, day, "films")
    (later,) = run(example, "score", "films", "labels.parquet", "model.npz")
    assert later["version"] == "v000004"
    assert later["accuracy"] > 0.95 * day0["accuracy"]
    assert (day0["missing"], later["missing"]) == (1, 0)  # one of the two new items is labelled
    # A new generation is not scored as if nothing had happened; pinned, the old one goes on.
    new = publish(store_url, 0, "films", dim=24)
    (refused,) = run(example, "score", "films", "labels.parquet", "model.npz", code=3)
    assert f"version {new} is of anchor generation 2" in refused["error"]
    pinned = ("--version", later["version"])
    assert run(example, "score", "films", "labels.parquet", "model.npz", *pinned) == [later]


def test_without_the_stage_the_same_consumer_breaks(served: Served, run: Run) -> None:
    """What the numbers above are worth: the same refresh as the run gave it, not aligned."""
    store = open_store(served.settings.store_url)
    publish(served.settings.store_url, 0, "raw")
    example = "examples/consumer_sklearn.py"
    run(example, "train", "raw", "labels.parquet", "model.npz")
    collection = store.collection("raw")
    rows = retrained(1)
    collection.publish(collection.write(rows, parent="v000001"), "v000001")
    (broken,) = run(example, "score", "raw", "labels.parquet", "model.npz")
    assert broken["version"] == "v000002"
    assert broken["accuracy"] < 0.5


def test_the_torch_consumer_scores_each_refresh_once(served: Served, workplace: Path, run: Run) -> None:
    store_url = served.settings.store_url
    publish(store_url, 0, "songs")
    example = "examples/consumer_torch.py"
    run(example, "train", "songs", "labels.parquet", "model.safetensors")
    command = [sys.executable, example, "watch", "songs", "labels.parquet", "model.safetensors"]
    watching = subprocess.Popen(
        [*command, "--polls", "100000", "--seconds", "0.05"],
        cwd=workplace, env=environment(served), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watching.stdout is not None
        told = [json.loads(watching.stdout.readline())]
        for day in (1, 2):
            publish(store_url, day, "songs")
            told.append(json.loads(watching.stdout.readline()))
        publish(store_url, 0, "songs", dim=24)
        assert watching.stdout.read() == ""
        assert watching.wait(300) == 3
    finally:
        watching.kill()
        watching.wait()
        assert watching.stdout is not None
        watching.stdout.close()
    assert [one["version"] for one in told] == ["v000001", "v000002", "v000003"]
    assert told[0]["accuracy"] > 0.85
    assert min(one["accuracy"] for one in told[1:]) > 0.95 * told[0]["accuracy"]


def test_the_guide_does_as_it_says(served: Served, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/guides/consumers.md, in order: shell as it stands, Python in one session."""
    for day in (0, 1):
        publish(served.settings.store_url, day)
    monkeypatch.chdir(workplace)
    for name, value in served.environment(EVENKEEL_API_KEY=served.key).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", environment(served)["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    guide = (ROOT / "docs" / "guides" / "consumers.md").read_text("utf-8")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"sh", "python"}
    session: dict[str, Any] = {}
    try:
        for kind, text in blocks:
            if kind == "python":
                exec(compile(text, "docs/guides/consumers.md", "exec"), session)
                continue
            for command in text.replace("\\\n", " ").splitlines():
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    finally:
        if "client" in session:
            session["client"].close()
    assert (workplace / "items.parquet").exists()
