"""Exports: for every model a folder that says what the run says, needs no torch, and shows what was changed in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.support.examples import run_example
from tests.support.model_specs import model_spec
from trainer.checkpoint.format import latest_valid
from trainer.data.errors import DataError
from trainer.inference.export import dense_part, export, main
from trainer.inference.exported_model import Exported
from trainer.inference.manifest import SealError, seal
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.models.registry import MODELS
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

# A training of each kind of model.
pytestmark = pytest.mark.slow

EXPORTED = [kind for kind in MODELS if kind != "lightgcn"]
"""Kinds that can be exported: lightgcn's rows are smoothed over the graph of its training rows."""

NUM_ROWS = 240
SIZES = {
    "sasrec": {"length": 5, "init": {"kind": "hash", "std": 0.1}},
    "gru4rec": {"length": 5, "gru_layers": 2},
    "hstu": {"length": 5, "heads": 2, "init": {"kind": "hash", "std": 0.1}},
    "item2vec": {"window": 2},
    "dnn": {"batch_norm": True, "residual": True},
    "autoint": {"attention_layers": 2, "attention_units": 4},
    "mmoe": {"experts": 2, "tower_hidden": [4], "batch_norm": True},
    "ple": {"shared_experts": 1, "tower_hidden": []},
    "esmm": {"tasks": {"buy": {"given": "click"}}},
    "finalmlp": {"gate_hidden": [4], "fusion_heads": 2, "second_gate": ["item", "tags"]},
}


def write_rows(folder: Path) -> Path:
    rng = np.random.default_rng(5)
    user, item = rng.integers(0, 12, NUM_ROWS), rng.integers(0, 30, NUM_ROWS)
    rows = {
        "user": [f"u{one}" for one in user],
        "item": item,
        "tags": [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(NUM_ROWS)],
        "price": pa.array(rng.lognormal(size=NUM_ROWS), mask=rng.random(NUM_ROWS) < 0.1),
        "pos": np.arange(NUM_ROWS),
        "click": (rng.random(NUM_ROWS) < 0.2 + 0.3 * (item % 3)).astype(np.int64),
    }
    rows["buy"] = (rng.random(NUM_ROWS) < 0.4 * rows["click"]).astype(np.int64)
    rows["times"] = pa.array(rng.poisson(1.0 + item % 3), mask=rng.random(NUM_ROWS) < 0.2)
    rows["shares"] = [rng.random(len(tags)).tolist() for tags in rows["tags"]]
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    pq.write_table(
        pa.table(
            {
                "item": np.arange(25),
                "kinds": [[one % 4, 4 + one % 3] for one in range(25)],
                "known": np.zeros(25, dtype=np.int64),
            }
        ),
        folder / "items.parquet",
    )
    return folder / "rows.parquet"


def dataset_at(path: Path, kind: str):
    history = {"previous": "item", "by": "user", "order": "pos", "length": 4}
    kinds = {"uri": "items.parquet", "on": "item", "column": "kinds", "take": "all", "timestamp": "known"}
    features = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "tags": {"type": "id_list", "pooling": "sum"},
        "kinds": {"type": "id_list", "join": kinds},
        "history": {"type": "id_list", "shares": "item", "derive": history},
    }
    if model_spec(kind).reads_numbers:
        features["price"] = {"type": "dense", "transform": "quantile"}
    if model_spec(kind).pools:
        features["tags"] |= {"weights": "shares"}
    items = {}
    if kind == "two_tower":
        items = {"items": {"uri": "items.parquet", "features": {"kinds": {"type": "id_list"}}}}
        del features["kinds"]
    label = {"label": {"column": "click"}}
    if model_spec(kind).reads_labels:
        label = {
            "labels": {
                "click": {"column": "click"},
                "buy": {"column": "buy", "mask": "click"},
                "times": {"value": "times", "loss": "poisson"},
            }
        }
        label["labels"]["buy"].pop("mask" if kind == "esmm" else "", None)
    return parse_dataset({"name": "rows", "uri": str(path), "features": features, "order": "pos", **items, **label})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """``trained(kind)``: a run of a few steps with this model, and the rows it was trained on."""
    folder = tmp_path_factory.mktemp("exports")
    path, runs = write_rows(folder), {}

    def make(kind: str):
        if kind not in runs:
            model = {"kind": kind, "loss": "bce", "embedding_dim": 4, "init": {"kind": "hash", "std": 0.3}}
            model |= SIZES.get(kind, {})
            job = {
                "name": "small",
                "dataset": {"name": "rows"},
                "model": model
                | ({"hidden": [8]} if kind not in ("fm", "bpr", "mf", "item2vec", "sasrec", "gru4rec", "hstu") else {}),
                "optimizer": {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.01},
                "dense_optimizer": {"learning_rate": 0.05},
                "batch_size": 48,
                "evaluation": {"split": {"kind": "per_user_last"}},
            }
            directory = write_run(
                folder / kind,
                run_id=kind,
                job=parse_job(job),
                dataset=dataset_at(path, kind),
                store_url=str(folder / "store"),
            )
            assert execute(read_run(directory), start_ranks) == 0
            runs[kind] = read_run(directory)
        return runs[kind]

    return make


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory: pytest.TempPathFactory):
    """``exported(kind)``: (the folder of its run's export, which stays as it is; what the export said)."""
    folder, found = tmp_path_factory.mktemp("exported"), {}

    def make(kind: str):
        if kind not in found:
            found[kind] = folder / kind, export(trained(kind).directory, folder / kind)
        return found[kind]

    return make


