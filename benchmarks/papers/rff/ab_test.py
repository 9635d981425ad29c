"""Four consumers of vectors and of their features on held-out days, instead of the paper's A/B test.

Xu et al., section 6 and appendix F.4, figure A.5. There, four applications ranked items from h for some users and from
phi for others. Here both rank the same rows of days that neither has seen. The vectors are trained again on the rows
before each day, with another seed. A consumer is either fitted again on the days before, or stays as it was fitted
before the first held-out day.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.rff import day_consumers, held_out_days
from benchmarks.papers.rff.day_consumers import CONSUMERS, PREDICTS, Consumer
from benchmarks.papers.rff.figures import Features, aligned, features_of, frozen_claim, unit
from benchmarks.papers.rff.held_out_days import Impressions, Log, day_name, impressions
from benchmarks.papers.rff.kept_results import kept, settings_of
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import NOT_RUN, Section, Verdict, verdict
from trainer.search.records import facts

WINDOW = 7
"""Number of days before a held-out day whose rows a consumer is fitted on."""
NUM_FITTED, NUM_ASKED = 8_000, 2_500
"""Most rows that a consumer is fitted on, and most rows of a held-out day."""
NUM_NEGATIVES, NUM_OTHERS = 4, 100
"""Number of items shown besides the taken item, in fitting and in evaluation."""


class Day(NamedTuple):
    """A held-out day: its vectors [n, d], and the impressions that a consumer is fitted and evaluated on."""

    vectors: Array
    training: Impressions
    asked: Impressions


@dataclass(frozen=True)
class Judged:
    """Figures of a consumer fitted for each day, and of one fitted for the first day only, unaligned and aligned."""

    refitted: tuple[float, ...]
    frozen: tuple[float, ...]
    frozen_aligned: tuple[float, ...]


def findings(
    log: Log,
    ids: Array,
    vectors: Mapping[int, Array],
    dim: int,
    behind: Sequence[dict[str, Any]],
    memory: Path,
    *,
    is_published: bool,
) -> tuple[Section, list[Verdict]]:
    """Return the section and the claims; ``vectors`` holds the vectors of the items ``ids`` [n] by day number.

    ``memory``: a folder of kept results.
    """
    numbers = sorted(vectors)
    days = days_of(log, numbers, ids, [vectors[number] for number in numbers])
    section, judged = section_of(days, numbers, dim, behind, memory)
    return section, claims_of(judged, dim, is_published=is_published)


def days_of(log: Log, numbers: Sequence[int], ids: Array, vectors: Sequence[Array]) -> list[Day]:
    """Return the held-out days with these numbers; their vectors are those of the items ``ids``.

    The consumers of a day are fitted on the log's earlier rows.
    """
    days = []
    for number, of_day in zip(numbers, vectors, strict=True):
        window, day = range(number - WINDOW, number), range(number, number + 1)
        training = impressions(log.before(number), ids, window, NUM_FITTED, NUM_NEGATIVES, seed=number)
        days.append(Day(of_day, training, impressions(log, ids, day, NUM_ASKED, NUM_OTHERS, seed=number)))
    return days


def arms(dim: int) -> dict[str, Features]:
    """Return the features that consumers read, keyed by name."""
    return {
        f"h_{dim}": unit,
        f"phi_{dim}": features_of(dim, dim, 1.0),
        f"phi_{2 * dim}": features_of(dim, 2 * dim, 1.0),
    }


def judge(days: Sequence[Day], features: Features, consumer: Consumer) -> Judged:
    """Evaluate a consumer that reads ``features`` of each day's vectors."""
    judges = [consumer(features(day.vectors), day.training) for day in days]
    turned = aligned([day.vectors for day in days])
    return Judged(
        tuple(one(features(day.vectors), day.asked) for one, day in zip(judges, days, strict=True)),
        tuple(judges[0](features(day.vectors), day.asked) for day in days[1:]),
        tuple(judges[0](features(rows), day.asked) for rows, day in zip(turned[1:], days[1:], strict=True)),
    )


