"""Specs on the command line: what is wrong is named; validate says what a run would take, infer proposes a dataset."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import csv

from tests.service import serving
from tests.service.serving import Run, Served
from trainer.runs.directory import write_run
from trainer.spec import parse_dataset, parse_job

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {kind: dnn}\nname: x\ndataset: {name: clicks}\nepohcs: 2\n", "no such field: did you mean epochs?"),
        (
            "model: {kind: item2vec}\nregularizers: {dropout: 0.1}\nname: x\ndataset: {name: clicks}\n",
            "not available yet",
        ),
        ("a: [1\n", "is not YAML"),
        ("", "is empty"),
        ("- 1\n", "mapping of fields"),
    ],
)
def test_bad_specs(run: Run, tmp_path: Path, text: str, says: str):
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    for command in ("submit", "validate"):
        done = run(command, str(file))
        assert done.code == 2
        assert str(file) in done.err
        assert says in done.err


def test_a_file_that_is_not_there(run: Run, tmp_path: Path):
    done = run("validate", str(tmp_path / "no.yaml"))
    assert (done.code, done.out) == (2, "")
    assert "No such file" in done.err


def test_submit_and_add_of_the_wrong_document(run: Run, served: Served, tmp_path: Path):
    dataset = serving.write_spec(tmp_path / "d.yaml", serving.dataset(served.data))
    job = serving.write_spec(tmp_path / "j.yaml", serving.job())
    done = run("submit", str(dataset))
    assert done.code == 1
    assert f"evenkeel datasets add {dataset}" in done.err
    done = run("datasets", "add", str(job))
    assert done.code == 1
    assert "datasets infer" in done.err


def test_validate_shows_what_a_run_would_take(run: Run, served: Served, spec: Path, tmp_path: Path):
    alone = serving.write_spec(tmp_path / "alone.yaml", serving.job())
    for file in (spec, alone):
        done = run("validate", str(file))
        assert done.code == 0, done.err
        assert done.out.endswith("valid\n")
        assert ["item", "4"] in [line[:2] for line in done.lines]
        assert "table item: 4 rows x (dim 16 x (4 for the weight" in done.err
        answer = run("validate", str(file), "--json").json
        assert answer["valid"] is True
        assert answer["estimate"]["steps_per_epoch"] == 1
    assert run("jobs", "--name", "alone", "--json").json == []


def test_validate_fires_the_job_of_a_schedule_today(run: Run, served: Served, tmp_path: Path):
    today = datetime.now(UTC).date()
    for days, ends in ((0, True), (3, False)):
        folder = tmp_path / str(days)
        day = folder / f"day={today - timedelta(days=days)}"
        day.mkdir(parents=True)
        shutil.copy(served.data / "clicks.parquet", day)
        dataset = serving.dataset(served.data) | {"uri": str(folder), "partition": "day"}
        job = serving.job() | {"dataset": {"name": "clicks", "window": {"start": "{firing_date}", "days": 2}}}
        done = run("validate", str(serving.write_spec(tmp_path / "daily.yaml", dataset, job)))
        assert (done.code == 0, done.out.endswith("valid\n")) == (ends, ends), done.err
    assert str(today - timedelta(days=3)) in done.err


def test_validate_takes_numbers_in_the_place_of_data(run: Run, served: Served, tmp_path: Path):
    dataset = serving.dataset(served.data) | {"uri": "not/there.parquet"}
    file = str(serving.write_spec(tmp_path / "large.yaml", dataset, serving.job()))
    numbers = ["--rows", "100000000", "--ids", "user=30000000", "--ids", "item=20000000"]
    answer = run("validate", file, *numbers, "--json").json["estimate"]
    assert answer["rows"] == 100_000_000
    assert {name: table["rows"] for name, table in answer["tables"].items()} == {"user": 30_000_002, "item": 20_000_002}
    assert answer["peak_memory_bytes"] > answer["table_bytes_per_rank"] >= 50_000_000 * 16 * 4
    assert "table rows = numbers given" in run("validate", file, *numbers).err
    for arguments, says in (
        (numbers[:4], "no number of ids for item: give one for each table of the job (user, item)"),
        ([*numbers, "--ids", "brand=5"], "no table brand: give one for each table of the job (user, item)"),
        ([*numbers[:2], "--ids", "user=many"], "--rows and --ids go together"),
        (numbers[2:], "--rows and --ids go together"),
    ):
        done = run("validate", file, *arguments)
        assert (done.code, says in done.err) == (2, True), done.err
    assert run("validate", str(serving.write_spec(tmp_path / "job.yaml", serving.job())), *numbers).code == 2


def test_validate_compares_a_job_with_its_parent(run: Run, served: Served, tmp_path: Path):
    dataset, parent = serving.dataset(served.data), served.home / "runs" / "parent"
    (parent / "checkpoints").mkdir(parents=True)
    features = {name: one for name, one in dataset["features"].items() if name != "user"} | {"who": {"column": "user"}}
    write_run(
        parent, run_id="parent", job=parse_job(serving.job() | {"model": {"kind": "dnn"}}), store_url="",
        dataset=parse_dataset(dataset | {"features": features}),
    )  # fmt: skip
    job = serving.job() | {"model": {"kind": "dnn"}, "init_from": {"job": "parent"}}
    done = run("validate", str(serving.write_spec(tmp_path / "spec.yaml", dataset, job)))
    assert done.code == 2
    assert "features.who: the parent read it, and the dataset has no 'who'" in done.err
    assert "{renamed: {who: user}}" in done.err
    job["init_from"]["renamed"] = {"who": "user"}
    done = run("validate", str(serving.write_spec(tmp_path / "renamed.yaml", dataset, job)))
    assert done.code == 0, done.err
    assert "'user' continues with what the parent learned of 'who'" in done.err
    job["init_from"] = {"job": "elsewhere"}
    done = run("validate", str(serving.write_spec(tmp_path / "elsewhere.yaml", dataset, job)))
    assert done.code == 0
    assert "valid, but the parent in init_from was not checked: init_from: init_from.job 'elsewhere'" in done.out


def test_validate_refuses_what_does_not_fit_with_the_arithmetic(run: Run, served: Served, spec: Path, tmp_path: Path):
    """Alone, with the service's dataset, and of the service itself; a submission is checked when its rows are known."""
    small = {"resources": {"memory_bytes_per_worker": 950_000_000}}
    documents = list(yaml.safe_load_all(spec.read_text()))
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump_all([documents[0], documents[1] | small]))
    alone = serving.write_spec(tmp_path / "alone.yaml", serving.job() | small)
    for file in (both, alone):
        done = run("validate", str(file))
        assert done.code == 2
        assert "resources.memory_bytes_per_worker is 950,000,000: table " in done.err
        assert "peak per rank = tables" in done.err
        assert "allow more: the process and its batches alone do not fit" in done.err


