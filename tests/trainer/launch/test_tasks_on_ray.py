"""A preparation by the nodes of a real Ray cluster writes the bytes of one process; a node may be lost on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import forked
from tests.support.ray_cluster import Cluster
from tests.trainer.data.prepare.cases import contents
from trainer.data.batches.prepared_columns import MANIFEST
from trainer.data.prepare.by_tasks import assembly
from trainer.data.prepare.by_tasks.tasks import PARTS, Setting, Task
from trainer.data.prepare.preparation import prepare
from trainer.launch import tasks_on_ray
from trainer.launch.on_ray import connected
from trainer.launch.tasks_on_ray import HostsOfCluster
from trainer.runs.directory import Run, read_run, write_run
from trainer.spec import parse_dataset, parse_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS, SPAN_ROWS = 15_000, 3_000
NUM_SPANS = ROWS // SPAN_ROWS
DATASET: dict[str, Any] = {
    "name": "log",
    "features": {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "tags": {"type": "id_list"},
        "price": {"type": "dense", "transform": "quantile"},
    },
    "label": {"column": "click"},
    "order": "ts",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    lengths = rng.integers(0, 4, ROWS)
    columns: dict[str, Any] = {
        "user": rng.integers(0, 900, ROWS),
        "item": [f"i{item}" for item in (rng.random(ROWS) ** 3 * 5000).astype(int)],
        "tags": [rng.integers(0, 40, length).tolist() for length in lengths],
        "price": pa.array(rng.lognormal(size=ROWS), mask=rng.random(ROWS) < 0.1),
        "click": rng.integers(0, 2, ROWS),
        "ts": rng.permutation(ROWS),
    }
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


def written_run(folder: Path, rows: Path, cluster: Cluster, num_workers: int) -> Run:
    dataset = parse_dataset(DATASET | {"uri": str(rows)})
    job = parse_job(
        {
            "name": "job",
            "dataset": {"name": "log"},
            "model": {"kind": "dcnv2"},
            "evaluation": {"split": {"kind": "time"}},
            "resources": {"num_workers": num_workers},
        }
    )
    address = f"127.0.0.1:{cluster.port}"
    directory = write_run(
        folder, run_id=folder.name, job=job, dataset=dataset, store_url=str(folder / "store"), ray_address=address
    )
    return read_run(directory)


class Watched(HostsOfCluster):
    """Notes which tasks were done, and kills a node after so many of them."""

    def __init__(self, run: Run, done: list[str], victim: int | None, after: int):
        super().__init__(run)
        self._done, self._victim, self._after = done, victim, after

    @contextlib.contextmanager
    def runner(self, setting: Setting, log: Callable[[str], Any]) -> Iterator[Any]:
        with super().runner(setting, log) as runner:
            if runner is not None:
                original = runner.run

                def run(tasks: Sequence[Task], done: Callable[[Task], None]) -> None:
                    original(tasks, lambda task: self._note(task, done))

                runner.run = run
            yield runner

    def _note(self, task: Task, done: Callable[[Task], None]) -> None:
        self._done.append(task.name)
        if self._victim is not None and len(self._done) == self._after:
            node = psutil.Process(self._victim)
            for process in [node, *node.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        done(task)


@contextlib.contextmanager
def without_processors(run: Run) -> Iterator[None]:
    """Be a driver of the cluster while others have the processors of its nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on(node: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    with connected(run):
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        others = [ray.remote(Other).options(num_cpus=2, scheduling_strategy=on(node)).remote() for node in nodes]
        ray.get([other.ready.remote() for other in others])
        yield


class Other:
    def ready(self) -> None:
        pass


def lead(directory: Path, victim: int | None = None, after: int = 0, is_busy: bool = False) -> None:
    """Prepare as the driver of a run does, and say what happened."""
    assembly.SPAN_ROWS = SPAN_ROWS
    # Tasks pay where the driver's host has less than they.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if is_busy:
        tasks_on_ray.connected, tasks_on_ray.PROBE_SECONDS = without_processors, 2.0
    run = read_run(directory)
    done: list[str] = []
    said: list[str] = []
    hosts = Watched(run, done, victim, after)
    outcome = {"error": None}
    try:
        prepare(run.dataset, run.job, run.data, threads=1, hosts=hosts, log=said.append)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    (directory / "outcome.json").write_text(json.dumps(outcome | {"done": done, "said": said}))


def led(run: Run, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> dict[str, Any]:
    for name, value in cluster.environment.items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    log = run.directory / "lead.log"
    process = forked.start(lead, run.directory, *arguments, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    return json.loads((run.directory / "outcome.json").read_text())


def without_figures(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the figures of the rows, which several hosts do not tell."""
    manifest = json.loads(files[MANIFEST])
    del manifest["row_figures"]
    return files | {MANIFEST: json.dumps(manifest).encode()}


def prepared_alone(run: Run, folder: Path) -> dict[str, bytes]:
    prepare(run.dataset, run.job, folder / "data", threads=1)
    return without_figures(contents(folder / "data"))


def test_any_number_of_workers_prepares_the_same_bytes(two_ray_nodes, rows, tmp_path, monkeypatch):
    expected = None
    for workers in (1, 3):
        run = written_run(tmp_path / f"run-{workers}", rows, two_ray_nodes, workers)
        expected = expected or prepared_alone(run, tmp_path / "alone")
        outcome = led(run, two_ray_nodes, monkeypatch)
        assert outcome["error"] is None
        assert without_figures(contents(run.data)) == expected
        if workers == 1:
            assert outcome["done"] == []
            assert "prepares on this host, whose threads do as much as 1 tasks at once" in outcome["said"]
        else:
            assert len([name for name in outcome["done"] if name.startswith("rows-")]) == NUM_SPANS
            assert f"prepares by {workers} tasks at once on 2 nodes of the cluster" in outcome["said"]


def test_nodes_whose_processors_others_have_are_not_waited_for(two_ray_nodes, rows, tmp_path, monkeypatch):
    run = written_run(tmp_path / "run", rows, two_ray_nodes, 2)
    outcome = led(run, two_ray_nodes, monkeypatch, None, 0, True)
    assert (outcome["error"], outcome["done"]) == (None, [])
    busy = [one for one in outcome["said"] if one.endswith("prepares nothing: its processors were busy for 2 seconds")]
    assert len(busy) == 2
    assert "prepares on this host, whose threads do as much as 0 tasks at once" in outcome["said"]
    assert contents(run.data)


def test_an_error_of_the_rows_is_that_of_the_first_row_with_one(two_ray_nodes, rows, tmp_path, monkeypatch):
    table = pq.read_table(rows)
    click = table["click"].to_pylist()
    for row in (2 * SPAN_ROWS + 17, 3 * SPAN_ROWS, 4 * SPAN_ROWS + 1):
        click[row] = 7
    bad = tmp_path / "bad.parquet"
    pq.write_table(table.set_column(table.schema.get_field_index("click"), "click", pa.array(click)), bad)
    outcome = led(written_run(tmp_path / "run", bad, two_ray_nodes, 2), two_ray_nodes, monkeypatch)
    assert outcome["error"].startswith(f"DataError: {bad}, column 'click', row {2 * SPAN_ROWS + 17}: ")


def test_a_node_that_is_lost_costs_its_tasks_alone(two_ray_nodes, rows, tmp_path, monkeypatch):
    victim = two_ray_nodes.start_node(num_cpus=2)
    run = written_run(tmp_path / "run", rows, two_ray_nodes, 6)
    outcome = led(run, two_ray_nodes, monkeypatch, victim.pid, 3)
    assert outcome["error"] is None
    assert without_figures(contents(run.data)) == prepared_alone(run, tmp_path / "alone")
    assert any("is lost: " in one and "goes to another" in one for one in outcome["said"]), outcome["said"]
    assert len(outcome["done"]) == len(set(outcome["done"]))
    assert os.listdir(run.directory / PARTS), "results are the driver's to remove, once the data are in their place"
