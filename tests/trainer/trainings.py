"""Trainings that tests compare: whole or in parts, on one rank or several, and every bit that they left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.record import Position
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build, choose_alpha
from trainer.distributed.sharded_model import ShardedModel
from trainer.runs.failures import Cancelled
from trainer.spec import JobSpec
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.hooks import Hooks, Resumed
from trainer.training.loop import Trainer

Tensors = dict[str, torch.Tensor]


def trainer_of(job: JobSpec, data: PreparedData, **settings: Any) -> Trainer:
    """``backend`` and ``dtype`` are the model's, other settings the trainer's."""
    of_model = {name: settings.pop(name) for name in ("backend", "dtype") if name in settings}
    sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch), **of_model)
    return Trainer(job, data, sharded, dense_optimizer(job, sharded), **settings)


def snapshot(trainer: Trainer) -> Tensors:
    """Every bit of the model: rows, their state, dense parameters and their optimizer's state."""
    shards, dense = trainer.sharded.state_for_checkpoint(trainer.dense_optimizer)
    found = {name: value.clone() for name, value in dense.items()}
    for shard in shards:
        found[shard.name] = shard.weight.clone()
        found |= {f"{shard.name}.{key}": value.clone() for key, value in shard.state.items()}
    return found


def differ(first: Tensors, second: Tensors) -> list[str]:
    """Names of what is not equal bit for bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def train_in_parts(
    job: JobSpec,
    data: PreparedData,
    folder: Path,
    cuts: list[int],
    spoil: Callable[[ShardedModel], None] = lambda sharded: None,
) -> tuple[Trainer, list[int]]:
    """Trains with a stop after each of these steps: each part is a new model, restored from the last checkpoint.

    ``spoil`` changes a new model before it is restored: what restoring brings back must not matter. Returns the last
    trainer and the step at which each part began.
    """
    starts = []
    for stop in [*cuts, None]:
        found = latest_valid(folder)
        sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch))
        optimizer = dense_optimizer(job, sharded)
        position, history = None, []
        if found is not None:
            spoil(sharded)
            sharded.load_from(found, dense_optimizer=optimizer)
            position, history = Position(**found.extra["position"]), found.extra["history"]
        starts.append(position.step if position else 0)

        def save(trainer: Trainer, sharded: ShardedModel = sharded, optimizer: Any = optimizer) -> None:
            extra = {"position": asdict(trainer.position), "history": trainer.history}
            sharded.save(folder, dense_optimizer=optimizer, extra=json.loads(json.dumps(extra)))

        resumed = None if position is None else Resumed(position, history)
        trainer = Trainer(job, data, sharded, optimizer, resumed=resumed)
        trainer.hooks = Hooks(
            should_stop=lambda trainer=trainer, stop=stop: "test" if stop == trainer.position.step + 1 else None,
            save=save,
        )
        if stop is None:
            trainer.train()
        else:
            with pytest.raises(Cancelled):
                trainer.train()
            assert trainer.position.step == stop
    return trainer, starts


def train_on_ranks(directory: Path, job: JobSpec, num_steps: int) -> tuple[Tensors, dict[str, Any]] | None:
    """On rank 0, the dense tensors and the tables after so many steps in float64, and the test's metrics."""
    data = PreparedData.open(directory)
    trainer = trainer_of(job, data, backend="reference", dtype=torch.float64)
    trainer.sharded.train()
    for parts, _ in zip(trainer.batches(), range(num_steps), strict=False):
        trainer.train_step(parts)
    found = {name: value.clone() for name, value in trainer.sharded._dense_tensors()}
    for name in data.tables:
        table = gather_table(trainer.sharded, name)
        found |= {} if table is None else {name: table.rows}
    metrics = trainer.evaluate("test")
    return (found, metrics) if dist.get_rank() == 0 else None