def rows_for(run) -> pa.Table:
    """Rows as an export reads them: histories given, unknown ids and empty lists among them."""
    rows = pq.read_table(run.dataset.uri)
    items = rows["item"].to_pylist()
    items[3] = 10**9
    lists = [items[max(0, number - number % 7) : number] for number in range(NUM_ROWS)]
    if run.job.model.reads_sequences:
        return pa.table({"item": pa.array(lists, pa.list_(pa.int64()))})
    columns = rows.set_column(1, "item", pa.array(items, pa.int64())).drop(["pos", "click"])
    return columns.append_column("history", pa.array(lists, pa.list_(pa.int64())))


def test_the_example_of_the_docstring_runs(trained, exported):
    folder, _ = exported("dnn")
    run_example("trainer.inference.exported_model.Exported", folder=folder, rows=rows_for(trained("dnn")))


@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_exported_scores_as_the_run_does(trained, exported, kind):
    run = trained(kind)
    out, report = exported(kind)
    assert report["onnx"]["written"], report["onnx"]
    assert report["onnx"]["difference"] <= 1e-5
    rows = rows_for(run)
    expected, found = Predictor(run.directory, k=5).predict(rows), Exported(out, k=5).predict(rows)
    assert found.schema.equals(expected.schema)
    if run.job.model.reads_sequences:
        for mine, theirs in zip(found["scores"].to_pylist(), expected["scores"].to_pylist(), strict=True):
            # Attention and layer norms are sums of float32 in another order.
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=2e-6)
        assert found["items"].to_pylist() == expected["items"].to_pylist()
        assert sum(len(items) for items in found["items"].to_pylist()) > 4 * NUM_ROWS
        return
    for name in found.column_names:
        rtol = 1e-5 if name.startswith("prediction") else 0  # an exponential of what differs by 1e-6
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=rtol, atol=1e-6)
    assert found[0].to_numpy().std() > 0.01
    for size in (0, 1):
        assert len(Exported(out).predict(rows.slice(7, size))) == size


@pytest.mark.parametrize("kind", EXPORTED)
def test_torch_program_is_the_same_model(trained, exported, kind):
    run = trained(kind)
    out, _ = exported(kind)
    program = torch.export.load(out / "dense.pt2").module()
    part = dense_part(Predictor(run.directory))
    for rows in (2, 5, 9):
        with torch.no_grad():
            torch.testing.assert_close(program(*part.example(rows)), part(*part.example(rows)), rtol=0, atol=1e-6)
    saved, weights = latest_valid(run.checkpoints).read_dense(), load_file(out / "dense.safetensors")
    assert {f"model/{name}" for name in weights} == {name for name in saved if name.startswith("model/")}
    for name, value in weights.items():
        torch.testing.assert_close(value, saved[f"model/{name}"], rtol=0, atol=0)


def test_nothing_in_it_is_a_pickle(exported):
    out, _ = exported("dnn")
    names = sorted(path.name for path in out.iterdir())
    tables = [f"table-{name}.arrow" for name in ("item", "kinds", "tags", "user")]
    assert names == ["dense.onnx", "dense.pt2", "dense.safetensors", "join-kinds.parquet", "manifest.json", *tables]
    with zipfile.ZipFile(out / "dense.pt2") as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    assert len(contents) > 5
    for name, content in contents.items():
        # How a pickle of any protocol from 2 on begins, and what torch.save writes.
        assert not content.startswith((b"\x80", b"PK")), name
        assert not name.endswith((".pkl", ".pt")) or not content, name


