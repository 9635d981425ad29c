"""Curves of a run in trackers: in event files of TensorBoard, on a server of MLflow, in files of W&B; and that none of
them can hold a run up."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.free_ports import free_port
from trainer.launch.driver import execute
from trainer.runs.directory import Run, read_run, write_run
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_SUCCEEDED
from trainer.runs.trackers import base, follow
from trainer.runs.trackers.base import parameters_of, points_of
from trainer.runs.trackers.follow import Follower
from trainer.spec import SpecError

TENSORBOARD = {"kind": "tensorboard"}


def hand_on(run: Run, seconds: float = 60.0) -> None:
    """Everything that the events of a run that has ended say."""
    ended = threading.Event()
    ended.set()
    Follower(run, run.job.tracking[0], seconds).follow(ended)


def write_attempt(run: Run, steps: list[int], epochs: list[int], end: str | None = None) -> None:
    events = EventWriter(run.directory, run.attempt)
    events.write("state", state="running")
    for step in steps:
        events.write("progress", step=step, steps=40, epoch=1, epochs=2, loss=1 / step, examples_per_second=100.0)
    for epoch in epochs:
        buckets = [{"bucket": "0-9", "auc": 0.5}]
        events.write("metric", epoch=epoch, split="validation", auc=0.5 + epoch / 10, frequency_buckets=buckets)
    if end is not None:
        events.write("publication", status="held", collection="items", version="v000002", reasons=[], gate=[])
        events.write("state", state=end)
    events.close()


def next_attempt(run: Run) -> Run:
    write_run(
        run.directory, run_id=run.run_id, job=run.submitted, dataset=run.dataset, store_url=run.store_url,
        attempt=run.attempt + 1,
    )  # fmt: skip
    return read_run(run.directory)


def two_attempts(run: Run) -> None:
    """One that is killed after it was handed on, and one that trains some of its steps again."""
    write_attempt(run, [10, 20], [1])
    hand_on(run)
    run = next_attempt(run)
    write_attempt(run, [15, 20, 30], [1, 2], "succeeded")
    hand_on(run)


LOSS = [(10, 0.1), (20, 0.05), (30, 1 / 30)]
AUC = [(1, 0.6), (2, 0.7)]


def same(curve: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Trackers keep float32."""
    np.testing.assert_allclose(np.array(curve), np.array(expected), rtol=1e-6)


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_attempts_of_a_run_are_one_run_of_tensorboard(make_run):
    run = make_run(tracking=[TENSORBOARD])
    two_attempts(run)
    curves = curves_in(run.directory / "tensorboard")
    same(curves["train/loss"], LOSS)
    same(curves["validation/auc"], AUC)
    assert set(curves) == {"train/loss", "train/examples_per_second", "validation/auc"}


def test_a_killed_writer_of_tensorboard_leaves_a_file_that_is_gone_on_from(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("EVENKEEL_TENSORBOARD_DIR", str(tmp_path / "boards"))
    run = make_run(tracking=[TENSORBOARD])
    write_attempt(run, [10, 20], [])
    hand_on(run)
    folder = tmp_path / "boards" / "small" / run.run_id
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    cut = whole.rindex(b"train/loss") + 5  # inside of the second loss
    file.write_bytes(whole[:cut])
    hand_on(run)
    same(curves_in(folder)["train/loss"], LOSS[:2])


@pytest.mark.process
def test_a_job_that_trains_is_tracked_by_a_process_of_its_own(make_run, small, tmp_path):
    def ranks(run: Run) -> None:
        write_attempt(run, [10, 20], [1])

    run = make_run(uri=small.write_rows(tmp_path / "few.parquet", num_rows=300), tracking=[TENSORBOARD])
    assert execute(run, ranks) == EXIT_SUCCEEDED
    same(curves_in(run.directory / "tensorboard")["train/loss"], LOSS[:2])


@pytest.mark.process
def test_a_follower_that_hangs_is_killed(make_run, monkeypatch, capfd):
    """Another follower of the run has not ended: the second waits for it."""
    import fcntl

    monkeypatch.setattr(base, "LAST_WORDS_SECONDS", 0.1)
    monkeypatch.setattr(base, "_START_SECONDS", 0.1)
    run = make_run(tracking=[TENSORBOARD])
    with open(run.directory / follow.LOCK_FILE, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with base.tracked(run):
            pass
    assert "did not end and was killed" in capfd.readouterr().err


def test_a_server_that_is_away_is_told_of_once_and_given_up(make_run, capfd, monkeypatch):
    monkeypatch.setattr(follow, "FIRST_WAIT_SECONDS", 0.01)
    run = make_run(tracking=[{"kind": "mlflow", "uri": f"http://127.0.0.1:{free_port()}"}])
    write_attempt(run, [10], [], "succeeded")
    hand_on(run, seconds=0.3)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "mlflow cannot be reached, tried again later: ConnectError" in lines[0]
    assert "mlflow is given up" in lines[1]


def test_a_server_that_never_answers_is_given_up(make_run, capfd, monkeypatch):
    monkeypatch.setattr("trainer.runs.trackers.mlflow.ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = make_run(tracking=[{"kind": "mlflow", "uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}])
        hand_on(run, seconds=0.0)
    assert "ReadTimeout" in capfd.readouterr().err


