"""The ranks of a run as Ray actors: resources, rank numbers, and the end of all ranks when one fails.

Ray Train is not used: its five additional actors, with their imports, would take most of a short run's time (ADR 0047).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.distributed.light_imports import import_torchrec
from trainer.launch.rank_link import linked_rank, log_of
from trainer.runs.directory import Run, choose_backend
from trainer.runs.failures import CONSEQUENCES, Cancelled, ResourceError, classify
from trainer.runs.protocol import LOG_FILE

if TYPE_CHECKING:
    import torch.distributed as dist

ROOM_SECONDS = 60.0
"""Longest wait of ranks for resources that the cluster had a moment ago."""
START_SECONDS = 300.0
"""Longest start of the ranks' processes; a node that dies meanwhile takes their resources away."""
DEATH_SECONDS = 5.0
"""Time to wait for Ray to report a dead rank after its peers failed."""
DRAIN_SECONDS = 1.0
"""Time between two checks for nodes that Ray drains."""


class Seat(NamedTuple):
    """Location of an actor: Ray's id of its node, the node's address, and the GPUs that Ray assigned to it."""

    node: str
    address: str
    gpus: tuple[str, ...]


class RankEnvironment(NamedTuple):
    """Rank, world size and GPUs that the environment variables of a rank's process are made from."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    gpus_of_host: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Return the variables that torch, TorchRec and CUDA read.

        A rank sees the GPUs of all ranks of its host: NCCL copies between them directly.
        """
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of_host)} if self.gpus_of_host else {}
        return {name: str(number) for name, number in numbers.items()} | gpus


class RankActor:
    """The process of a rank."""

    _store: dist.TCPStore | None = None

    def seat(self) -> Seat:
        """Return the node, its address and the GPUs of this process."""
        import ray

        address = ray.util.get_node_ip_address()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Seat(ray.get_runtime_context().get_node_id(), address, gpus)

    def open_store(self, address: str, world_size: int) -> int:
        """Open torch's key-value store by which ranks find each other; return its port. Called only on rank 0."""
        import torch.distributed as dist

        self._store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def train(
        self, environment: RankEnvironment, store: tuple[str, int], directory: str, document: dict[str, Any] | None
    ) -> None:
        """Train this rank's part of a run.

        ``store``: address and port of rank 0's store. ``document``: the driver's ``run.json``, if this host does not
        see ``directory``.
        """
        os.environ.update(environment.variables())
        with contextlib.ExitStack() as stack:
            log = Path(directory) / LOG_FILE
            if document is not None:
                directory = str(stack.enter_context(linked_rank(document, environment.rank)))
                log = log_of(Path(directory), environment.rank)
            _speak_into(log)
            self._join(environment, store)
            from trainer.launch.worker import train_rank

            train_rank(directory, self.seat().gpus)

    def _join(self, environment: RankEnvironment, store: tuple[str, int]) -> None:
        """Initialize the process group, which ends with this process."""
        import_torchrec()
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore(*store, environment.world_size, is_master=False)
        backend = choose_backend(len(environment.gpus_of_host))
        dist.init_process_group(backend, store=self._store, rank=environment.rank, world_size=environment.world_size)


