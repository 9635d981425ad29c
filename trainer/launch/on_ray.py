"""Ranks in Ray Train, on a cluster that is joined. They use gloo, and NCCL where they have GPUs.

Never a bare ``ray.init``: it takes up whatever cluster a stale file names. Never ``ray stop``: it ends every Ray on the
host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.driver import RanksFailed, check_memory, fewer_workers
from trainer.launch.rank_link import linked_rank, log_of, start_driver_end
from trainer.runs.directory import RUN_FILE, THIS_CLUSTER, Run, choose_backend
from trainer.runs.events import EventWriter, phase
from trainer.runs.failures import Cancelled, ResourceError
from trainer.runs.protocol import LOG_FILE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE

if TYPE_CHECKING:
    from trainer.spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]


def start_ranks(run: Run) -> None:
    """Train on ``resources.num_workers`` Ray Train workers, or on fewer where the cluster has no room for all.

    Raises:
        RanksFailed: a rank ended with an error.
        ResourceError: the cluster is not reached or too small.
    """
    with connected(run):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        run = _fitted(run)
        # Kept: the actor ends with what refers to it.
        link = None if run.storage is None else start_driver_end(run)
        document = None if link is None else json.loads((run.directory / RUN_FILE).read_text("utf-8"))
        trainer = TorchTrainer(
            _rank,
            train_loop_config={"directory": str(run.directory), "document": document},
            torch_config=TorchConfig(backend=choose_backend(run.job.resources.gpus_per_worker)),
            scaling_config=ScalingConfig(
                num_workers=run.job.resources.num_workers,
                use_gpu=run.job.resources.gpus_per_worker > 0,
                resources_per_worker=worker_resources(run.job),
            ),
            # Retries are the service's: a new attempt from the newest checkpoint. Ray's would hide the failure.
            run_config=RunConfig(
                name=f"attempt-{run.attempt}",
                storage_path=str(run.directory / "ray"),
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0),
            ),
        )
        try:
            trainer.fit()
        except (Cancelled, KeyboardInterrupt):
            raise
        except Exception as error:
            raise RanksFailed(str(error)) from error


@contextlib.contextmanager
def connected(run: Run) -> Iterator[None]:
    """Be a driver of the run's cluster during the block.

    Raises:
        ResourceError: the cluster is not reached.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
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


def _rank(config: dict[str, Any]) -> None:
    import ray
    from ray.train import get_context

    from trainer.launch.worker import train_rank

    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    if config["document"] is None:
        _speak_into(Path(config["directory"]) / LOG_FILE)
        train_rank(config["directory"], gpus, _notice)
        return
    rank = get_context().get_world_rank()
    with linked_rank(config["document"], rank) as directory:
        _speak_into(log_of(directory, rank))
        train_rank(str(directory), gpus, _notice)


def _notice() -> str | None:
    """Return why the ranks are to stop once Ray drains a node of theirs: its machine is about to go.

    What this rank was told of it. ``ray.train.get_preemption_info`` waits at each call for all ranks, which agree on
    stopping within their step anyway, and not all of which ask: one that was asked to stop knows enough.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    info = get_train_context().preemption_context.preemption_info
    return None if info is None else f"Ray drains {', '.join(info.preempted_node_ids)}"


def _speak_into(path: Path) -> None:
    """Let what this rank says go straight into a log: through Ray it comes late, prefixed, between Ray's own lines."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Ray's workers log at level INFO, and FBGEMM has a line for each of its libraries.
    logging.getLogger().setLevel(logging.WARNING)


def _connect(run: Run) -> None:
    import ray

    # Workers of a joined cluster find this code too, and carry the run's marker.
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        RUN_ID_VARIABLE: run.run_id,
        RUN_DIR_VARIABLE: str(run.directory),
    }
    try:
        if run.ray_address == THIS_CLUSTER:
            # What the job was submitted with reaches the workers too; Ray refuses to be told the same twice.
            ray.init(address=run.cluster, log_to_driver=False)
            return
        ray.init(address=run.ray_address, runtime_env={"env_vars": environment}, log_to_driver=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        if "InvalidAuthToken" in str(error.__cause__):
            reason = "the cluster does not take our token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's"
        raise ResourceError(f"Ray {run.ray_address}: {reason}") from error


def _fitted(run: Run) -> Run:
    """Return the run with as many workers as the cluster has room for.

    Raises:
        ResourceError: it has too little for ``resources.min_workers``, which would keep the run waiting without a
            message.
    """
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
        check_memory(run)
    except MemoryError as error:
        # With all of its nodes it fits.
        raise ResourceError(f"{short}: {error}") from error
    with contextlib.closing(EventWriter(run.directory, run.attempt)) as events:
        events.write("workers", number=number, because=short)
    print(fewer_workers(run), flush=True)
    return run


def worker_resources(job: JobSpec) -> dict[str, float]:
    """Return what Ray is to set aside for each worker."""
    gpus = job.resources.gpus_per_worker
    return {"CPU": job.resources.cpus_per_worker} | ({"GPU": gpus} if gpus else {})


def room_for(nodes: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> int:
    """Return how many workers that each need so much find room on nodes that have so much."""
    return sum(min(int(node.get(name, 0.0) // number) for name, number in needed.items()) for node in nodes)
