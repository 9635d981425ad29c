"""Jobs on the command line: submit, wait, list, show; output for people, pipes and programs."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cli import main as cli_main
from service.client import Client
from tests.service import serving
from tests.service.serving import Run, Served

pytestmark = pytest.mark.process


def test_submit_prints_the_id_alone_on_stdout(run: Run, spec: Path):
    done = run("submit", str(spec))
    assert done.code == 0
    assert re.fullmatch(r"job_\w+\n", done.out)
    assert f"evenkeel logs {done.out.strip()} -f" in done.err
    assert run("job", done.out.strip(), "--json").json["name"] == "from-cli"


@pytest.fixture
def new(served: Served, tmp_path: Path) -> Path:
    """A file with a job and its dataset, of a name that no other test has."""
    name = f"new-{tmp_path.name.rpartition('_')[2].lower()}"[:40].rstrip("-")
    job = serving.job() | {"dataset": {"name": name}}
    return serving.write_spec(tmp_path / "new.yaml", serving.dataset(served.data, name), job)


def names(run: Run) -> list[str]:
    return [one["name"] for one in run("datasets", "list", "--json").json]


def test_submit_registers_the_dataset_of_its_file_once(run: Run, new: Path, monkeypatch: pytest.MonkeyPatch):
    dataset, _ = yaml.safe_load_all(new.read_text())
    done = run("submit", str(new))
    assert done.code == 0, done.err
    assert re.fullmatch(r"job_\w+\n", done.out)
    assert f"dataset {dataset['name']} registered" in done.err
    assert dataset["name"] in names(run)
    again = run("submit", str(new))
    assert again.code == 0, again.err
    assert "registered" not in again.err
    assert run("datasets", "add", str(new)).code == 0
    # As `datasets add` does, it gives a service on this machine whole paths.
    monkeypatch.chdir(Path(dataset["uri"]).parent)
    new.write_text(new.read_text().replace(dataset["uri"], Path(dataset["uri"]).name))
    assert run("submit", str(new)).code == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"label": {"rule": "click >= 1"}}, "label"),
        ({"features": {"item": {"type": "id"}, "user": {"type": "id"}}}, "features"),
        ({"filter": "user > 1", "max_bad_rows": 0.1}, "filter, max_bad_rows"),
    ],
)
def test_submit_of_another_dataset_of_the_same_name_names_what_differs(run: Run, new: Path, change: dict, field: str):
    dataset, job = yaml.safe_load_all(new.read_text())
    assert run("datasets", "add", str(new)).code == 0
    new.write_text(yaml.safe_dump_all([dataset | change, job], sort_keys=False))
    done = run("submit", str(new))
    assert (done.code, done.out) == (2, "")
    assert f"the registered dataset '{dataset['name']}' is a different one: it has another {field}\n" in done.err
    assert f"evenkeel datasets update {new}" in done.err
    assert run("datasets", "update", str(new)).out == f"dataset {dataset['name']} updated\n"
    assert run("submit", str(new)).code == 0


def test_submit_registers_nothing_for_a_job_that_does_not_fit(run: Run, new: Path):
    dataset, job = yaml.safe_load_all(new.read_text())
    new.write_text(yaml.safe_dump_all([dataset, job | {"sse": {"colour": {}}}]))
    done = run("submit", str(new))
    assert done.code == 2
    assert "colour" in done.err
    assert dataset["name"] not in names(run)


def test_submit_of_an_unknown_dataset_names_the_remedy(run: Run, tmp_path: Path):
    file = serving.write_spec(tmp_path / "job.yaml", serving.job() | {"dataset": {"name": "nowhere"}})
    done = run("submit", str(file))
    assert (done.code, done.out) == (2, "")
    assert f"{file}: dataset.name: " in done.err
    assert "evenkeel datasets add FILE.yaml" in done.err


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


def test_a_job_that_runs_says_that_it_is_starved(run: Run, served: Served, spec: Path):
    job_id = run("submit", str(spec)).out.strip()
    for state, share, told in (("running", 0.65, True), ("running", 0.1, False), ("succeeded", 0.65, False)):
        served.set_job(job_id, state=state, progress={"epoch": 1, "epochs": 2, "starved": share})
        said = "starved: the threads of a rank got 35% of the processor time that they wanted"
        assert (said in run("job", job_id).out) == told, (state, share)


def test_jobs_for_pipes_and_programs(run: Run, served: Served, spec: Path):
    job_id = run("submit", str(spec)).out.strip()
    served.set_job(job_id, state="running", progress={"epoch": 1, "epochs": 2})
    served.add_metrics(job_id, [0.71234])
    lines = run("jobs", "--state", "running").lines
    assert lines[0][:5] == ["ID", "NAME", "STATE", "PROGRESS", "AUC (SPLIT, EPOCH)"]
    assert lines[1][:5] == [job_id, "from-cli", "running", "epoch 1/2", "0.7123 test 1"]
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
    shown = [line.split() for line in run("job", job_id).out.splitlines()]
    assert [line for line in shown if line and line[0] in ("error", "code", "remedy")] == [
        ["error", "broke"], ["code", "x"], ["remedy", "mend"],
    ]  # fmt: skip
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


def test_warnings_about_its_rows_are_shown(capsys: pytest.CaptureFixture[str]):
    job = {"id": "job_1", "name": "n", "state": "succeeded", "lineage": {"warnings": ["joins 3 of 100 rows"]}}
    cli_main._print_job(job, False)
    assert "joins 3 of 100 rows" in capsys.readouterr().out


def test_unknown_job(run: Run):
    done = run("job", "job_nothing")
    assert done.code == 1
    assert done.out == ""
    assert "There is no job 'job_nothing'" in done.err
