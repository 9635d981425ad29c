"""The command line against a real service: output for people, pipes and programs; exit codes; errors with a remedy."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from service.cli import main as cli_main
from service.cli import output
from service.client import Client
from tests.service import published, serving
from tests.service.serving import EVENKEEL, Run, Served

pytestmark = pytest.mark.process


@pytest.fixture
def spec(served: Served, tmp_path: Path) -> Path:
    """A file with a dataset and a job, as examples have it."""
    return write_spec(tmp_path / "clicks.yaml", serving.dataset(served.data), serving.job("from-cli"))


def write_spec(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_submit_prints_the_id_alone_on_stdout(run: Run, spec: Path):
    done = run("submit", str(spec))
    assert done.code == 0
    assert re.fullmatch(r"job_\w+\n", done.out)
    assert f"evenkeel logs {done.out.strip()} -f" in done.err
    assert run("job", done.out.strip(), "--json").json["name"] == "from-cli"


def test_submit_registers_nothing_in_passing(run: Run, served: Served, tmp_path: Path):
    file = write_spec(
        tmp_path / "new.yaml",
        serving.dataset(served.data, "new"),
        serving.job() | {"dataset": {"name": "new"}},
    )
    done = run("submit", str(file))
    assert done.code == 1
    assert done.out == ""
    assert "dataset.name" in done.err
    assert f"remedy: evenkeel datasets add {file}" in done.err
    assert "new" not in [one["name"] for one in run("datasets", "list", "--json").json]
    assert run("datasets", "add", str(file)).code == 0
    assert run("submit", str(file)).code == 0


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ({"state": "succeeded", "publication": {"status": "none", "reasons": []}}, 0, "succeeded"),
        ({"state": "succeeded", "publication": {"status": "published", "version": "v000004"}}, 0, "published v000004"),
        (
            {"state": "succeeded", "publication": {"status": "held", "version": "v000005", "reasons": ["cosine 0.1"]}},
            3,
            "cosine 0.1",
        ),
        ({"state": "failed", "error": {"code": "x", "message": "NaN loss", "remedy": "lower it"}}, 1, "lower it"),
        ({"state": "cancelled"}, 1, "cancelled"),
    ],
)
def test_submit_wait_exits_by_what_became_of_it(
    run: Run, served: Served, spec: Path, ending: dict[str, Any], code: int, says: str
):
    def end() -> None:
        with Client(served.url, served.key) as client:
            deadline = time.monotonic() + 300
            while time.monotonic() < deadline:
                waiting = client.jobs(state="queued", name="from-cli", limit=1)
                if waiting:
                    served.set_job(waiting[0]["id"], **ending)
                    return
                time.sleep(0.05)

    for job in run("jobs", "--name", "from-cli", "--state", "queued", "--json").json:
        run("cancel", job["id"])
    ending_thread = threading.Thread(target=end)
    ending_thread.start()
    done = run("submit", str(spec), "--wait")
    ending_thread.join()
    assert done.code == code, done
    assert says in done.out
    assert f"  {ending['state']}" in done.err


def test_a_job_that_prepares_says_how_far_it_is(run: Run, served: Served, spec: Path):
    job_id = run("submit", str(spec)).out.strip()
    prepared = {"stage": "read", "rows": 4_000_000, "total_rows": 20_000_000, "rows_per_second": 210_000.4}
    served.set_job(job_id, state="starting", preparation=prepared)
    assert "reading 4,000,000 of 20,000,000 rows, 210,000 rows/s" in run("job", job_id).out
    served.set_job(job_id, preparation=prepared | {"stage": "write", "total_rows": None})
    assert run("jobs").lines[1][3] == "writing 4,000,000 rows, 210,000 rows/s"
    assert run("job", job_id, "--json").json["preparation"]["rows"] == 4_000_000


def test_jobs_for_pipes_and_programs(run: Run, served: Served, spec: Path):
    job_id = run("submit", str(spec)).out.strip()
    served.set_job(job_id, state="running", progress={"epoch": 1, "epochs": 2})
    served.add_metrics(job_id, [0.71234])
    lines = run("jobs", "--state", "running").lines
    assert lines[0][:5] == ["ID", "NAME", "STATE", "PROGRESS", "AUC"]
    assert lines[1][:5] == [job_id, "from-cli", "running", "epoch 1/2", "0.7123"]
    assert [job["id"] for job in run("jobs", "--state", "running", "--json").json] == [job_id]
    shown = run("job", job_id).out
    assert "epoch 1/2" in shown
    assert "0.71234" in shown
    log = served.home / "runs" / job_id / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("first line\n")
    assert run("logs", job_id).out == "first line\n"
    served.set_job(job_id, state="failed", released=True, error={"code": "x", "message": "broke", "remedy": "mend"})
    assert run("logs", job_id, "-f").out == "first line\n"
    assert run("retry", job_id).out == f"{job_id}  queued\n"
    assert run("cancel", job_id, "--json").json["state"] == "cancelled"
    assert run("delete", job_id).out == f"job {job_id} deleted\n"
    assert not log.exists()
    assert run("delete", job_id).code == 1


def test_tables_within_a_metric_are_left_to_the_report(capsys: pytest.CaptureFixture[str]):
    metric = {"epoch": 1, "split": "test", "auc": 0.75, "calibration": [{"rows": 3.0, "prediction": 0.1, "share": 0.2}]}
    job = {"id": "job_1", "name": "n", "state": "succeeded", "metrics": [metric]}
    cli_main._print_job(job, False)
    said = capsys.readouterr().out
    assert "AUC" in said
    assert "0.75" in said
    assert "CALIBRATION" not in said
    assert "prediction" not in said


def test_how_many_workers_attempts_had_is_shown_and_why(capsys: pytest.CaptureFixture[str]):
    job = {"id": "job_1", "name": "n", "state": "running", "attempts": [{"attempt": 1, "workers": 2, "because": None}]}
    cli_main._print_job(job, False)
    assert "attempt 1" not in capsys.readouterr().out
    job["attempts"].append({"attempt": 2, "workers": 1, "because": "no room"})
    cli_main._print_job(job, False)
    assert "attempt 1: 2; attempt 2: 1 (no room)" in " ".join(capsys.readouterr().out.split())


def test_unknown_job(run: Run):
    done = run("job", "job_nothing")
    assert done.code == 1
    assert done.out == ""
    assert "There is no job 'job_nothing'" in done.err


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {kind: dnn}\nname: x\ndataset: {name: clicks}\nepohcs: 2\n", "epohcs: no such field"),
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
        assert done.code == 1
        assert str(file) in done.err
        assert says in done.err


def test_a_file_that_is_not_there(run: Run, tmp_path: Path):
    done = run("validate", str(tmp_path / "no.yaml"))
    assert (done.code, done.out) == (1, "")
    assert "No such file" in done.err


def test_submit_and_add_of_the_wrong_document(run: Run, served: Served, tmp_path: Path):
    dataset = write_spec(tmp_path / "d.yaml", serving.dataset(served.data))
    job = write_spec(tmp_path / "j.yaml", serving.job())
    done = run("submit", str(dataset))
    assert done.code == 1
    assert f"evenkeel datasets add {dataset}" in done.err
    done = run("datasets", "add", str(job))
    assert done.code == 1
    assert "datasets infer" in done.err


def test_validate_shows_what_a_run_would_take(run: Run, served: Served, spec: Path, tmp_path: Path):
    alone = write_spec(tmp_path / "alone.yaml", serving.job())
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


def test_validate_refuses_what_does_not_fit_with_the_arithmetic(run: Run, served: Served, spec: Path, tmp_path: Path):
    """Alone, with the service's dataset, and of the service itself; a submission is checked when its rows are known."""
    small = {"resources": {"memory_bytes_per_worker": 950_000_000}}
    documents = list(yaml.safe_load_all(spec.read_text()))
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump_all([documents[0], documents[1] | small]))
    alone = write_spec(tmp_path / "alone.yaml", serving.job() | small)
    for file in (both, alone):
        done = run("validate", str(file))
        assert done.code == 1
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
    assert done.code == 1
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
    both = write_spec(tmp_path / "both.yaml", serving.dataset(served.data), job)
    alone = write_spec(tmp_path / "alone.yaml", job)
    for file in (both, alone):
        done = run("validate", str(file))
        assert done.code == 1
        assert "sse.colour" in done.err
        assert "no such feature" in done.err