def test_validate_refuses_what_the_gpu_does_not_hold(
    run: Run, served: Served, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.sizing.gpus.machine_gpu_bytes", lambda: 10**6)
    documents = list(yaml.safe_load_all(spec.read_text()))
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump_all([documents[0], documents[1] | {"resources": {"gpus_per_worker": 1}}]))
    done = run("validate", str(both))
    assert done.code == 2
    assert "bytes of its GPU, which has 1,000,000: table " in done.err


def test_validate_counts_what_is_known_of_the_machines_of_the_executor(
    run: Run, served: Served, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    documents = list(yaml.safe_load_all(spec.read_text()))
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump_all([documents[0], documents[1] | {"resources": {"gpus_per_worker": 1}}]))
    monkeypatch.setattr("trainer.sizing.gpus.machine_gpu_bytes", lambda: 10**6)
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "ray_jobs")
    for command in (("validate", str(both)), ("serve", "--port", "0")):
        done = run(*command)
        assert done.code == 2
        assert "EVENKEEL_RAY_ADDRESS is ''" in done.err
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", "http://127.0.0.1:9")
    assert run("validate", str(both)).code == 0, "the GPUs are the cluster's"


def test_infer_proposes_a_manifest_that_can_be_registered(run: Run, served: Served, tmp_path: Path):
    serving.dataset(served.data, "found")
    done = run("datasets", "infer", str(served.data / "found.parquet"), "--name", "proposed")
    assert done.code == 0, done.err
    file = tmp_path / "proposed.yaml"
    file.write_text(done.out)
    assert run("datasets", "add", str(file)).code == 0
    document = run("datasets", "infer", str(served.data / "found.parquet"), "--json").json
    assert document["label"] == {"column": "click"}
    missing = run("datasets", "infer", str(tmp_path / "no.parquet"))
    assert missing.code == 1
    assert "no such file" in missing.err


def test_validate_names_what_does_not_fit_the_dataset(run: Run, served: Served, tmp_path: Path):
    job = serving.job() | {"sse": {"colour": {"probability": 0.1}}}
    both = serving.write_spec(tmp_path / "both.yaml", serving.dataset(served.data), job)
    alone = serving.write_spec(tmp_path / "alone.yaml", job)
    for file in (both, alone):
        done = run("validate", str(file))
        assert done.code == 2
        assert "sse.colour" in done.err
        assert "no such feature" in done.err


def test_validate_opens_the_files_of_a_dataset_alone(run: Run, served: Served, tmp_path: Path):
    dataset = serving.dataset(served.data, "alone")
    assert run("validate", str(serving.write_spec(tmp_path / "good.yaml", dataset))).code == 0
    done = run("validate", str(serving.write_spec(tmp_path / "gone.yaml", dataset | {"uri": "gone.parquet"})))
    assert (done.code, "gone.parquet" in done.err) == (2, True)
    done = run("validate", str(serving.write_spec(tmp_path / "column.yaml", dataset | {"label": {"column": "clik"}})))
    assert done.code == 2
    assert "label.column: no column 'clik'" in done.err
    assert "remedy: name a column of the file" in done.err


