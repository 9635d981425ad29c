"""Preparation of rows by tasks on the nodes of a Ray cluster.

The job's number of workers limits the tasks that run at once; each has a worker's CPUs. A node must reach the rows and
the storage. If a node is lost, only its tasks run again on other nodes.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.data.errors import DataError
from trainer.data.prepare.by_tasks.stages import perform
from trainer.data.prepare.by_tasks.tasks import Setting, Task, planned
from trainer.data.prepare.workers import num_threads
from trainer.launch.on_ray import connected, room_for, worker_resources
from trainer.runs.directory import Run
from trainer.runs.failures import ResourceError
from trainer.runs.working_directory import working_directory
from trainer.storage.base import StorageError

COST = 1.7
"""Processor time of tasks relative to one process, which writes no column twice (docs/reports/data_pipeline.md)."""
LOSSES = 3
"""Crashes of a task on healthy nodes before the task itself is blamed."""
PROBE_SECONDS = 60.0
"""Longest wait for a node's first, small task: other work may keep its processors for days."""
NODE_SECONDS = 5.0
_MARK = "begun"


class HostsOfCluster:
    """The nodes of a run's cluster, and the storage that it shares with them."""

    def __init__(self, run: Run):
        self._run = run
        self.storage = run.storage or run.directory.as_uri()
        self.threads = max(1, int(run.job.resources.cpus_per_worker))

    @contextlib.contextmanager
    def runner(self, setting: Setting, log: Callable[[str], Any]) -> Iterator[RayRunner | None]:
        """Yield the runner of tasks on the nodes; None if just this host's threads are as fast (:data:`COST`).

        Raises:
            ResourceError: the cluster cannot be reached.
            StorageError: the storage cannot be reached.
        """
        number = self._run.job.resources.num_workers
        if self._pays(number):
            with connected(self._run):
                slots = self._slots(setting, log)
                number = len(slots)
                if self._pays(number):
                    log(f"prepares by {number} tasks at once on {len(set(slots))} nodes of the cluster")
                    yield RayRunner(self._run, setting, slots, log)
                    return
        log(f"prepares on this host, whose threads do as much as {number} tasks at once")
        yield None

    def _pays(self, number: int) -> bool:
        """Return True if ``number`` tasks at once are faster than the threads of this host."""
        return number * self.threads > COST * num_threads(self._run.job)

    def _slots(self, setting: Setting, log: Callable[[str], Any]) -> list[str]:
        """Return the node of each slot for a task; the job's number of workers limits the slots.

        Nodes that cannot reach rows or storage, or do not answer, are left out.
        """
        import ray

        folders = setting.folders()
        folders.storage.put_if_absent(f"{folders.prefix}/{_MARK}", _MARK.encode())
        needed = worker_resources(self._run.job)
        room = {
            node["NodeID"]: room_for([node["Resources"]], {"CPU": needed["CPU"]})
            for node in ray.nodes()
            if node["Alive"]
        }
        room = {node: number for node, number in room.items() if number}
        probes = {_on(node, _probe, needed["CPU"]).remote(setting): node for node in room}
        answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=PROBE_SECONDS) if probes else ([], [])
        for probe, node in probes.items():
            problem: str | None = f"its processors were busy for {PROBE_SECONDS:g} seconds"
            if probe in answered:
                try:
                    problem = ray.get(probe)
                except ray.exceptions.RayError as error:
                    problem = str(error).strip().splitlines()[-1]
            if problem is not None:
                log(f"node {node[:8]} prepares nothing: {problem}")
                ray.cancel(probe, force=True)
                del room[node]
        # One slot of each node, then a second of each, so that the first tasks spread over all nodes.
        turns = [(turn, node) for node, number in room.items() for turn in range(number)]
        return [node for _, node in sorted(turns)][: self._run.job.resources.num_workers]


class RayRunner:
    """Runner of tasks on nodes. A slot runs at most one task at a time."""

    def __init__(self, run: Run, setting: Setting, slots: Sequence[str], log: Callable[[str], Any]):
        import ray

        self._run_id, self._setting = run.run_id, ray.put(setting)
        self._cpus = worker_resources(run.job)["CPU"]
        self._free = deque(slots)
        self._log = log
        self._lost = Counter[int]()

    def run(self, tasks: Sequence[Task], done: Callable[[Task], None]) -> None:
        """Perform tasks (:class:`trainer.data.prepare.by_tasks.tasks.TaskRunner`).

        Raises:
            ResourceError: no node is left, or a task's process has died LOSSES times.
        """
        import ray

        waiting, running = deque(range(len(tasks))), dict[Any, tuple[int, str]]()
        failed: dict[int, DataError] = {}
        self._lost.clear()
        try:
            while waiting or running:
                while waiting and self._free:
                    position, node = waiting.popleft(), self._free.popleft()
                    task = _on(node, _perform, self._cpus).remote(self._setting, tasks[position], self._run_id)
                    running[task] = position, node
                if not running:
                    raise ResourceError("no node of the cluster is left to prepare on: add nodes, then retry")
                (ready,), _ = ray.wait(list(running), num_returns=1)
                position, node = running.pop(ready)
                try:
                    error = ray.get(ready)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError as loss:
                    self._note_loss(tasks[position], position, node, loss)
                    waiting = deque(sorted([*waiting, position]))
                    continue
                self._free.append(node)
                if isinstance(error, DataError):
                    failed[position] = error
                elif error is not None:
                    raise error
                else:
                    done(tasks[position])
                if failed:
                    # Tasks of earlier rows may still fail: the error of the first rows is raised.
                    first = min(failed)
                    waiting = deque(position for position in waiting if position < first)
                    if not waiting and all(position > first for position, _ in running.values()):
                        raise failed[first]
        finally:
            for task in running:
                ray.cancel(task, force=True)

    def _note_loss(self, task: Task, position: int, node: str, loss: Exception) -> None:
        """Handle the death of a task's process: remove the node's slots if the node is lost, else count the death."""
        # Ray reports the loss of a process a moment before it knows that the node is lost.
        deadline = time.monotonic() + NODE_SECONDS
        while _is_alive(node) and time.monotonic() < deadline:
            time.sleep(0.2)
        if _is_alive(node):
            self._free.append(node)
            self._lost[position] += 1
            if self._lost[position] == LOSSES:
                reason = str(loss).strip().splitlines()[0]
                raise ResourceError(f"the process of {task.name} died {LOSSES} times: {reason}") from loss
        else:
            self._free = deque(one for one in self._free if one != node)
            self._log(f"node {node[:8]} is lost: {task.name} goes to another")


def _is_alive(node: str) -> bool:
    import ray

    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def _on(node: str, function: Callable[..., Any], cpus: float) -> Any:
    """Return a function as a Ray task that runs on this node, without retries."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(function).options(num_cpus=cpus, max_retries=0, scheduling_strategy=here)


def _probe(setting: Setting) -> str | None:
    """Return the reason why this node cannot take tasks, None if it can."""
    folders = setting.folders()
    try:
        planned(setting)
        folders.storage.read(f"{folders.prefix}/{_MARK}")
    except (DataError, StorageError, OSError) as error:
        return str(error)
    return None


def _perform(setting: Setting, task: Task, run_id: str) -> Exception | None:
    """Perform a task on this node; return the error that the driver is to raise, None without an error."""
    import pyarrow as pa

    pa.set_cpu_count(setting.threads)
    try:
        perform(setting, task, working_directory(run_id, "tasks"))
    except (DataError, StorageError, OSError) as error:
        return error
    return None