# --- datasets, schedules, keys ---------------------------------------------------------------------------------------


def test_validate_opens_the_files_of_a_dataset_alone(run: Run, served: Served, tmp_path: Path):
    dataset = serving.dataset(served.data, "alone")
    assert run("validate", str(write_spec(tmp_path / "good.yaml", dataset))).code == 0
    done = run("validate", str(write_spec(tmp_path / "gone.yaml", dataset | {"uri": "gone.parquet"})))
    assert (done.code, "gone.parquet" in done.err) == (1, True)
    done = run("validate", str(write_spec(tmp_path / "column.yaml", dataset | {"label": {"column": "clik"}})))
    assert done.code == 1
    assert "label.column: no column 'clik'" in done.err
    assert "remedy: name a column of the file" in done.err


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
    assert run("validate", str(write_spec(tmp_path / "dataset.yaml", dataset))).code == 0
    assert run("validate", str(write_spec(tmp_path / "job.yaml", dataset, job))).code == 0


def test_a_file_without_rows_is_not_valid(run: Run, served: Served, tmp_path: Path):
    empty = served.data / "norows.parquet"
    dataset = serving.dataset(served.data, "norows") | {"uri": str(empty)}
    pq.write_table(pq.read_table(serving.dataset(served.data)["uri"]).slice(0, 0), empty)
    job = serving.job() | {"dataset": {"name": "norows"}}
    done = run("validate", str(write_spec(tmp_path / "norows.yaml", dataset, job)))
    assert (done.code, "has no rows" in done.err) == (1, True)
    assert run("datasets", "add", str(tmp_path / "norows.yaml")).code == 0
    done = run("validate", str(write_spec(tmp_path / "job.yaml", job)))
    assert (done.code, "has no rows" in done.err) == (1, True)
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
    file = write_spec(served.data / "near.yaml", document)
    done = run("datasets", "add", str(file))
    assert done.code == 0, done.err
    listed = {one["name"]: one for one in run("datasets", "list", "--json").json}
    assert listed["near"]["uri"] == str(served.data / "near.parquet")
    assert listed["near"]["graphs"]["near"]["uri"] == str(served.data / "edges" / "near.csv")
    assert listed["near"]["items"]["uri"] == str(served.data / "edges" / "items.csv")
    assert ["near", str(served.data / "near.parquet"), "user, item"] in run("datasets", "list").lines
    assert yaml.safe_load(run("datasets", "profile", "near").out)["rows"] == 3
    assert run("datasets", "profile", "near", "--json").json["rows"] == 3