@pytest.mark.parametrize(("ending", "write"), [("parquet", pq.write_table), ("csv", csv.write_csv)])
def test_validate_refuses_labels_of_text(run: Run, tmp_path: Path, ending: str, write: Any):
    """Labels that are no numbers are named with the remedy; numbers as text, and one bad row of several, are not."""
    rows, job = tmp_path / f"rows.{ending}", serving.job() | {"dataset": {"name": "shop"}}
    dataset = serving.dataset(tmp_path, "shop") | {"uri": str(rows), "label": {"column": "label"}}
    for labels, code in ((["yes", "no"], 2), (["1", "0"], 0), (["1", "no"], 0)):
        write(pa.table({"user": ["a", "b"], "item": ["x", "y"], "label": labels}), rows)
        for documents in ((dataset,), (dataset, job)):
            done = run("validate", str(serving.write_spec(tmp_path / "spec.yaml", *documents)))
            assert done.code == code, done.err
            assert ("column 'label', row 0: the label is 'yes', and labels are numbers" in done.err) == (code == 2)
            assert ("== 'yes').astype(int)" in done.err) == (code == 2)


def test_validate_asks_no_broker_of_a_topic(run: Run, served: Served, tmp_path: Path):
    """Its rows are not known, and its columns are those that the dataset declares."""
    columns = {"user": "int64", "item": "string", "click": "int64"}
    dataset = {
        "name": "shop", "uri": "kafka://127.0.0.1:1/clicks", "messages": {"columns": columns},
        "features": {"user": {"type": "id"}, "item": {"type": "id"}}, "label": {"column": "click"},
    }  # fmt: skip
    job = {
        "name": "follow", "dataset": {"name": "shop", "one_pass": True, "follow": {}}, "model": {"kind": "dnn"},
        "optimizer": {"kind": "sgd"}, "tables": {"user": {"capacity": 100}, "item": {"capacity": 100}},
        "evaluation": {"split": {"validation": 0, "test": 0}},
    }  # fmt: skip
    assert run("validate", str(serving.write_spec(tmp_path / "dataset.yaml", dataset))).code == 0
    assert run("validate", str(serving.write_spec(tmp_path / "job.yaml", dataset, job))).code == 0


def test_a_file_without_rows_is_not_valid(run: Run, served: Served, tmp_path: Path):
    empty = served.data / "norows.parquet"
    dataset = serving.dataset(served.data, "norows") | {"uri": str(empty)}
    pq.write_table(pq.read_table(serving.dataset(served.data)["uri"]).slice(0, 0), empty)
    job = serving.job() | {"dataset": {"name": "norows"}}
    done = run("validate", str(serving.write_spec(tmp_path / "norows.yaml", dataset, job)))
    assert (done.code, "has no rows" in done.err) == (2, True)
    assert run("datasets", "add", str(tmp_path / "norows.yaml")).code == 0
    done = run("validate", str(serving.write_spec(tmp_path / "job.yaml", job)))
    assert (done.code, "has no rows" in done.err) == (2, True)
    assert run("datasets", "delete", "norows").out == "dataset norows deleted\n"
    done = run("datasets", "delete", "norows")
    assert (done.code, "remedy: 'evenkeel datasets list'" in done.err) == (1, True)


def test_relative_paths_are_taken_from_here(run: Run, served: Served, monkeypatch: pytest.MonkeyPatch):
    """The service runs in another directory: what it is told must not depend on either."""
    (served.data / "edges").mkdir()
    (served.data / "edges" / "near.csv").write_text("a,b\n1,2\n")
    (served.data / "edges" / "items.csv").write_text("item,brand\n1,2\n")
    graphs = {"near": {"uri": "edges/near.csv", "source": "a", "target": "b", "of": "user"}}
    items = {"uri": "edges/items.csv", "features": {"brand": {"type": "id"}}}
    document = serving.dataset(served.data, "near") | {"uri": "near.parquet", "graphs": graphs, "items": items}
    monkeypatch.chdir(served.data)
    file = serving.write_spec(served.data / "near.yaml", document)
    done = run("datasets", "add", str(file))
    assert done.code == 0, done.err
    listed = {one["name"]: one for one in run("datasets", "list", "--json").json}
    assert listed["near"]["uri"] == str(served.data / "near.parquet")
    assert listed["near"]["graphs"]["near"]["uri"] == str(served.data / "edges" / "near.csv")
    assert listed["near"]["items"]["uri"] == str(served.data / "edges" / "items.csv")
    assert ["near", str(served.data / "near.parquet"), "user, item"] in run("datasets", "list").lines
    assert yaml.safe_load(run("datasets", "profile", "near").out)["rows"] == 3
    assert run("datasets", "profile", "near", "--json").json["rows"] == 3
