"""The training loop of one rank: fetch, step, log, checkpoint, evaluate. The same code for one rank and for many.

Whatever a run does next is a function of ``Position`` and the seeds, so that a run that was killed and resumed from a
checkpoint ends with the same bits as one that was not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from embeddings.sharding.collectives import all_reduce
from trainer.failures import Cancelled, NonFiniteError
from trainer.label_side import with_swapped_classes
from trainer.schedules import schedule_of
from trainer.spec import DEFAULT_METRICS, JobSpec

EVALUATION_BATCH_SIZE = 8192
PROGRESS_SECONDS = 1.0
HELD_OUT = ("validation", "test")

Emit = Callable[..., None]
"""``emit(kind, **fields)``: an event of the run (trainer.events). Called on rank 0 alone."""


@dataclass
class Position:
    """How far a run is.

    ``step``: completed steps of this job. ``first_step``: steps that its tables had before it (warm start).
    ``evaluated``: epochs evaluated. ``loss_sum``, ``loss_count``: of the epoch under way.
    """

    step: int = 0
    first_step: int = 0
    evaluated: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0


class Model(Protocol):
    """What the loop needs of a model on many ranks: trainer.sharding.ShardedModel, and the baselines of benchmarks."""

    module: Any

    @property
    def tables(self) -> Mapping[str, Any]: ...

    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
    def set_context(self, step: int, sample_offset: int, global_size: int, part_offset: int = 0) -> None: ...
    def all_reduce_gradients(self) -> None: ...
    def non_finite_tables(self) -> list[str]: ...
    def gradient_squared_norm(self) -> float: ...
    def step_tables(self, k: int, scale: float = 1.0) -> None: ...
    def discard(self) -> None: ...
    def dense_parameters(self) -> list[tuple[str, torch.nn.Parameter]]: ...


class Trainer:
    """One rank of a run: its model, its place in the data, and the verbs that move it on."""

    # what is trained, on what
    job: JobSpec
    data: Any
    sharded: Model
    dense_optimizer: torch.optim.Optimizer | None
    splits: tuple[str, ...]

    # where
    rank: int
    world_size: int

    # how far
    position: Position
    steps_per_epoch: int
    num_steps: int
    history: list[dict[str, Any]]
    stop_asked: bool

    # told to
    emit: Emit
    should_stop: Callable[[], str | None]
    save: Callable[[Trainer], None]

    def __init__(
        self,
        job: JobSpec,
        data: Any,
        sharded: Model,
        dense_optimizer: torch.optim.Optimizer | None,
        *,
        position: Position | None = None,
        history: Sequence[dict[str, Any]] = (),
        emit: Emit = lambda kind, **fields: None,
        should_stop: Callable[[], str | None] = lambda: None,
        save: Callable[[Trainer], None] = lambda trainer: None,
    ):
        """``should_stop`` gives the reason once this rank is to stop. ``save`` writes a checkpoint (collective)."""
        self.job, self.data, self.sharded, self.dense_optimizer = job, data, sharded, dense_optimizer
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.splits = tuple(split for split in HELD_OUT if data.num_examples[split])
        self.position, self.history = position or Position(), list(history)
        self.steps_per_epoch = data.steps_per_epoch
        self.num_steps = job.epochs * data.steps_per_epoch
        self.stop_asked = False
        self.emit, self.should_stop, self.save = emit, should_stop, save
        self._dense_schedule = schedule_of(job.dense_optimizer.schedule)
        self._saved_step = self.position.step if position is not None else -1
        self._told_at, self._told_examples, self._examples = time.monotonic(), 0, 0

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains from ``position`` to the last epoch. Raises NonFiniteError, with nothing of that step applied, and
        Cancelled, after a checkpoint."""
        self.evaluate_if_due()
        self.sharded.train()
        for parts in self.batches():
            self.train_step(parts)
            self.log_progress()
            self.evaluate_if_due()
            self.checkpoint_if_due()
            self.stop_if_asked()
        self.checkpoint()

    def batches(self) -> Iterator[tuple[Any, ...]]:
        """This rank's part of every batch from ``position`` on, over all epochs that are left: its micro-batches."""
        micro_batches = self.job.micro_batches
        while self.position.step < self.num_steps:
            epoch, start = divmod(self.position.step, self.steps_per_epoch)
            parts = self.data.train_batches(epoch, start, self.rank, self.world_size, micro_batches)
            for first in parts:
                yield first, *itertools.islice(parts, micro_batches - 1)

    def train_step(self, parts: tuple[Any, ...]) -> None:
        """One step on all ranks, or on none. Gradients add up over the micro-batches of ``parts``."""
        step = self.position.first_step + self.position.step + 1
        for _, parameter in self.sharded.dense_parameters():
            parameter.grad = None
        loss, size = 0.0, parts[0].global_size
        for batch in parts:
            self.sharded.set_context(step, batch.sample_offset, size, batch.part_offset)
            part_loss = self.sharded.module.loss(with_swapped_classes(self.job, batch, step)).sum() / size
            part_loss.backward()
            loss += part_loss.item()
        self.sharded.all_reduce_gradients()
        mean_loss, squared_norm = self._agree(step, loss)
        scale = self._clip_dense(squared_norm)
        if self.dense_optimizer is not None:
            factor = float(self._dense_schedule.factors(np.array(step)))
            for group in self.dense_optimizer.param_groups:
                group["lr"] = self.job.dense_optimizer.learning_rate * factor
            self.dense_optimizer.step()
        self.sharded.step_tables(step, scale)
        self.position.step += 1
        self.position.loss_sum += mean_loss * size
        self.position.loss_count += size
        self._examples += size

    def _agree(self, step: int, loss: float) -> tuple[float, float]:
        """Over all ranks, the batch's mean loss and, where it is clipped, the squared norm of the tables' gradient.

        Raises NonFiniteError on every rank if loss, rows' gradients or dense gradients are not finite on any; also
        agrees on whether to stop."""
        tables = list(self.sharded.tables)
        bad = set(self.sharded.non_finite_tables())
        squared_norm = 0.0 if self.job.optimizer.clip_norm is None or bad else self.sharded.gradient_squared_norm()
        flags = [float(self.should_stop() is not None), *(float(name in bad) for name in tables)]
        everyone = torch.tensor([loss, squared_norm, *flags], dtype=torch.float64)
        if self.world_size > 1:
            everyone = all_reduce("agreement", everyone)
        mean_loss, squared_norm, stop, *counts = everyone.tolist()
        self.stop_asked = stop > 0
        names = [] if math.isfinite(mean_loss) else ["loss"]
        names += [f"table {name}" for name, count in zip(tables, counts, strict=True) if count > 0]
        # Their gradients are sums over ranks by now: the same on each.
        names += [
            f"parameter {name}"
            for name, parameter in self.sharded.dense_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        if names:
            self.sharded.discard()
            raise NonFiniteError(step, tuple(names))
        return mean_loss, squared_norm

    def _clip_dense(self, squared_norm: float) -> float:
        """What the tables' gradient is to be multiplied with, as the dense one was here: as torch's clip_grad_norm_ on
        all of them. ``squared_norm`` is that of the tables' gradient over all ranks."""
        limit = self.job.optimizer.clip_norm
        if limit is None:
            return 1.0
        gradients = [p.grad for _, p in self.sharded.dense_parameters() if p.grad is not None]
        squared_norm += sum(float(gradient.double().square().sum()) for gradient in gradients)
        scale = min(1.0, limit / (math.sqrt(squared_norm) + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
        return scale

    # --- telling and keeping -----------------------------------------------------------------------------------------

    def log_progress(self) -> None:
        """A progress event, at most one each second and one at the end."""
        now = time.monotonic()
        if self.rank != 0 or (now - self._told_at < PROGRESS_SECONDS and self.position.step < self.num_steps):
            return
        rate = (self._examples - self._told_examples) / max(now - self._told_at, 1e-9)
        self._told_at, self._told_examples = now, self._examples
        self.emit(
            "progress",
            epoch=(self.position.step - 1) // self.steps_per_epoch + 1,
            epochs=self.job.epochs,
            step=self.position.step,
            steps=self.num_steps,
            examples=(self.position.step - 1) // self.steps_per_epoch * self.data.num_examples["train"]
            + self.position.loss_count,
            examples_per_second=round(rate, 1),
        )

    def checkpoint_if_due(self) -> None:
        if self.position.step % self.job.checkpoint.every_steps == 0 and self.position.step < self.num_steps:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Saves where the run is, unless that is where it was resumed or saved before."""
        if self._saved_step != self.position.step:
            self.save(self)
            self._saved_step = self.position.step

    def stop_if_asked(self) -> None:
        """Leaves with a checkpoint if any rank was asked to stop. Ranks agreed on it within the step."""
        if self.stop_asked:
            self.checkpoint()
            raise Cancelled(self.should_stop() or "another rank was asked to stop")

    def evaluate_if_due(self) -> None:
        """At the end of each epoch, once: mean training loss, then AUC and logloss of each held-out split."""
        epoch, inside = divmod(self.position.step, self.steps_per_epoch)
        if inside or epoch == self.position.evaluated:
            return
        count = max(self.position.loss_count, 1)
        self._metric({"epoch": epoch, "split": "train", "loss": self.position.loss_sum / count})
        self.position.loss_sum, self.position.loss_count = 0.0, 0
        for split in self.splits:
            self._metric({"epoch": epoch, "split": split, **self.evaluate(split)})
        self.position.evaluated = epoch
        self.sharded.train()

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, Any]:
        """The model's metrics over the whole split, exact, on rank 0 ({} elsewhere). One without a value is None."""
        self.sharded.eval()
        model = self.sharded.module
        catalogue = model.catalogue(self.data)
        batches = self.data.eval_batches(split, EVALUATION_BATCH_SIZE, self.rank, self.world_size)
        found = [[part.double().numpy() for part in model.evaluate(batch, catalogue)] for batch in batches]
        mine = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        everyone: list[Any] = [mine]
        if self.world_size > 1:
            everyone = [None] * self.world_size
            dist.gather_object(mine, everyone if self.rank == 0 else None)
            if self.rank != 0:
                return {}
        arrays = [np.concatenate(parts) for parts in zip(*everyone, strict=True)]
        values = {name: value if math.isfinite(value) else None for name, value in model.metrics(*arrays).items()}
        wanted = self.job.evaluation.metrics
        shown = values if wanted == DEFAULT_METRICS else [name for name in wanted if name in values]
        return {**{name: values[name] for name in shown}, "examples": int(arrays[0].size)}

    def _metric(self, fields: dict[str, Any]) -> None:
        if self.rank == 0:
            self.history.append(fields)
            self.emit("metric", **fields)


def dense_optimizer(job: JobSpec, sharded: Model) -> torch.optim.Optimizer | None:
    """torch's own optimizer for what is not an embedding table; None where there is nothing (bpr)."""
    parameters = [parameter for _, parameter in sharded.dense_parameters()]
    if not parameters:
        return None
    spec = job.dense_optimizer
    if spec.kind == "adam":
        return torch.optim.Adam(parameters, lr=spec.learning_rate)
    return torch.optim.SGD(parameters, lr=spec.learning_rate)
