"""Ranks on an existing Ray cluster. The ranks use gloo, and NCCL if they have GPUs.

Never call ``ray.init`` without an address: it joins any cluster that a stale file names. Never call ``ray stop``: it
ends every Ray process on the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.driver import RanksFailed, fewer_workers
from trainer.launch.rank_actors import rank_actors, train_on
from trainer.launch.rank_link import start_driver_end
from trainer.runs.directory import RUN_FILE, THIS_CLUSTER, Run
from trainer.runs.events import EventWriter, phase
from trainer.runs.failures import ResourceError
from trainer.runs.protocol import RUN_DIR_VARIABLE, RUN_ID_VARIABLE

if TYPE_CHECKING:
    from trainer.spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]


def start_ranks(run: Run) -> None:
    """Train on ``resources.num_workers`` actors, or on fewer if the cluster has no room for all.

    Raises:
        RanksFailed: a rank ended with an error.
        ResourceError: the cluster cannot be reached, or is too small.
    """
    from ray.exceptions import RayActorError, RayError

    with connected(run):
        run = _fitted(run)
        # The actor lives as long as this reference.
        link = None if run.storage is None else start_driver_end(run)
        document = None if link is None else json.loads((run.directory / RUN_FILE).read_text("utf-8"))
        with rank_actors(run, worker_resources(run.job)) as actors:
            try:
                train_on(actors, run, document)
            except RayError as error:
                # Ray's error has a traceback as its text; its ``cause`` is the error that the rank raised.
                died = isinstance(error, RayActorError)
                raise RanksFailed(str(getattr(error, "cause", error)), died) from error


@contextlib.contextmanager
def connected(run: Run) -> Iterator[None]:
    """Connect this process to the run's Ray cluster, as a driver, during the block.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.closing(EventWriter(run.directory, run.attempt)) as events, phase(events.write, "cluster"):
            _connect(run)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # ray.init takes SIGTERM for itself
        yield
    finally:
        ray.shutdown()


def _connect(run: Run) -> None:
    import ray

    # Workers of a joined cluster import this code too, and carry the run's marker.
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        RUN_ID_VARIABLE: run.run_id,
        RUN_DIR_VARIABLE: str(run.directory),
    }
    try:
        if run.ray_address == THIS_CLUSTER:
            # Workers inherit the environment of the submitted job; Ray refuses one that is given a second time.
            ray.init(address=run.cluster, log_to_driver=False)
            return
        ray.init(address=run.ray_address, runtime_env={"env_vars": environment}, log_to_driver=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        if "InvalidAuthToken" in str(error.__cause__):
            reason = "the cluster does not take our token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's"
        raise ResourceError(f"Ray {run.ray_address}: {reason}") from error


def _fitted(run: Run) -> Run:
    """Return the run with as many of its workers as the cluster has room for, and report it if they are fewer."""
    import ray

    resources, needed = run.job.resources, worker_resources(run.job)
    room = room_for([node["Resources"] for node in ray.nodes() if node["Alive"]], needed)
    if room >= resources.num_workers:
        return run
    words = " and ".join(f"{number:g} {name}s" for name, number in needed.items())
    short = f"the cluster at {run.cluster} has room for {room} workers of {words}"
    number = next((count for count in resources.worker_counts if count <= room), None)
    if number is None:
        raise ResourceError(f"{resources.least_workers} workers were asked for, {short}: ask for fewer, or add nodes")
    run = run.with_workers(number, short)
    try:
        from trainer.launch.prepare_run import check_memory

        check_memory(run)
    except MemoryError as error:
        # The run would fit on all of its workers, which a later attempt may get.
        raise ResourceError(f"{short}: {error}") from error
    with contextlib.closing(EventWriter(run.directory, run.attempt)) as events:
        events.write("workers", number=number, because=short)
    print(fewer_workers(run), flush=True)
    return run


def worker_resources(job: JobSpec) -> dict[str, float]:
    """Return the resources that Ray reserves for each worker, as Ray names them: CPU and GPU."""
    gpus = job.resources.gpus_per_worker
    return {"CPU": job.resources.cpus_per_worker} | ({"GPU": gpus} if gpus else {})


def room_for(nodes: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> int:
    """Return the number of workers that fit on all nodes. ``nodes``: each node's resources; ``needed``: a worker's."""
    return sum(min(int(node.get(name, 0.0) // number) for name, number in needed.items()) for node in nodes)
