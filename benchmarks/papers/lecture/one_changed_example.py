"""One changed example: descent by single examples and by full batches (Mądry's lecture, section 8, figure 7).

A classifier of sentences is trained on S and on several sets S' that differ from S in one example. All trainings have
the same initial values and the same order of examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.lecture.linear_margin import Rows, read_rows
from trainer.generalization.sections import distance


@dataclass(frozen=True)
class ChangedExampleSettings:
    """``hidden``: units of the one hidden layer, 0 for a linear model; ``by``: whether a step uses one example or all.

    ``l2``: s in the term s |theta|^2 that is added to the loss, which makes a linear model's loss strongly convex;
    ``rate``: the step size; ``steps``: steps of training; figures are recorded ``points`` times, at equal distances;
    ``examples``: the size of S; ``neighbours``: the number of sets S'.
    """

    hidden: int
    by: Literal["one", "all"]
    rate: float
    steps: int
    points: int = 20
    examples: int = 500
    neighbours: int = 5
    l2: float = 0.0


def measure(settings: ChangedExampleSettings, path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the figures after each share of the steps, as ``epoch`` 1 to ``points`` of the split ``test``.

    ``passes``: passes over S, which has ``examples`` rows; ``neighbours``: the number of sets S'; ``logloss``: on S;
    ``apart``: the mean over S' of the absolute difference of the logloss on S; ``epsilon``: the largest difference of
    the logloss of one held-out sentence over all S'; ``parameters``: the mean over S' of the distance of the
    parameters, divided by their norm.

    Raises:
        ValueError: the file does not exist, or has too few sentences.
    """
    training, held_out, num_words = read_rows(path, seed)
    own, others = dense(training, num_words), dense(held_out, num_words)
    if settings.examples + settings.neighbours > len(training.label):
        raise ValueError(f"{path}: {len(training.label)} sentences train, {settings.examples} and one for each S' must")
    draw = np.random.default_rng(seed)
    order = _order(settings, draw)
    changed = draw.choice(settings.examples, settings.neighbours, replace=False)
    rows = [np.arange(settings.examples)]
    for number, place in enumerate(changed):
        rows.append(np.where(rows[0] == place, settings.examples + number, rows[0]))
    sets = [(own[of], training.label[of].float()) for of in rows]
    models = [_model(num_words, settings.hidden, seed) for _ in sets]
    labels, taken = held_out.label.float(), 0
    for point, steps in enumerate(np.array_split(order, settings.points), 1):
        for model, examples in zip(models, sets, strict=True):
            descend(model, *examples, steps, settings.rate, settings.l2)
        with torch.no_grad():
            at_s = [float(_losses(model, *sets[0]).mean()) for model in models]
            tested = [_losses(model, others, labels).numpy() for model in models]
            vectors = [{"all": nn.utils.parameters_to_vector(model.parameters()).numpy()} for model in models]
        taken += len(steps)
        apart = [distance(tested[0], tested[k], vectors[0], vectors[k]) for k in range(1, len(models))]
        yield {
            "epoch": point, "split": "test", "passes": taken if settings.by == "all" else taken / settings.examples,
            "examples": settings.examples, "neighbours": settings.neighbours, "logloss": at_s[0],
            "apart": float(np.mean([abs(one - at_s[0]) for one in at_s[1:]])),
            "epsilon": max(one.epsilon for one in apart),
            "parameters": float(np.mean([one.parameters["all"] for one in apart])),
        }  # fmt: skip


def dense(rows: Rows, num_words: int) -> Tensor:
    """Return the rows as float32 [n, num_words]."""
    result = torch.zeros(len(rows.label), num_words)
    result[rows.row, rows.word] = rows.value.float()
    return result


def descend(
    model: nn.Module, x: Tensor, labels: Tensor, steps: np.ndarray[Any, Any], rate: float, l2: float = 0.0
) -> None:
    """Take gradient steps of the mean logloss and ``l2`` |theta|^2, without momentum.

    Args:
        model: maps x [n, d] to logits [n, 1].
        x: [n, d].
        labels: [n], 0 or 1.
        steps: for each step the index of its example, or -1 for all examples.
        rate: the step size.
        l2: s, for all parameters.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=2.0 * l2)
    for step in steps.tolist():
        of = slice(None) if step < 0 else slice(step, step + 1)
        optimizer.zero_grad()
        _losses(model, x[of], labels[of]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _order(settings: ChangedExampleSettings, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return each step's example: every epoch has all examples, in a new random order."""
    if settings.by == "all":
        return np.full(settings.steps, -1)
    epochs = -(-settings.steps // settings.examples)
    return np.concatenate([draw.permutation(settings.examples) for _ in range(epochs)])[: settings.steps]


def _model(num_words: int, hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if not hidden:
        return nn.Linear(num_words, 1)
    first = nn.Linear(num_words, hidden)
    nn.init.normal_(first.weight)  # x has length 1, so the units start at a scale of 1
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, 1))


def _losses(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(x).squeeze(1), labels, reduction="none")
