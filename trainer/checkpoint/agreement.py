"""Ranks agree on what they did before any of them raises: a save or load succeeds on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from trainer.storage.base import StorageError

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not valid; the message says which, why and what to do."""


class FormatVersionError(CheckpointError):
    """A checkpoint is undamaged, but has a format version that this version cannot read."""


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def attempt(function: Callable[..., Result], *arguments: Any) -> tuple[Result | None, str | None]:
    """Call the function; return (its result, None), or (None, a message) if it raised an error.

    Ranks exchange these pairs (:func:`agree`) before any of them raises.
    """
    try:
        return function(*arguments), None
    except (OSError, SafetensorError) as error:
        return None, f"{error}: free space in this folder, or give one that every rank can write"
    except (ValueError, StorageError) as error:
        return None, str(error)
    except Exception as error:  # any error: the other ranks wait for this rank's outcome
        return None, f"{type(error).__name__}: {error}"


def agree(outcome: tuple[Result, str | None], where: str, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Exchange the ranks' outcomes of :func:`attempt`; return all results in rank order. Collective.

    Raises:
        CheckpointError: on all ranks, if any rank has an error; the message begins with ``where``.
    """
    _, world_size = rank_and_size(group)
    everyone: list[Any] = [outcome]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, outcome, group=group)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(everyone) if problem is not None]
    if problems:
        raise CheckpointError(f"{where} ({'; '.join(problems)})")
    return [result for result, _ in everyone]


def from_rank_0(outcome: tuple[Any, str | None] | None, where: str, group: dist.ProcessGroup | None) -> Any:
    """Return rank 0's result on every rank; other ranks may pass None as ``outcome``. Collective.

    Raises:
        CheckpointError: on all ranks, if rank 0, or another rank that passed an outcome, has an error.
    """
    return agree(outcome if outcome is not None else (None, None), where, group)[0]