def test_files_are_for_whom_the_umask_lets(exported):
    """A server that runs as another user reads all of it or nothing."""
    folder, _ = exported("dnn")
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_tables_have_raw_ids_and_rows_as_they_are_read(trained, exported):
    run = trained("dnn")
    out, _ = exported("dnn")
    predictor = Predictor(run.directory)
    with pa.ipc.open_file(out / "table-user.arrow") as file:
        table = file.read_all()
    assert table.column_names == ["id", "vector"]
    assert table["id"].to_pylist()[:2] == [None, None]
    assert set(table["id"].to_pylist()[2:]) == {f"u{number}" for number in range(12)}
    vectors = np.array(table["vector"].to_pylist(), dtype=np.float32)
    np.testing.assert_array_equal(vectors, predictor.tables.weight("user").numpy())
    stored, _ = predictor.checkpoint.read_rows("user")
    assert np.abs(vectors - stored.numpy()).max() > 1e-4  # momentum and decay were owed


@pytest.mark.process
def test_it_needs_neither_torch_nor_the_run(trained, exported, tmp_path):
    run = trained("dnn")
    rows = rows_for(run).slice(0, 20)
    pq.write_table(rows, tmp_path / "rows.parquet")
    code = """
import sys, pyarrow.parquet as pq
from trainer.inference.exported_model import Exported
scores = Exported(sys.argv[1]).predict(pq.read_table(sys.argv[2]))
assert not {"torch", "torchrec", "ray"} & set(sys.modules), "torch was imported"
pq.write_table(scores, sys.argv[3])
"""
    moved = shutil.copytree(exported("dnn")[0], tmp_path / "elsewhere")
    subprocess.run(
        [sys.executable, "-c", code, str(moved), str(tmp_path / "rows.parquet"), str(tmp_path / "scores.parquet")],
        check=True,
        cwd=Path(__file__).parents[3],
    )
    expected = Predictor(run.directory).predict(rows)["logit"].to_numpy()
    np.testing.assert_allclose(pq.read_table(tmp_path / "scores.parquet")["logit"].to_numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["dense.onnx", "table-item.arrow", "dense.safetensors", "manifest.json"])
def test_what_was_changed_is_not_used(exported, tmp_path, name):
    shutil.copytree(exported("dnn")[0], tmp_path / "out")
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SealError, match=f"{name} was changed"):
        Exported(tmp_path / "out")
    path.unlink()
    with pytest.raises(SealError, match=f"{name} cannot be read"):
        Exported(tmp_path / "out")


def test_an_export_of_another_format_says_so(exported, tmp_path):
    shutil.copytree(exported("dnn")[0], tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())["manifest"]
    files = [entry["name"] for entry in manifest.pop("files")]
    seal(tmp_path / "out", manifest | {"format_version": 9}, files)
    with pytest.raises(SealError, match=r"version 9, this version reads evenkeel-export 1 and 2: use the version"):
        Exported(tmp_path / "out")


def test_a_manifest_written_anew_is_known_by_its_sha256(exported, tmp_path):
    out, report = exported("dnn")
    shutil.copytree(out, tmp_path / "out")
    Exported(tmp_path / "out", sha256=report["sha256"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())["manifest"]
    files = [entry["name"] for entry in manifest.pop("files")]
    seal(tmp_path / "out", manifest | {"step": 1}, files)
    Exported(tmp_path / "out")
    with pytest.raises(SealError, match=f"not {report['sha256']}: it is another export"):
        Exported(tmp_path / "out", sha256=report["sha256"])


def test_what_cannot_be_exported_leaves_nothing(trained, tmp_path, capsys, monkeypatch):
    run = trained("dnn")
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="is there already"):
        export(run.directory, tmp_path / "there")
    assert main([str(run.directory), str(tmp_path / "out"), "--checkpoint", "999"]) == 1
    assert "holds no checkpoint of step 999" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "table")

    monkeypatch.setattr("trainer.inference.export.write_program", full)
    assert main([str(run.directory), str(tmp_path / "out")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_export_needs_histories_as_a_column(trained, exported):
    run = trained("dnn")
    with pytest.raises(DataError, match=r"no column 'history' .*the last 4 of 'item', oldest first"):
        Exported(exported("dnn")[0]).predict(pq.read_table(run.dataset.uri))


def test_a_model_that_onnx_cannot_say_is_exported_all_the_same(trained, tmp_path, monkeypatch, capsys):
    def unknown(part: object) -> bytes:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("trainer.inference.export.onnx_bytes", unknown)
    assert main([str(trained("dnn").directory), str(tmp_path / "out")]) == 0
    assert "no ONNX (RuntimeError: no such operator): use dense.pt2" in capsys.readouterr().out
    assert not (tmp_path / "out" / "dense.onnx").exists()
    with pytest.raises(SealError, match=r"has no dense.onnx \(RuntimeError: no such operator\): load dense.pt2"):
        Exported(tmp_path / "out")