def test_a_tracker_that_comes_back_gets_what_it_missed(make_run, monkeypatch, tmp_path, capfd):
    """The folder of TensorBoard cannot be made, until it can."""
    monkeypatch.setattr(follow, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    obstacle = tmp_path / "boards"
    obstacle.write_text("a file")
    monkeypatch.setenv("EVENKEEL_TENSORBOARD_DIR", str(obstacle))
    run = make_run(tracking=[TENSORBOARD])
    write_attempt(run, [10, 20], [])
    ended = threading.Event()
    thread = threading.Thread(target=Follower(run, run.job.tracking[0]).follow, args=(ended,))
    thread.start()
    try:
        said, deadline = "", time.monotonic() + 60
        while "cannot be reached" not in said:
            assert time.monotonic() < deadline, said
            said += capfd.readouterr().err
            time.sleep(0.01)
        obstacle.unlink()
    finally:
        ended.set()
        thread.join()
    same(curves_in(obstacle / "small" / run.run_id)["train/loss"], LOSS[:2])


@pytest.mark.parametrize(
    ("tracking", "variable", "says"),
    [
        ({"kind": "mlflow"}, "MLFLOW_TRACKING_URI", "set MLFLOW_TRACKING_URI to http://HOST:PORT"),
        (TENSORBOARD, "tensorboardX", r"pip install 'evenkeel\[tensorboard\]'"),
        ({"kind": "wandb"}, "wandb", r"pip install 'evenkeel\[wandb\]'"),
    ],
)
def test_what_no_second_try_mends_is_said_with_the_remedy(make_run, monkeypatch, capfd, tracking, variable, says):
    import sys

    monkeypatch.delenv(variable, raising=False)
    for name in [one for one in sys.modules if one.partition(".")[0] == variable]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, variable, None)
    hand_on(make_run(tracking=[tracking]))
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize(
    ("tracking", "says"),
    [
        ([{"kind": "mlflow", "uri": "sqlite:///runs.db"}], "tracking.0.mlflow.uri: .*write http://HOST:PORT"),
        ([{"kind": "mlflow", "uri": "http://me:secret@host"}], "MLFLOW_TRACKING_PASSWORD"),
        ([TENSORBOARD, TENSORBOARD], "tensorboard is listed 2 times"),
        ([{"kind": "neptune"}], "tracking.0.kind: .*use one of tensorboard, mlflow, wandb"),
    ],
)
def test_wrong_trackers_are_refused(small, tracking, says):
    with pytest.raises(SpecError, match=says):
        small.job(tracking=tracking)


