"""Interface of metrics without ranking, computed from all rows, from resampled rows, or across ranks in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import NAN, sigmoid
from trainer.metrics.counts import Blocks, Counts, Float64s, Int64s, any_nan

if TYPE_CHECKING:
    from trainer.metrics.streaming import RankGroup


@dataclass(frozen=True)
class Rows:
    """Held-out rows with their scores.

    ``scores`` and ``labels``: float32 [n]. ``users``: int32 [n], a number for each user, -1 for none; ``buckets``: int8
    [n], the frequency bucket of each row's item; None if no metric needs them. ``is_logit``: True if a score is the log
    odds of the label; ``is_log``: True if it is the log of the prediction.
    """

    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    users: npt.NDArray[np.int32] | None = None
    buckets: npt.NDArray[np.int8] | None = None
    is_logit: bool = True
    is_log: bool = False

    def __len__(self) -> int:
        return len(self.scores)

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        users = None if self.users is None else self.users[mask]
        buckets = None if self.buckets is None else self.buckets[mask]
        return replace(self, scores=self.scores[mask], labels=self.labels[mask], users=users, buckets=buckets)

    @cached_property
    def any_nan(self) -> bool:
        return any_nan(self.scores)

    @cached_property
    def predictions(self) -> Float64s:
        """Predictions of the label from the scores: the probability of 1 for logits, else the label's value."""
        if self.is_log:
            return np.exp(np.asarray(self.scores, np.float64))
        return sigmoid(self.scores) if self.is_logit else np.asarray(self.scores, np.float64)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.scores, self.labels)

    @property
    def known_users(self) -> npt.NDArray[np.int32]:
        assert self.users is not None, "set of_users in the metric's entry of trainer.spec.evaluation to collect users"
        return self.users

    @property
    def known_buckets(self) -> npt.NDArray[np.int8]:
        assert self.buckets is not None, "set of_items in the metric's entry of trainer.spec.evaluation to collect them"
        return self.buckets


class Resampled(NamedTuple):
    """A metric as a function of how often each unit (row, user) was drawn, for bootstrap intervals."""

    statistic: Callable[[Int64s], float]
    """The metric as a function of the multiplicity of each unit."""
    num_units: int | None = None
    """Number of units; None: the units are rows, or users with all their rows, as the job sets."""


class Metric(ABC):
    """Base of metrics; jobs name one by its key in trainer.metrics.registry. None of its methods changes the rows."""

    nothing: Any = NAN
    """Value of the metric if a score on any rank is NaN, or there are no rows."""

    @abstractmethod
    def of_rows(self, rows: Rows) -> Any:
        """Return the metric of all rows."""

    def resampled(self, rows: Rows) -> Resampled | None:
        """Return the metric as a function of resampled ``rows``, whose scores must not be NaN; None: no interval."""
        return None


class RowsMetric(Metric):
    """A metric that itself exchanges rows, or sums over rows, with the other ranks."""

    @abstractmethod
    def streamed(self, rows: Rows, ranks: RankGroup) -> Any:
        """Return the metric over all ranks' rows; ``rows`` are this rank's. Valid only on rank 0. Collective."""


class Sums(Protocol):
    """Running sums of a metric, to which counted rows are added in pieces of ascending score."""

    def add(self, counts: Counts) -> Any: ...


S = TypeVar("S", bound=Sums)


class CountsMetric(Metric, Generic[S]):
    """A metric that needs only the numbers of rows by score; all such metrics share one pass over the pieces."""

    @abstractmethod
    def sums(self, num_rows: int) -> S:
        """Return empty sums, to which ``num_rows`` rows will be added."""

    @abstractmethod
    def value(self, sums: S) -> Any:
        """Return the metric once all rows are added."""

    def of_rows(self, rows: Rows) -> Any:
        sums = self.sums(len(rows))
        if not rows.any_nan:
            sums.add(rows.blocks.counts())
        return self.nothing if rows.any_nan else self.value(sums)
