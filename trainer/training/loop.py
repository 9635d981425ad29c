"""The training loop of one rank: fetch, step, log, checkpoint, evaluate. The code is the same for any number of ranks.

Everything that a run does is a function of ``Position`` and the seeds. So a run that is killed and resumed from a
checkpoint ends with the same bits as a run without interruption.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from embeddings.sharding.exchange.collectives import all_reduce
from trainer.checkpoint.record import Position
from trainer.data.one_pass.data import UNKNOWN_STEPS, OnePassData
from trainer.data.one_pass.position import Place
from trainer.data.prefetch import Prefetched
from trainer.distributed.dynamic_tables import DynamicRows
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.progressive import Progressive, forget_windows
from trainer.metrics.classification import entropy
from trainer.models.sse_labels import with_swapped_classes
from trainer.runs.events import phase
from trainer.runs.failures import Cancelled, NonFiniteError
from trainer.runs.starvation import Starvation
from trainer.spec import JobSpec
from trainer.spec.losses import LOSSES, loss_of
from trainer.spec.optimizer import schedule_of
from trainer.spec.regularizers import EarlyStopping
from trainer.training.dense_parameters import clip, non_finite_parameters
from trainer.training.hooks import Hooks, Resumed
from trainer.training.regularizers.early_stopping import Decision, decide
from trainer.training.regularizers.objective import job_objective
from trainer.training.regularizers.sam import ascended, gradient_squared_norm

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.distributed.sharded_model import ShardedModel

PROGRESS_SECONDS = 1.0
FOLLOWING_PROGRESS_SECONDS = 10.0
"""Shortest time between progress events of a job that follows a folder, which may run for months."""
IDLE_SECONDS = 0.5
"""Longest wait for the next batch before the ranks exchange which of them have a batch, and whether to stop or save."""
HELD_OUT = ("validation", "test")


class Trainer:
    """One rank's training: its model, its position in the data, and the methods of the training loop.

    ``save_asked``: True if the ranks have agreed that a checkpoint is due by time (``checkpoint_seconds``), at any
    step. ``waited_seconds``: time that steps of this attempt waited for their batches. ``starved``: share of the
    processor time that the rank with the least wanted and did not get (trainer.runs.starvation). ``cores``,
    ``memory_bytes``: processors and resident memory that the ranks use, summed over them; 0 if unknown.

    Without ``resumed`` it begins at the first step; ``device`` None: the CPU; without ``dynamic_rows`` no id of a
    dynamic table has a row yet.
    """

    def __init__(
        self,
        job: JobSpec,
        data: PreparedData,
        sharded: ShardedModel,
        dense_optimizer: torch.optim.Optimizer | None,
        *,
        resumed: Resumed | None = None,
        hooks: Hooks | None = None,
        device: torch.device | None = None,
        dynamic_rows: DynamicRows | None = None,
    ):
        self.job, self.data, self.sharded, self.dense_optimizer = job, data, sharded, dense_optimizer
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = device or torch.device("cpu")
        going_on = resumed or Resumed()
        self.position: Position = going_on.position
        self.history = list(going_on.history)
        self._know_rows(Place.of_json(self.position.place))
        self.stop_asked = self.save_asked = False
        self._saved_at = time.monotonic()
        self.hooks = hooks or Hooks()
        self.dynamic_rows = dynamic_rows or DynamicRows(job, data, sharded)
        self.objective = job_objective(job, sharded.module, data)
        self.evaluator = Evaluator(job, data, sharded.module, self.device, dynamic_rows=self.dynamic_rows)
        progressive_rows = job.evaluation.progressive_rows
        self.progressive = None if progressive_rows is None else Progressive(self.evaluator, progressive_rows)
        self._dense_schedule = schedule_of(job.dense_optimizer.schedule)
        self._saved_step = self.position.step if resumed is not None else -1
        self._told_at, self._told_examples, self._examples = time.monotonic(), 0, 0
        self._told_step = self.position.step
        self.waited_seconds = self.starved = self.cores = self.memory_bytes = 0.0
        self._starvation = Starvation()

    def _know_rows(self, place: Place) -> None:
        """Set splits and numbers of steps, which follow from the number of rows.

        In a one-pass job that number is unknown until the last row is read, so this is called again after each step.
        """
        if isinstance(self.data, OnePassData):
            self.data.begin(place)
        self.splits = tuple(split for split in HELD_OUT if self.data.num_examples[split])
        self.steps_per_epoch = self.data.steps_per_epoch
        self.num_steps = self.job.epochs * self.data.steps_per_epoch

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from ``position`` to the end of the last epoch.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; the step is not applied on any rank.
            Cancelled: a rank was asked to stop, and a checkpoint has been written.
        """
        self.evaluate_if_due()
        self.sharded.train()
        for parts in self.batches():
            self.reset_tables_if_due()
            self.score_before_training(parts)
            self.train_step(parts)
            self.log_progress()
            self.evaluate_if_due()
            self.checkpoint_if_due()
            self.stop_if_asked()
        self.checkpoint()

    def batches(self) -> Iterator[tuple[Batch, ...]]:
        """Yield, for every step from ``position`` to the end of training, the micro-batches of this rank's part."""
        upcoming: Iterator[Batch] | None = None
        try:
            while self.position.step < self.num_steps and not self.position.stopped:
                parts, upcoming = upcoming or self._read(*divmod(self.position.step, self.steps_per_epoch)), None
                with _closed(parts):
                    while micro_batches := self._next(parts):
                        epoch, inside = divmod(self.position.step + 1, self.steps_per_epoch)
                        if not inside and epoch < self.job.epochs:
                            # The next epoch's first batches are made during this one's last step and evaluation.
                            upcoming = self._read(epoch, 0)
                            if isinstance(upcoming, Prefetched):
                                upcoming.begin()
                        yield micro_batches
        finally:
            if upcoming is not None:
                with _closed(upcoming):
                    pass

    def _read(self, epoch: int, start: int) -> Iterator[Batch]:
        return iter(self.data.train_batches(epoch, start, self.rank, self.world_size, self.job.micro_batches))

    def _next(self, parts: Iterator[Batch]) -> tuple[Batch, ...]:
        """Return the micro-batches of the next step, () at the end of the epoch; count the seconds of waiting."""
        begun = time.monotonic()
        if self.job.dataset.follow is not None and isinstance(parts, Prefetched):
            while not self._agree_on_batch(parts.wait(IDLE_SECONDS)):
                self.log_progress()
                self.checkpoint_if_due()
                self.stop_if_asked()
        micro_batches = tuple(itertools.islice(parts, self.job.micro_batches))
        self.waited_seconds += time.monotonic() - begun
        return micro_batches

    def _agree_on_batch(self, is_here: bool) -> bool:
        """Return True if every rank has its next batch, or knows that there is none. Collective.

        The ranks also agree whether to stop and whether to save (``stop_asked``, ``save_asked``).
        """
        everyone = torch.tensor([is_here, *self._due()], dtype=torch.float64)
        if self.world_size > 1:
            everyone = all_reduce("next batch", everyone)
        ready, stop, save = everyone.tolist()
        self.stop_asked, self.save_asked = stop > 0, save > 0
        return ready == self.world_size

    def _due(self) -> tuple[float, float]:
        """Return two numbers, each 1 for yes or 0 for no: this rank is asked to stop; a checkpoint is due by time."""
        seconds = self.job.checkpoint_seconds
        is_time = self.rank == 0 and seconds is not None and time.monotonic() - self._saved_at >= seconds
        return float(self.hooks.should_stop() is not None), float(is_time)

    def reset_tables_if_due(self) -> None:
        """Reset rows and their optimizer state before the first step of every epoch except the first (MEDA)."""
        if self.job.regularizers.meda and self.position.step and self.position.step % self.steps_per_epoch == 0:
            self.sharded.reset_tables()

    def score_before_training(self, parts: tuple[Batch, ...]) -> None:
        """Score a batch before it is trained on, if the job asks for progressive validation; else do nothing."""
        if self.progressive is not None:
            self.sharded.eval()
            for figures in self.progressive.add(parts, self.position.loss_count):
                self._metric(figures)
            self.sharded.train()

    def train_step(self, parts: tuple[Batch, ...]) -> None:
        """Take one step on all ranks, or on none. Collective.

        ``parts`` are this rank's micro-batches, whose gradients are added up.

        Raises:
            NonFiniteError: on every rank, if the loss or a gradient is not finite.
        """
        step, size = self.position.first_step + self.position.step + 1, parts[0].global_size
        sam = self.job.regularizers.sam
        parts = self.dynamic_rows.admit(parts, self.position.step, step)
        loss = self._gradients(step, parts)
        mean_loss, squared_norm = self._agree(step, loss, with_norm=sam is not None)
        if sam is not None:
            with ascended(sam, self.sharded, gradient_squared_norm(sam, self.sharded, squared_norm)):
                loss = self._gradients(step, parts)
            _, squared_norm = self._agree(step, loss)
        scale = clip(self.sharded, self.job.optimizer.clip_norm, squared_norm)
        if self.dense_optimizer is not None:
            factor = float(self._dense_schedule.factors(np.array(step)))
            for group in self.dense_optimizer.param_groups:
                group["lr"] = self.job.dense_optimizer.learning_rate * factor
            self.dense_optimizer.step()
        self.sharded.step_tables(step, scale)
        self.position.step += 1
        # It was fitted to the scores of other parameters.
        self.position.calibration = None
        self.position.loss_sum += mean_loss * size
        self.position.loss_count += size
        self._examples += size
        if parts[0].place is not None:
            self.position.place = asdict(parts[0].place)
            self._know_rows(parts[0].place)

    def _gradients(self, step: int, parts: tuple[Batch, ...]) -> float:
        """Compute the gradients of the batch, and return this rank's part of the mean loss.

        Dense gradients are summed over ranks. Gradients of rows are recorded by the tables of this rank.
        """
        for _, parameter in self.sharded.dense_parameters():
            parameter.grad = None
        loss, size = 0.0, parts[0].global_size
        for batch in parts:
            self.sharded.set_context(step, batch.sample_offset, size, batch.part_offset)
            objective = self.objective(
                with_swapped_classes(self.job, batch, step, self.data.tasks).on(self.device), step
            )
            (objective.value.sum() / size).backward()
            loss += (objective.loss.detach().sum() / size).item()
        self.sharded.all_reduce_gradients()
        return loss

    def _agree(self, step: int, loss: float, with_norm: bool = False) -> tuple[float, float]:
        """Return the batch's mean loss and the squared norm of the tables' gradient, over all ranks. Collective.

        The norm is 0 unless the job clips gradients or ``with_norm`` is True. The ranks also agree whether to stop and
        whether to save (``stop_asked``, ``save_asked``), and what they use and lack (``starved``, ``cores``,
        ``memory_bytes``).
        """
        tables = list(self.sharded.tables)
        bad = set(self.sharded.non_finite_tables())
        with_norm = (with_norm or self.job.optimizer.clip_norm is not None) and not bad
        squared_norm = self.sharded.gradient_squared_norm() if with_norm else 0.0
        use = self._starvation.use()
        # A sum over ranks; each rank fills its own element.
        shares = [use.starved if rank == self.rank else 0.0 for rank in range(self.world_size)]
        flags = [*self._due(), use.cores, use.memory_bytes, *shares, *(float(name in bad) for name in tables)]
        everyone = torch.tensor([loss, squared_norm, *flags], dtype=torch.float64)
        if self.world_size > 1:
            everyone = all_reduce("agreement", everyone)
        mean_loss, squared_norm, stop, save, self.cores, self.memory_bytes, *others = everyone.tolist()
        self.stop_asked, self.save_asked = stop > 0, save > 0
        self.starved, counts = max(others[: self.world_size]), others[self.world_size :]
        names = [] if math.isfinite(mean_loss) else ["loss"]
        names += [f"table {name}" for name, count in zip(tables, counts, strict=True) if count > 0]
        # Their gradients are sums over ranks by now: the same on each.
        names += non_finite_parameters(self.sharded)
        if names:
            self.sharded.discard()
            raise NonFiniteError(step, tuple(names))
        return mean_loss, squared_norm

    # --- telling and keeping -----------------------------------------------------------------------------------------

    def log_progress(self) -> None:
        """Write a progress event after this attempt's first step, then at most one each second, and a last at the end.

        A job that follows a folder writes at most one event in FOLLOWING_PROGRESS_SECONDS, also while it waits for
        data.
        """
        now = time.monotonic()
        between = PROGRESS_SECONDS if self.job.dataset.follow is None else FOLLOWING_PROGRESS_SECONDS
        soon = self._told_examples and now - self._told_at < between
        self._tell_notes()
        if self.rank != 0 or not self.position.step or (soon and self.position.step < self.num_steps):
            return
        seconds = max(now - self._told_at, 1e-9)
        rate = (self._examples - self._told_examples) / seconds
        step_seconds = seconds / max(self.position.step - self._told_step, 1)
        self._told_at, self._told_examples, self._told_step = now, self._examples, self.position.step
        self.hooks.emit(
            "progress",
            epoch=(self.position.step - 1) // self.steps_per_epoch + 1,
            epochs=self.job.epochs,
            step=self.position.step,
            steps=self.num_steps if self.num_steps < UNKNOWN_STEPS else None,
            examples=(self.position.step - 1) // self.steps_per_epoch * self.data.num_examples["train"]
            + self.position.loss_count,
            examples_per_second=round(rate, 1),
            step_seconds=round(step_seconds, 6),
            waited_seconds=round(self.waited_seconds, 6),
            starved=round(self.starved, 3),
            **({"cores": round(self.cores, 2)} if self.cores else {}),
            **({"memory_bytes": int(self.memory_bytes)} if self.memory_bytes else {}),
            loss=self.position.loss_sum / max(self.position.loss_count, 1),
            **(self.data.lag() if isinstance(self.data, OnePassData) else {}),
        )

    def _tell_notes(self) -> None:
        """Emit notes about a followed data source, such as a folder, as events for the job's owner."""
        if isinstance(self.data, OnePassData):
            while not self.data.notes.empty():
                self._tell("info", message=self.data.notes.get())

    def checkpoint_if_due(self) -> None:
        is_due = self.save_asked or self.position.step % self.job.checkpoint.every_steps == 0
        if is_due and 0 < self.position.step < self.num_steps:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write a checkpoint, unless the run was resumed from or has saved a checkpoint of this very step."""
        if self._saved_step != self.position.step:
            with phase(self._tell, "checkpoint"):
                self.hooks.save(self)
            self._saved_step = self.position.step
        self._saved_at, self.save_asked = time.monotonic(), False

    def stop_if_asked(self) -> None:
        """Write a checkpoint and raise Cancelled if the ranks have agreed that one of them was asked to stop."""
        if self.stop_asked:
            self.checkpoint()
            raise Cancelled(self.hooks.should_stop() or "another rank was asked to stop")

    def evaluate_if_due(self) -> None:
        """Evaluate at the end of each epoch, once: mean training loss, then the metrics of each held-out split."""
        epoch, inside = divmod(self.position.step, self.steps_per_epoch)
        if inside or epoch == self.position.evaluated:
            return
        count = max(self.position.loss_count, 1)
        for figures in () if self.progressive is None else self.progressive.end(self.position.loss_count):
            self._metric(figures)
        known = self.evaluate("train") if self.job.evaluation.training else {}
        self._metric({"epoch": epoch, "split": "train", "loss": self.position.loss_sum / count, **known})
        sample_users = self.job.evaluation.sample_users
        self.position.loss_sum, self.position.loss_count = 0.0, 0
        for split in self.splits if sample_users is None else set(self.splits) & {"validation"}:
            self._metric({"epoch": epoch, "split": split, **self.evaluate(split, sample_users)})
        self.position.evaluated = epoch
        self.position.calibration = self.evaluator.calibration.as_json()
        for note in self.evaluator.calibration.problems():
            self._tell("info", message=f"after epoch {epoch}: {note}")
        if self.rank == 0 and (rows := self.dynamic_rows.in_words()):
            self.hooks.emit("info", message=f"after epoch {epoch}: {rows}")
        self.stop_early_if_due(epoch)
        if self.position.stopped or epoch == self.job.epochs:
            of_epoch = self.position.step // self.steps_per_epoch
            for split in self.splits if sample_users is not None else ():
                self._metric({"epoch": of_epoch, "split": split, **self.evaluate(split)})
            self._tell_poor_probabilities(of_epoch)
        self.sharded.train()

    def _tell_poor_probabilities(self, epoch: int) -> None:
        """Emit a note if a constant has a lower log loss on validation rows than the model after ``epoch``."""
        share = self.data.num_positives["validation"] / max(self.data.num_examples["validation"], 1)
        values = [row.get("logloss") for row in self.history if row["epoch"] == epoch and row["split"] == "validation"]
        is_probability = LOSSES[loss_of(self.job)].is_logit and self.job.output_calibration == "none"
        if is_probability and values and (values[-1] or 0.0) > entropy(share):
            self._tell(
                "info",
                message=f"the probabilities are poor: validation log loss is {values[-1]:.4f} after epoch {epoch}, and "
                f"{entropy(share):.4f} if every row gets the share of positives, {share:.3f}. The order of the scores "
                "may be good all the same. If you use probabilities, set output_calibration: isotonic, train fewer "
                "epochs, or set l2",
            )

    def stop_early_if_due(self, epoch: int) -> None:
        """Apply the job's early stopping after the evaluation of ``epoch``.

        With ``keep: best`` the parameters after the best epoch are saved, and restored when training ends. Every rank
        takes the same decision, which is a function of the metrics.
        """
        stopping = self.job.early_stopping
        if stopping is None:
            return
        decision = self._decided(stopping)
        if decision.best_epoch == epoch and stopping.keep == "best":
            self.hooks.save_best(self)
        ends = decision.stop or epoch == self.job.epochs
        best: Position | None = None
        if ends and stopping.keep == "best" and decision.best_epoch not in (0, epoch):
            best = self.hooks.load_best(self)
            if best is None:
                self._tell("info", message=f"epoch {decision.best_epoch} was the best, but its parameters are not kept")
        if not decision.stop and best is None:
            return
        self.position = best or self.position
        self.position.stopped = True
        # A checkpoint already saved at this step does not record that it is the last.
        self._saved_step = -1
        if self.rank == 0:
            best_epoch, value = decision.best_epoch, decision.best if decision.best_epoch else None
            restored = f"; its parameters are those after epoch {best_epoch}" if best is not None else ""
            why = f"validation {decision.metric} {value} of epoch {best_epoch} is the best so far"
            self.hooks.emit(
                "info", message=f"training ends after epoch {epoch}: {why}{restored}", stopped_after_epoch=epoch,
                best_epoch=best_epoch, metric=decision.metric, value=value,
            )  # fmt: skip

    def _decided(self, stopping: EarlyStopping) -> Decision:
        """Return rank 0's decision on every rank: only rank 0 has the metrics."""
        shared: list[Any] = [None]
        if self.rank == 0:
            try:
                shared = [decide(stopping, self.history, self.data.tasks[0].name if self.data.tasks else "")]
            except ValueError as error:
                shared = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(shared, 0)
        if isinstance(shared[0], ValueError):
            raise shared[0]
        return shared[0]

    def evaluate(self, split: str, sample_users: int | None = None) -> dict[str, Any]:
        """Return the model's exact metrics over the whole split as {name: value} on rank 0, {} elsewhere. Collective.

        A metric without a value is None. ``sample_users``: approximate number of users whose items are ranked; None:
        all users.
        """
        self.sharded.eval()
        with phase(self._tell, "evaluation"):
            return self.evaluator.evaluate(split, sample_users)

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.rank == 0:
            self.hooks.emit(kind, **fields)

    def _metric(self, fields: dict[str, Any]) -> None:
        if self.rank == 0:
            self.history.append(fields)
            forget_windows(self.history)
            self.hooks.emit("metric", **fields)


def _closed(batches: Iterator[Batch]) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that stops the prefetching of ``batches`` at its end, if they are prefetched."""
    return contextlib.closing(batches) if isinstance(batches, Prefetched) else contextlib.nullcontext()
