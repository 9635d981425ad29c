"""A rank as a Ray actor: where it is, and how it trains. Its import is light: TorchRec comes when it is to train."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.distributed.light_imports import import_torchrec
from trainer.launch.rank_link import linked_rank, log_of
from trainer.runs.directory import choose_backend
from trainer.runs.protocol import LOG_FILE

if TYPE_CHECKING:
    import torch.distributed as dist


class Seat(NamedTuple):
    """Where an actor is: Ray's id of its node, the node's address, and the names of the GPUs that Ray gave to it."""

    node: str
    address: str
    gpus: tuple[str, ...]


class Place(NamedTuple):
    """What a rank is to know of itself and of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    gpus_of_host: tuple[str, ...]

    def environment(self) -> dict[str, str]:
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
        """Return the place of this process: its node and its position there."""
        import ray

        address = ray.util.get_node_ip_address()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Seat(ray.get_runtime_context().get_node_id(), address, gpus)

    def open_store(self, address: str, world_size: int) -> int:
        """Open the store by which ranks find each other, and return its port; called on rank 0 alone."""
        import torch.distributed as dist

        self._store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def train(self, place: Place, store: tuple[str, int], directory: str, document: dict[str, Any] | None) -> None:
        """Train this rank's part of a run.

        Args:
            place: of this rank.
            store: address and port of rank 0's.
            directory: of the run, where this host sees it.
            document: the driver's ``run.json`` where it does not, else None.
        """
        os.environ.update(place.environment())
        with contextlib.ExitStack() as stack:
            log = Path(directory) / LOG_FILE
            if document is not None:
                directory = str(stack.enter_context(linked_rank(document, place.rank)))
                log = log_of(Path(directory), place.rank)
            _speak_into(log)
            self._join(place, store)
            from trainer.launch.worker import train_rank

            train_rank(directory, self.seat().gpus)

    def _join(self, place: Place, store: tuple[str, int]) -> None:
        """Begin the process group, which ends with this process."""
        import_torchrec()
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore(*store, place.world_size, is_master=False)
        backend = choose_backend(len(place.gpus_of_host))
        dist.init_process_group(backend, store=self._store, rank=place.rank, world_size=place.world_size)


def _speak_into(path: Path) -> None:
    """Let what this rank says go straight into a log: through Ray it comes late, prefixed, between Ray's own lines."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Ray's workers log at level INFO, and FBGEMM has a line for each of its libraries.
    logging.getLogger().setLevel(logging.WARNING)
