"""Search of ``optimizer.alpha: auto``: the alpha of adaptive regularization that does best on the validation split.

The grid is 10^(n/2) with n = -13 .. -2, half decades from 10^-6.5 to 10^-1 (Li and Lyu). The curve over alpha had one
hump on every data set that was examined, so the search begins at the grid value nearest to the default
(trainer.distributed.build.default_alpha) and climbs. A trial is a short training of the job from its initial values
over its first SHORT_EPOCHS epochs, or all where it has fewer, as what alpha is about does not show within the first
one; its score is the metric that early stopping watches (AUC where nothing else is said) on the validation split, after
the last of them.

All of it is a function of the job and its data, and what is found is kept in the run directory together with their
names, so that a run that is tried again goes on with the search where it was, and another job there begins its own.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from embeddings.durable_files import write_json
from embeddings.optim.registry import KINDS
from trainer.distributed.build import build, choose_alpha, default_alpha
from trainer.runs.lineage import spec_sha256
from trainer.spec import JobSpec
from trainer.spec.evaluation import is_lower_better
from trainer.spec.regularizers import EarlyStopping
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.hooks import Hooks
from trainer.training.loop import Trainer
from trainer.training.regularizers.early_stopping import decide

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.runs.directory import Run

GRID = range(-13, -1)
"""Exponents of sqrt(10)."""
SHORT_EPOCHS = 4
"""Two understate alpha: one that is too small looks best after them, and is not after four (docs/reports/alpha.md)."""
FILE = f"alpha_of_{SHORT_EPOCHS}_epochs.json"
"""Scores after another number of epochs do not compare: a release that looks at as many goes on with them, no other."""

Emit = Callable[..., None]
Score = Callable[[float], float]


def first_alpha(
    run: Run, data: PreparedData, device: torch.device, emit: Emit, should_stop: Callable[[], str | None]
) -> float | None:
    """Return the alpha of a table's first training, whatever the job says of it; None for optimizers without one.

    Collective.

    Raises:
        Cancelled: any rank is asked to stop during a search.
    """
    job = run.job
    if not KINDS[job.optimizer.kind].takes("alpha") or job.optimizer.alpha != "auto":
        return choose_alpha(job, data.steps_per_epoch)
    watched = job.regularizers.early_stopping or EarlyStopping()
    regularizers = job.regularizers.model_copy(update={"early_stopping": None})
    short = job.model_copy(update={"epochs": min(SHORT_EPOCHS, job.epochs), "regularizers": regularizers})

    def score(alpha: float) -> float:
        metric, value = _validation(short, data, alpha, watched, device, should_stop)
        emit("info", message=f"alpha {alpha:.3g}: validation {metric} {value}", tried_alpha=alpha, value=value)
        if value is None:
            return -math.inf
        return -value if is_lower_better(metric) else value

    start = default_alpha(data.steps_per_epoch, job.optimizer.decay)
    of = {"job": spec_sha256(run.submitted), "data": data.dataset_fingerprint}
    return climbed(start, score, _Kept(run.directory / FILE, of, run.fence))


def climbed(start: float, score: Score, known: Any) -> float:
    """Return the alpha of the grid that no neighbour beats, from the one nearest to ``start``.

    The smaller of equals wins.

    Args:
        start: the alpha to begin near.
        score: the score of an alpha; larger is better, -inf where there is none.
        known: scores by exponent, to be asked and filled.
    """
    best = min(max(round(2.0 * math.log10(start)), GRID.start), GRID.stop - 1)
    while True:
        near = [n for n in (best, best - 1, best + 1) if n in GRID]
        for n in near:
            if n not in known:
                known[n] = score(10.0 ** (n / 2))
        top = max(near, key=lambda n: known[n])
        if top == best:
            return 10.0 ** (best / 2)
        best = top


class _Kept(dict[int, float]):
    """Scores by exponent, the same on every rank, in a file of rank 0's. ``of``: the job and data that have them."""

    def __init__(self, path: Path, of: dict[str, str], fence: Callable[[], None]):
        trials: list[Any] = [_scores(path, of) if _rank() == 0 else {}]
        if _world_size() > 1:
            dist.broadcast_object_list(trials, 0)
        super().__init__(trials[0])
        self._path, self._of, self._fence = path, of, fence

    def __setitem__(self, n: int, value: float) -> None:
        super().__setitem__(n, value)
        if _rank() == 0:
            scores = {str(key): score for key, score in self.items()}
            write_json(self._path, self._of | {"scores": scores}, fence=self._fence)


def _scores(path: Path, of: dict[str, str]) -> dict[int, float]:
    """Return the scores in a file, none where it is of another job or of other data."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text("utf-8"))
    if any(document.get(name) != value for name, value in of.items()):
        return {}
    return {int(n): float(value) for n, value in document["scores"].items()}


def _validation(
    job: JobSpec,
    data: PreparedData,
    alpha: float,
    watched: EarlyStopping,
    device: torch.device,
    should_stop: Callable[[], str | None],
) -> tuple[str, float | None]:
    """Return (metric, its value after the last epoch or None) of a training with this alpha.

    The result is the same on all ranks. Collective.
    """
    sharded = build(job, data, alpha=alpha, device=device)
    hooks = Hooks(should_stop=should_stop)
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded), hooks=hooks, device=device)
    trainer.splits = ("validation",)
    trainer.train()
    outcome: list[Any] = [None]
    if trainer.rank == 0:
        first = data.tasks[0].name if data.tasks else ""
        decision = decide(watched, [metrics for metrics in trainer.history if metrics["epoch"] == job.epochs], first)
        outcome = [(decision.metric, decision.best if decision.best_epoch else None)]
    if trainer.world_size > 1:
        dist.broadcast_object_list(outcome, 0)
    del trainer, sharded
    # Rows are held in cycles, and the next model needs their memory.
    gc.collect()
    metric, value = outcome[0]
    return metric, value


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