def test_points_and_parameters(make_run):
    run = make_run(tracking=[TENSORBOARD], labels={"team": "ads"})
    stamp = {"time": "2026-01-01T00:00:00.000Z", "attempt": 1}
    metrics = [{"epoch": 1, "split": "test", "auc": 0.5, "auc_low": 0.4, "calibration": [{"rows": 1}]}]
    points = list(points_of({"type": "history", "metrics": metrics, **stamp}))
    assert [(one.name, one.value, one.step) for one in points] == [("test/auc", 0.5, 1), ("test/auc_low", 0.4, 1)]
    assert points[0].time == 1767225600.0
    parameters = parameters_of(run)
    assert parameters["optimizer.kind"] == "adam_ar"
    assert parameters["model.hidden"] == "[8]"
    assert not {name for name in parameters if name.startswith(("tracking", "labels"))}


# --- a server of MLflow ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of MLflow, by the command that EVENKEEL_TEST_MLFLOW names; MLflow is in no lock (docs/adr/0038)."""
    command = os.environ.get("EVENKEEL_TEST_MLFLOW", "")
    if not command or shutil.which(command) is None:
        pytest.skip("no MLflow server: EVENKEEL_TEST_MLFLOW names no command mlflow")
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    arguments = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder)]
    with open(folder / "log.txt", "wb") as log:
        server = subprocess.Popen(
            [command, "server", "--port", str(port), "--workers", "1", *arguments],
            stdout=log, stderr=log, start_new_session=True, cwd=folder,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        assert server.poll() is None, (folder / "log.txt").read_text()
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def asked(url: str, path: str, **parameters: Any) -> dict[str, Any]:
    answer = httpx.get(f"{url}/api/2.0/mlflow/{path}", params=parameters)
    assert answer.is_success, answer.text
    return answer.json()


@pytest.mark.process
def test_attempts_of_a_run_are_one_run_of_mlflow(make_run, mlflow_url, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    run = make_run(tracking=[{"kind": "mlflow", "experiment": "shop"}], labels={"team": "ads"})
    two_attempts(run)
    experiment = asked(mlflow_url, "experiments/get-by-name", experiment_name="shop")["experiment"]["experiment_id"]
    body = {"experiment_ids": [experiment]}
    (found,) = httpx.post(f"{mlflow_url}/api/2.0/mlflow/runs/search", json=body).json()["runs"]
    assert (found["info"]["status"], found["info"]["run_name"]) == ("FINISHED", run.run_id)
    tags = {one["key"]: one["value"] for one in found["data"]["tags"]}
    assert (tags["publication.status"], tags["publication.version"]) == ("held", "v000002")
    assert (tags["label.team"], tags["evenkeel.run"]) == ("ads", run.run_id)
    parameters = {one["key"]: one["value"] for one in found["data"]["params"]}
    assert parameters == parameters_of(run)
    for name, curve in {"train/loss": LOSS, "validation/auc": AUC}.items():
        history = asked(mlflow_url, "metrics/get-history", run_id=found["info"]["run_id"], metric_key=name)["metrics"]
        same(sorted((one["step"], one["value"]) for one in history), curve)


@pytest.mark.process
def test_an_experiment_is_the_job_and_an_end_its_state(make_run, mlflow_url):
    run = make_run(tracking=[{"kind": "mlflow", "uri": mlflow_url}])
    write_attempt(run, [10], [], "failed")
    hand_on(run)
    experiment = asked(mlflow_url, "experiments/get-by-name", experiment_name="small")["experiment"]["experiment_id"]
    body = {"experiment_ids": [experiment]}
    (found,) = httpx.post(f"{mlflow_url}/api/2.0/mlflow/runs/search", json=body).json()["runs"]
    assert found["info"]["status"] == "FAILED"


# --- files of Weights & Biases ---------------------------------------------------------------------------------------


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a log of LevelDB, behind the seven bytes that W&B puts first."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no header fits the rest of a block
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.process
def test_attempts_of_a_run_are_one_run_of_wandb(make_run, monkeypatch):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tracking=[{"kind": "wandb", "project": "shop"}])
    two_attempts(run)
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    ids = set()
    for file in sorted(run.directory.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
            row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            for name, value in row.items():
                if "/" in name:
                    curves[name].append((int(row["step" if name.startswith("train/") else "epoch"]), value))
    assert ids == {("shop", run.run_id)}
    same(curves["train/loss"], LOSS)
    same(curves["validation/auc"], AUC)