def test_schedules(run: Run, spec: Path):
    assert "next firing 20" in run("schedules", "add", "nightly", str(spec), "--cron", "0 3 * * *").out
    done = run("schedules", "add", "bad", str(spec), "--cron", "61 * * * *")
    assert done.code == 1
    assert "cron" in done.err
    lines = run("schedules", "list").lines
    assert lines[1][:3] == ["nightly", "0 3 * * *", "UTC"]
    assert run("schedules", "pause", "nightly").code == 0
    assert run("schedules", "list", "--json").json[0]["paused"] is True
    assert "next firing 20" in run("schedules", "resume", "nightly").out
    fired = run("schedules", "trigger", "nightly", "--date", "2026-01-02", "--json").json
    assert fired["firing_date"] == "2026-01-02"
    busy = run("schedules", "trigger", "nightly")
    assert busy.code == 1
    assert "has not ended" in busy.err
    assert run("schedules", "firings", "nightly", "--json").json[-1]["job_id"] == fired["job_id"]
    assert fired["job_id"] in run("schedules", "firings", "nightly").out
    assert run("schedules", "delete", "nightly").code == 0
    assert run("schedules", "trigger", "nightly").code == 1


def test_keys(run: Run, monkeypatch: pytest.MonkeyPatch):
    made = run("keys", "create", "reader", "--scope", "features:read")
    assert re.fullmatch(r"ek_\w+_[\w-]+\n", made.out)
    key_id = re.search(r"key_\w+", made.err)
    assert key_id is not None
    monkeypatch.setenv("EVENKEEL_API_KEY", made.out.strip())
    refused = run("jobs")
    assert refused.code == 1
    assert "remedy: " in refused.err
    assert "jobs:read" in refused.err
    monkeypatch.delenv("EVENKEEL_API_KEY")
    assert key_id[0] in run("keys", "list").out
    assert made.out.strip() not in run("keys", "list", "--json").out
    assert run("keys", "revoke", key_id[0]).code == 0
    monkeypatch.setenv("EVENKEEL_API_KEY", made.out.strip())
    done = run("jobs")
    assert done.code == 1
    assert "admin.key" in done.err


