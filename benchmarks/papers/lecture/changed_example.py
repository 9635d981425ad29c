"""Effect of one changed example, by kind of descent: for recipe ``towers`` (Mądry's lecture, section 8, figure 7)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.lecture.one_changed_example import ChangedExampleSettings
from benchmarks.papers.trials.experiments import SENTENCES
from benchmarks.papers.trials.trial import TextTrial
from trainer.report_pages.section import NOT_RUN, Curve, Panel, Section
from trainer.search.records import facts

TABLE = "stability"
LEVELS = (0.5, 0.3, 0.1)
"""Levels of the training logloss; distances are compared where it first reaches them."""
DESCENTS = {
    ("linear", "one example a step"): ChangedExampleSettings(0, "one", 1.0, 10_000),
    ("linear", "all examples a step"): ChangedExampleSettings(0, "all", 3.0, 3_000),
    ("linear, l2 1e-4", "one example a step"): ChangedExampleSettings(0, "one", 1.0, 10_000, l2=1e-4),
    ("linear, l2 1e-4", "all examples a step"): ChangedExampleSettings(0, "all", 3.0, 3_000, l2=1e-4),
    ("16 hidden units", "one example a step"): ChangedExampleSettings(16, "one", 0.1, 10_000),
    ("16 hidden units", "all examples a step"): ChangedExampleSettings(16, "all", 1.0, 1_000),
}
Record = dict[str, Any]


def trials(data: Path, seed: int, quick: bool) -> list[TextTrial]:
    """Return a trial for each model and kind of descent; ``quick``: few examples and steps."""
    found = []
    for (model, descent), settings in DESCENTS.items():
        if quick:
            settings = replace(settings, steps=settings.steps // 50, points=5, examples=60, neighbours=2)
        found.append(
            TextTrial(TABLE, model, descent, "one_changed_example", data, (SENTENCES,), asdict(settings), seed)
        )
    return found


def sections(records: Mapping[tuple[str, str], Sequence[Record]]) -> Iterator[Section]:
    """Yield the distances between trainings on S and on S'; ``records`` by model and kind of descent."""
    if not records:
        return
    lines, curves = [], dict[str, dict[str, Curve]]()
    for (model, descent), of_seeds in records.items():
        lines += [(model, descent, f"{level:g}", *_at(level, of_seeds)) for level in LEVELS]
        lines.append((model, descent, "at the end", *_means([_figures(record)[-1] for record in of_seeds])))
        curves.setdefault(model, {})[descent] = _curve(of_seeds)
    ended = [record for of_seeds in records.values() for record in of_seeds]
    one = _figures(ended[0])[0]
    yield Section(
        "stability", "Training sets that differ in one example (section 8, figure 7)",
        ("model", "descent", "training logloss", "passes", "epsilon", "change of training logloss", "of parameters"),
        tuple(lines),
        (
            f"S has {one['examples']} sentences. Epsilon: the largest change of the logloss of a held-out sentence, "
            f"of {one['neighbours']} S' in each seed, in the mean over seeds: a lower bound. Compared where the "
            f"training logloss first is at most so large; {NOT_RUN}: it never is.",
            facts(ended),
        ),
        tuple(Panel(model, "training logloss", "epsilon", by) for model, by in curves.items()),
    )  # fmt: skip


def _figures(record: Record) -> list[dict[str, float]]:
    return [one for one in record["metrics"] if one["split"] == "test"]


def _at(level: float, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the cells of one level: means over the seeds."""
    reached = [next((one for one in _figures(record) if one["logloss"] <= level), None) for record in records]
    found = [one for one in reached if one is not None]
    if len(found) < len(reached):
        return (NOT_RUN,) * 4
    return _means(found)


def _means(figures: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    mean = {name: statistics.fmean(one[name] for one in figures) for name in figures[0] if name != "split"}
    return f"{mean['passes']:,.0f}", f"{mean['epsilon']:.3f}", f"{mean['apart']:.4f}", f"{mean['parameters']:.4f}"


def _curve(records: Sequence[Record]) -> Curve:
    """Return epsilon by the training logloss, means over the seeds of each point of the training."""
    points = zip(*(_figures(record) for record in records), strict=True)
    means = [tuple(statistics.fmean(one[name] for one in of) for name in ("logloss", "epsilon")) for of in points]
    return sorted(means)
