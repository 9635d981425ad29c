"""Task 2 of the ``rff`` recipe: the next item of a user, from the item vectors of each run and their features."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.papers.pages import published
from benchmarks.papers.rff import next_item_task
from benchmarks.papers.rff.figures import Features, deviation_claim, frozen_claim, percent, representations
from benchmarks.papers.rff.kept_results import kept, settings_of
from benchmarks.papers.rff.next_item_task import Histories, NextItem, judge_runs
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import Section, Verdict, verdict
from trainer.search.records import facts


def section_of(
    runs: Sequence[Array],
    of: Histories,
    dim: int,
    behind: Sequence[dict[str, Any]],
    memory: Path,
    max_epochs: int,
    *,
    is_published: bool,
    name: str = "task2",
    vectors: str = "item2vec's",
) -> tuple[Section, dict[str, NextItem]]:
    """Return the section of task 2, and its figures.

    ``runs``: vectors [n, dim] of each run. ``memory``: a folder of kept results, since consumers take minutes and a
    report may be made again. ``name``: the section's name; ``vectors``: the model that made the vectors.
    """
    judged = {
        row: _judged(row, of_runs, features, of, memory, max_epochs)
        for row, (of_runs, features) in representations(runs, dim).items()
    }
    lines = []
    for row, one in judged.items():
        paper = published.RFF_TASK_2.get(row, ("", "")) if is_published else ("", "")
        cells = (percent(one.recall), paper[0], percent(one.ndcg), paper[1])
        lines.append((row, *cells, percent(one.frozen), percent(one.frozen_aligned)))
    return Section(
        name,
        f"Task 2: the next item of a user, by a two-tower GRU over vectors ({vectors}) of dimension {dim}, {len(runs)} "
        "runs",
        (
            "features", "recall@5 (sd)", "published", "NDCG@5 (sd)", "published",
            "recall@5, fitted on run 0 alone (sd)", "the same, others aligned (sd)",
        ),
        tuple(lines),
        (
            f"{len(of.test)} users; the last item of each among {of.candidates.shape[1]} that they never took. In per "
            "cent, mean and standard deviation over runs.",
            f"Published are vectors of titles (Doc2vec), these are {vectors}; how many items theirs were ranked among "
            f"is not said. Rate {next_item_task.LEARNING_RATE:g} instead of .001, features standardised, the last "
            f"{next_item_task.LENGTH} items of a history.",
            facts(behind),
        ),
    ), judged  # fmt: skip


def claims_of(judged: Mapping[str, NextItem], dim: int, *, is_published: bool, task: str = "task 2") -> list[Verdict]:
    """Return the claims, which need more than one run; ``task``: name of the task in the claims."""
    plain, phi = judged[f"h_{dim}"], judged[f"phi_{dim}"]
    if not plain.frozen:
        return []
    mean = statistics.fmean(plain.recall)
    claims = [
        frozen_claim(
            f"{task}: a consumer fitted on one run keeps nine tenths of its recall on aligned vectors of the others, "
            "and not on vectors as they are",
            statistics.fmean(plain.frozen_aligned) / mean,
            statistics.fmean(plain.frozen) / mean,
        )
    ]
    if is_published:
        text = f"published, {task}: phi_{dim} has a tenth of the standard deviation of h_{dim}"
        claims.append(deviation_claim(text, phi.recall, plain.recall))
        gain = statistics.fmean(judged[f"phi_{2 * dim}"].recall) - mean
        text = f"published, {task}: phi_{2 * dim} is above h_{dim} (+4.75)"
        claims.append(verdict(text, gain > 0, f"{100 * gain:+.2f} per cent"))
    return claims


def _judged(
    name: str, runs: Sequence[Array], features: Features, of: Histories, memory: Path, max_epochs: int
) -> NextItem:
    decides = [name, max_epochs, settings_of(next_item_task)]
    found = kept(memory, "next-item", decides, (*runs, *of), lambda: asdict(judge_runs(runs, features, of, max_epochs)))
    return NextItem(**{key: tuple(values) for key, values in found.items()})