def _speak_into(path: Path) -> None:
    """Redirect this rank's output into a log file. Ray would delay and prefix the lines, and mix in its own."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Ray's workers log at level INFO, and FBGEMM has a line for each of its libraries.
    logging.getLogger().setLevel(logging.WARNING)


def rank_environments(seats: Sequence[Seat]) -> list[RankEnvironment]:
    """Return the environment of each actor: ranks of a host are consecutive, in the order of their GPUs.

    Rank 0 is the first actor, unless another actor on its host has a GPU with a lower number.
    """
    hosts: dict[str, list[int]] = {}
    for actor, seat in enumerate(seats):
        hosts.setdefault(seat.node, []).append(actor)
    found: dict[int, RankEnvironment] = {}
    for actors in hosts.values():
        actors.sort(key=lambda actor: [(len(gpu), gpu) for gpu in seats[actor].gpus])  # 10 comes after 9
        gpus = tuple(gpu for actor in actors for gpu in seats[actor].gpus)
        for local_rank, actor in enumerate(actors):
            found[actor] = RankEnvironment(len(found), len(seats), local_rank, len(actors), gpus)
    return [found[actor] for actor in range(len(seats))]


@contextlib.contextmanager
def rank_actors(run: Run, needed: Mapping[str, float]) -> Iterator[list[Any]]:
    """Yield an actor for each rank. All actors are killed at the end of the block, also after an error.

    ``needed``: resources that Ray reserves for each actor.

    Raises:
        Cancelled: the run is asked to stop before the cluster has the resources.
        ResourceError: the cluster does not have the resources.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    number = run.job.resources.num_workers
    # Use as few nodes as possible.
    group = ray.util.placement_group([dict(needed)] * number, strategy="PACK")
    actors: list[Any] = []
    try:
        for _ in _while_waiting(run, ROOM_SECONDS, "had no room for", "other work has its CPUs or GPUs"):
            if group.wait(1.0):
                break
        for bundle in range(number):
            here = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
            # A new attempt from the newest checkpoint is the service's: Ray's retries would hide the failure.
            actor = ray.remote(RankActor).options(
                num_cpus=needed["CPU"], num_gpus=needed.get("GPU", 0), max_restarts=0, scheduling_strategy=here
            )
            actors.append(actor.remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _while_waiting(run: Run, seconds: float, what: str, why: str) -> Iterator[None]:
    """Yield again and again until the caller leaves the loop.

    Raises:
        ResourceError: ``seconds`` are over; ``what`` and ``why`` are parts of the message.
        Cancelled: the run is asked to stop.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if run.cancel_file.exists():
            raise Cancelled(run.cancel_file.read_text("utf-8"))
        yield
    number = run.job.resources.num_workers
    raise ResourceError(f"the cluster at {run.cluster} {what} {number} workers for {seconds:g} seconds: {why}")


def train_on(actors: Sequence[Any], run: Run, document: dict[str, Any] | None) -> None:
    """Train on all actors and return when all have ended.

    ``document``: the driver's ``run.json`` if other hosts do not see the run directory, else None.

    Raises:
        Cancelled: the run is asked to stop before the actors have started.
        ResourceError: the actors do not start.
        RayActorError: an actor has died.
        RayTaskError: the error of the first actor that failed, if none died; it does not wait for the others.
    """
    import ray
    from ray.exceptions import RayTaskError

    asked = [actor.seat.remote() for actor in actors]
    for _ in _while_waiting(run, START_SECONDS, "did not start", "a node may be lost, or is slow"):
        if not ray.wait(asked, num_returns=len(asked), timeout=1.0)[1]:
            break
    seats = ray.get(asked)
    environments = rank_environments(seats)
    first = next(actor for actor, environment in enumerate(environments) if environment.rank == 0)
    address = seats[first].address
    store = (address, ray.get(actors[first].open_store.remote(address, len(actors))))
    with _drains_noticed(run, {seat.node for seat in seats}):
        ends = [
            actor.train.remote(environment, store, str(run.directory), document)
            for actor, environment in zip(actors, environments, strict=True)
        ]
        while ends:
            # Signals are handled between two waits.
            ended, ends = ray.wait(ends, num_returns=1, timeout=1.0)
            try:
                ray.get(ended)
            except RayTaskError as error:
                if classify(error.cause).code in CONSEQUENCES:
                    _raise_a_death(ends)
                raise


def _raise_a_death(ends: list[Any]) -> None:
    """Wait up to DEATH_SECONDS for Ray to report that a rank has died, and raise that error if it does.

    A rank that lost its connection to the dead rank may have reported its own failure before.
    """
    import ray
    from ray.exceptions import RayTaskError

    deadline = time.monotonic() + DEATH_SECONDS
    while ends and time.monotonic() < deadline:
        ended, ends = ray.wait(ends, num_returns=1, timeout=1.0)
        with contextlib.suppress(RayTaskError):
            ray.get(ended)


@contextlib.contextmanager
def _drains_noticed(run: Run, nodes: set[str]) -> Iterator[None]:
    """During the block, ask the ranks to stop once Ray drains one of their nodes: its machine will be shut down."""
    from ray._private.state import state  # Ray Train reads it too; there is no public way
    from ray.exceptions import RayError

    done = threading.Event()

    def look() -> None:
        while not done.wait(DRAIN_SECONDS):
            # No answer from the head means nothing.
            with contextlib.suppress(RayError, RuntimeError, ConnectionError):
                drained = sorted(nodes & state.get_draining_nodes().keys())
                if drained:
                    run.ask_to_stop(f"Ray drains {', '.join(drained)}")
                    return

    thread = threading.Thread(target=look, name="drains", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