def test_reset_admin_replaces_a_lost_key(run: Run, served: Served):
    file = served.home / "admin.key"
    before = file.read_text()
    try:
        file.write_text("ek_lost_key\n")
        assert run("jobs").code == 1
        done = run("keys", "reset-admin")
        assert done.code == 0, done.err
        assert str(file) in done.out
        assert file.read_text() != before
        assert file.stat().st_mode & 0o777 == 0o600
        assert run("jobs").code == 0
    finally:
        object.__setattr__(served, "key", file.read_text().strip())


@pytest.mark.parametrize("command", [("keys", "reset-admin"), ("retention",)])
@pytest.mark.parametrize(
    ("variables", "code", "says"),
    [
        ({"DATABASE_URL": "postgresql+asyncpg://nobody@127.0.0.1:1/none"}, 1, "EVENKEEL_DATABASE_URL as for serve"),
        ({"DATABASE_URL": "nonsense"}, 1, "EVENKEEL_DATABASE_URL as for serve"),
        ({"MAX_RUNS": "0"}, 2, "EVENKEEL_MAX_RUNS is '0'"),
    ],
)
def test_commands_beside_the_service_say_what_they_cannot_use(
    run: Run, command: tuple[str, ...], variables: dict[str, str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(f"EVENKEEL_{name}", value)
    done = run(*command)
    assert done.code == code
    assert says in done.err


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_versions_fetch_and_promote(run: Run, served: Served, tmp_path: Path):
    first, _ = published.publish(served.settings, "films", seed=1)
    second, _ = published.publish(served.settings, "films", seed=2)
    held = published.hold(served.settings, "films")
    lines = run("versions", "films").lines
    assert [line[:3] for line in lines[1:]] == [
        ["", held, "held"],
        ["*", second, "published"],
        ["", first, "superseded"],
    ]
    assert "mean_cosine 0.10 is below 0.85" in lines[1][-1]
    done = run("fetch", "films", "10", "11", "10")
    assert [line[:2] for line in done.lines[1:]] == [["10", "found"], ["11", "missing"], ["10", "found"]]
    assert f"version {second}, view films_rff, 16 coordinates" in done.err
    items = run("fetch", "films_rff", "10", "11", "--version", first, "--json").json
    assert (items["version"], items["view"]) == (first, "films_rff")
    assert len(items["items"][0]["vector"]) == 16
    assert items["items"][1] == {"id": 11, "status": "missing", "vector": None}
    refused = run("promote", "films", held, "--reason", "trying")
    assert refused.code == 1
    assert "override_gate" in refused.err
    assert run("promote", "films", first, "--reason", "rollback", "--if-current", first).code == 1
    assert run("promote", "films", first, "--reason", "rollback", "--if-current", second).code == 0
    assert run("versions", "films", "--json").json[-1]["state"] == "published"
    for ending in (".parquet", ".arrow"):
        file = tmp_path / f"vectors{ending}"
        assert run("fetch", "films", "10", "11", "-o", str(file)).code == 0
        table = pq.read_table(file) if ending == ".parquet" else pa.ipc.open_file(file).read_all()
        assert table.column("id").to_pylist() == [10, 11]
    assert run("fetch", "films", "10", "-o", str(tmp_path / "vectors.csv")).code == 2


def test_fetch_of_what_is_not_there(run: Run, served: Served):
    published.publish(served.settings, "songs")
    done = run("fetch", "nothing", "1")
    assert done.code == 1
    assert "there is no collection 'nothing'" in done.err
    assert run("fetch", "songs", "x").code == 1
    assert run("versions", "nothing").code == 1


# --- the program itself ----------------------------------------------------------------------------------------------


def test_usage_errors_exit_with_2(run: Run, spec: Path):
    for arguments in (
        ["frobnicate"],
        ["jobs", "--stat", "x"],
        ["job"],
        ["fetch", "items"],
        ["serve", "--role", "chef"],
    ):
        assert run(*arguments).code == 2, arguments


def test_version_and_help(run: Run):
    assert re.fullmatch(r"evenkeel \d+\.\d+\.\d+\n", run("--version").out)
    shown = run("--help").out
    commands = ("serve", "submit", "validate", "jobs", "job", "logs", "cancel", "retry", "schedules", "keys")
    later = (
        "datasets",
        "versions",
        "promote",
        "fetch",
        "train",
        "doctor",
        "predict",
        "export",
        "recipe",
        "search",
        "generate",
    )
    for command in (*commands, *later, "search"):
        assert f" {command} " in shown


def test_no_service(run: Run, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("EVENKEEL_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        done = run("jobs")
    assert (done.code, done.out) == (1, "")
    assert "no service answers" in done.err
    assert "evenkeel serve" in done.err


def test_wrong_key(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EVENKEEL_API_KEY", "ek_wrong_key")
    done = run("jobs")
    assert done.code == 1
    assert done.err.count("unknown, revoked or expired") == 1
    assert done.err.count("reset-admin") == 1


def test_port_taken(served: Served, tmp_path: Path):
    port = served.url.rpartition(":")[2]
    done = subprocess.run(
        [EVENKEEL, "serve", "--port", port],
        env={**os.environ, "EVENKEEL_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(served: Served):
    done = subprocess.run(
        f"set -o pipefail; {EVENKEEL} jobs --json | true",
        shell=True, executable="/bin/bash", env=served.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""


def test_train_hands_its_arguments_to_the_trainer():
    done = subprocess.run([EVENKEEL, "train", "--help"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "--run-dir" in done.stdout


def test_a_command_starts_without_what_others_need():
    heavy = ("numpy", "pydantic", "pyarrow", "sqlalchemy", "fastapi", "yaml", "trainer.spec")
    code = f"import sys; from service.cli import main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cli_imports_no_torch():
    code = """
import sys
sys.argv = ["evenkeel", "--version"]
from service.cli import main, datasets, vectors, serve
from service.ops import doctor
from service import app
import trainer.spec
print([name for name in ("torch", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_736_421_400, "1.7 GB"), (1e16, "10000.0 TB")],
)
def test_sizes(num_bytes: float, text: str):
    assert output.size(num_bytes) == text


def test_a_terminal_gets_tables_and_a_progress_bar(served: Served, spec: Path):
    """On a pseudo-terminal: colours and columns instead of tabs, a bar while waiting."""

    def on_terminal(*arguments: str) -> str:
        leader, follower = os.openpty()
        process = subprocess.Popen(
            [EVENKEEL, *arguments], stdin=follower, stdout=follower, stderr=follower,
            env=served.environment(TERM="xterm", COLUMNS="160"),
        )  # fmt: skip
        os.close(follower)
        said = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            said += chunk
            found = re.search(rb"job (job_\w+)", said)
            if found and b"queued" in said:
                served.set_job(found[1].decode(), state="succeeded", publication={"status": "none"})
        os.close(leader)
        assert process.wait(300) == 0
        return said.decode()

    waited = on_terminal("submit", str(spec), "--wait")
    assert "\x1b[" in waited
    assert "queued" in waited
    assert "succeeded" in waited
    listed = on_terminal("jobs", "--name", "from-cli", "--limit", "1")
    assert "\t" not in listed
    assert re.search(r"\x1b\[\d+m.*succeeded", listed)


def test_a_public_data_set_is_got(run: Run, tmp_path: Path):
    (tmp_path / "train.txt").write_text("0 0 1\n1 2\n")
    (tmp_path / "test.txt").write_text("0 3\n")
    done = run("datasets", "get", "gowalla", "--to", str(tmp_path / "data"), "--from", str(tmp_path))
    assert done.code == 0, done.err
    assert "no licence of the data is stated" in done.out
    assert "there is no published checksum to compare with" in done.out
    assert f"{tmp_path}/data/gowalla.parquet: 4 rows" in done.out
    unknown = run("datasets", "get", "netflix")
    assert unknown.code == 1
    assert "there are amazon_beauty" in unknown.err