def section_of(
    days: Sequence[Day], numbers: Sequence[int], dim: int, behind: Sequence[dict[str, Any]], memory: Path
) -> tuple[Section, dict[tuple[str, str], Judged]]:
    """Return the report's section, and the results by (consumer, arm).

    ``numbers``: the numbers of the days. ``memory``: a folder of kept results.
    """
    settings = [settings_of(day_consumers), settings_of(held_out_days)]
    read = [array for day in days for array in (day.vectors, *day.training, *day.asked)]
    judged = {}
    lines = []
    for name, consumer in CONSUMERS.items():
        for arm, features in arms(dim).items():
            found = kept(
                memory, "held-out-days", [name, arm, settings], read, partial(_figures, days, features, consumer)
            )
            one = Judged(**{key: tuple(values) for key, values in found.items()})
            judged[name, arm] = one
            change = _changes(one.refitted, judged[name, f"h_{dim}"].refitted)
            above = "" if arm == f"h_{dim}" else _cell(name, change, "+")
            figures = (_cell(name, one.refitted), above, _cell(name, one.frozen))
            lines.append((name, arm, *figures, _cell(name, one.frozen_aligned)))
    asked = ", ".join(f"{len(day.asked.shown):,}" for day in days)
    return Section(
        "ab_test",
        f"In place of the A/B test: four consumers of h and phi, {len(days)} held-out days from {day_name(numbers[0])} "
        f"to {day_name(numbers[-1])}",
        (
            "consumer", "reads", "fitted for the day (sd over days)", "by day above h (sd)",
            "fitted for the first day (sd)", "the same, others aligned (sd)",
        ),
        tuple(lines),
        (
            f"Recall@{day_consumers.TOP} of what was taken among {NUM_OTHERS} items that the user never took, in per "
            f"cent, and of ratings the root mean square error (less is better). Rows of each day: {asked}.",
            "Vectors are trained on all rows before their day, each day with another seed; consumers are fitted on at "
            f"most {NUM_FITTED:,} rows of the {WINDOW} days before it. Published: click-through rates above h's by "
            ".24, .13, .14 and .10 per cent, of four applications of a shop.",
            facts(behind),
        ),
    ), judged  # fmt: skip


def _figures(days: Sequence[Day], features: Features, consumer: Consumer) -> dict[str, Any]:
    return asdict(judge(days, features, consumer))


def claims_of(judged: Mapping[tuple[str, str], Judged], dim: int, *, is_published: bool) -> list[Verdict]:
    """Return the claims; they need more than one day."""
    rankers = [judged[name, f"h_{dim}"] for name in CONSUMERS if name not in PREDICTS]
    if not rankers[0].frozen:
        return []
    mean = statistics.fmean(value for one in rankers for value in one.refitted[1:])
    claims = [
        frozen_claim(
            "held-out days: consumers of h fitted for the first day keep nine tenths of their recall on aligned "
            "vectors of later ones, and not on vectors as they are",
            statistics.fmean(value for one in rankers for value in one.frozen_aligned) / mean,
            statistics.fmean(value for one in rankers for value in one.frozen) / mean,
        )
    ]
    for arm in (f"phi_{dim}", f"phi_{2 * dim}") if is_published else ():
        gains = []
        for name in CONSUMERS:
            changes = _changes(judged[name, arm].refitted, judged[name, f"h_{dim}"].refitted)
            gains.append(statistics.fmean(changes) * (-1 if name in PREDICTS else 1))
        better = sum(gain > 0 for gain in gains)
        text = f"published, A/B test: all four consumers are better with {arm} than with h_{dim}"
        claims.append(verdict(text, better == len(gains), f"{better} of {len(gains)} on the mean of the days"))
    return claims


def _changes(treated: Sequence[float], control: Sequence[float]) -> tuple[float, ...]:
    return tuple(one - other for one, other in zip(treated, control, strict=True))


def _cell(consumer: str, values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard deviation over days; recall is in per cent."""
    if not values:
        return NOT_RUN
    scale, digits = (1, 4) if consumer in PREDICTS else (100, 2)
    mean = f"{scale * statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({scale * statistics.stdev(values):.{digits}f})"
