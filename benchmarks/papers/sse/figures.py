"""Effect of SSE on the rows and on the Rademacher complexity: figures 3 and 5 of Wu et al. 2019.

Figure 3 projects rows by PCA and shows that SSE draws them into "black holes". Here: that picture, the spread of rows
along the first component, the share of variance of the first three, and how near rows lie to the nearer of two centres.
Figure 5 plots (1 / n) sum_i sigma_i sum_k p(j_i, k) l(E[k], y_i) of a trained model for random signs sigma. This is the
Rademacher complexity of equation 9 without its supremum, and with l instead of L.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.papers.sse import bias
from trainer.checkpoint.format import Checkpoint, latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.materialize import read_rows
from trainer.report_pages.section import NOT_RUN, Panel, Section
from trainer.runs.directory import Run
from trainer.search.records import facts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
QUANTILES = (0.05, 0.5, 0.95)
NUM_DRAWS = 500
NEAR = tuple(n / 20 for n in range(41))
"""Distances to the nearer centre, in units of the root mean square distance to the mean of all rows."""
EDGES = tuple(n / 4 for n in range(-8, 9))
"""Edges of the bins along the first component, in units of the root mean square distance to the mean of all rows."""
MOST_PLACES = 1000
"""Most rows that a picture shows."""
ROUNDS = 50


def measures(run: Run) -> dict[str, Any]:
    """Return the figures of a run of MF without biases, as JSON, computed from its item rows and training rows."""
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    data = PreparedData.open(run.data)
    users, items = (_rows(run, checkpoint, data, name) for name in ("user", "item"))
    pairs: list[tuple[Ints, Ints, Floats]] = []
    for batch in data.train_batches(0):
        user, item = (batch.features[name].values().numpy() for name in ("user", "item"))
        pairs.append((user, item, batch.labels.double().numpy()))
    user, item, label = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    seen = items[np.unique(item)]
    places = projected(seen)
    return {
        "places": places[:: -(-len(places) // MOST_PLACES)].round(3).tolist(),
        "along": spread(places[:, 0]),
        "explained": explained(seen, 3),
        "near": nearness(seen),
        "rademacher": simulated_complexity(users, items, user, item, label, seed=run.job.seed),
        "bias": bias.measures(users, items, data, run.dataset),
    }


def projected(rows: Floats) -> Floats:
    """Return the coordinates [n, 2] of rows [n, d] along their first two principal components.

    The unit is the root mean square of the distances to the mean of all rows. Each component is flipped so that its
    longer tail is on the right; runs can then be averaged.
    """
    centred = rows - rows.mean(axis=0)
    places: Floats = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    places *= np.where(np.sum(places**3, axis=0) < 0, -1.0, 1.0) / np.sqrt(np.mean(np.sum(centred**2, axis=1)))
    return places


def spread(places: Floats) -> list[float]:
    """Return the share of coordinates [n] in each bin between EDGES; values outside count in the outer bins."""
    counts = np.histogram(np.clip(places, EDGES[0], EDGES[-1]), EDGES)[0]
    return [float(one) for one in counts / len(places)]


def explained(rows: Floats, count: int) -> list[float]:
    """Return the share that each of the first ``count`` principal components has in the variance of rows [n, d]."""
    values = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2
    return [float(one) for one in values[:count] / values.sum()]


def nearness(rows: Floats) -> list[float]:
    """Return, for each distance in NEAR, the share of rows [n, d] at most so far from a centre (2-means)."""
    centred = rows - rows.mean(axis=0)
    radius = float(np.sqrt(np.mean(np.sum(centred**2, axis=1))))
    along = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    sides = along > 0
    for _ in range(ROUNDS):
        centres = np.stack([centred[~sides].mean(axis=0), centred[sides].mean(axis=0)])
        distances = np.linalg.norm(centred[:, None, :] - centres, axis=2)
        closer = distances[:, 1] < distances[:, 0]
        if np.array_equal(closer, sides) or closer.all() or not closer.any():
            break
        sides = closer
    nearest = distances.min(axis=1) / radius
    return [float((nearest <= distance).mean()) for distance in NEAR]


def simulated_complexity(
    users: Floats, items: Floats, user: Ints, item: Ints, label: Floats, *, seed: int = 0
) -> dict[str, list[list[float]]]:
    """Return quantiles of |(1 / n) sum_i sigma_i l_i(p)| over signs, for each probability of PROBABILITIES.

    SSE-SE swaps rows of both tables. ``own``: the loss of a swapped row uses the label of the example that it is
    swapped into, as in training. ``theirs``: it uses the labels of the training examples that have the swapped row, as
    in the paper's remark that transitions are contractive, (P sigma)^T L.

    Args:
        users: user table [u, d]; only rows that occur in training count.
        items: item table [v, d]; only rows that occur in training count.
        user: the user's row in each of n training examples.
        item: the item's row in each of these examples.
        label: labels [n].
        seed: seed of the signs.
    """
    left, right = users[user], items[item]
    losses = (label - np.einsum("nd,nd->n", left, right)) ** 2
    own = (losses, _squares(label, left, items[np.unique(item)]), _squares(label, right, users[np.unique(user)]),
           _squares_of_pairs(label, users[np.unique(user)], items[np.unique(item)]))  # fmt: skip
    theirs = (losses, _means(losses, user), _means(losses, item), np.full(len(losses), losses.mean()))
    signs = np.random.default_rng(seed).integers(0, 2, (NUM_DRAWS, len(losses)), dtype=np.int8) * 2 - 1
    found: dict[str, list[list[float]]] = {}
    for name, (plain, other_item, other_user, both) in (("own", own), ("theirs", theirs)):
        found[name] = []
        for p in PROBABILITIES:
            smoothed = (1 - p) ** 2 * plain + p * (1 - p) * (other_item + other_user) + p**2 * both
            drawn = np.abs(signs @ smoothed) / len(losses)
            found[name].append([float(one) for one in np.quantile(drawn, QUANTILES)])
    return found


def _squares(label: Floats, rows: Floats, others: Floats) -> Floats:
    """Return for each row [n, d] the mean over ``others`` [m, d] of (label - <row, other>)^2."""
    mean, second = others.mean(axis=0), others.T @ others / len(others)
    return label**2 - 2 * label * (rows @ mean) + np.einsum("nd,de,ne->n", rows, second, rows)


def _squares_of_pairs(label: Floats, users: Floats, items: Floats) -> Floats:
    second = np.sum((users.T @ users / len(users)) * (items.T @ items / len(items)))
    result: Floats = label**2 - 2 * label * float(users.mean(axis=0) @ items.mean(axis=0)) + second
    return result


def _means(losses: Floats, group: Ints) -> Floats:
    """Return for each row the mean loss of the rows of its group."""
    means: Floats = (np.bincount(group, losses) / np.maximum(np.bincount(group), 1))[group]
    return means


def _rows(run: Run, checkpoint: Checkpoint, data: PreparedData, feature: str) -> Floats:
    table = next(key.table for key in data.keys if key.name == feature)
    rows = np.concatenate([part.double().numpy() for _, part in read_rows(run.job, checkpoint, table)])
    assert len(rows) >= NUM_SPECIAL_ROWS
    return rows[:, : run.job.model.embedding_dim]


# --- in the report ---------------------------------------------------------------------------------------------------


def sections(records: Mapping[str, Sequence[dict[str, Any]]]) -> list[Section]:
    """Return both figures; ``records`` has for each row of the table one record per seed."""
    measured = {row: [record["measured"] for record in of_seeds] for row, of_seeds in records.items()}
    if not measured:
        return []
    said = facts([record for of_seeds in records.values() for record in of_seeds])
    half = NEAR.index(0.5)
    pictures = tuple(
        Panel(row, "1st component / radius", "2nd component / radius", {row: of_seeds[0]["places"]}, joined=False)
        for row, of_seeds in measured.items()
    )
    middles = [(low + high) / 2 for low, high in pairwise(EDGES)]
    along = {row: np.mean([one["along"] for one in of_seeds], axis=0) for row, of_seeds in measured.items()}
    spreads = Section(
        "spread", "Figure 3: rows of items along their first two principal components",
        ("", *(f"{middle:g}" for middle in middles)),
        tuple((row, *(f"{share:.3f}" for share in shares)) for row, shares in along.items()),
        (
            "The pictures: rows of items that were trained on, of one run each. The table: the share of them by place "
            "along the first component, in root mean squares of the distances to the mean of all, outer bins with what "
            "lies beyond; the longer tail is on the right.",
            said,
        ),
        (
            *pictures,
            Panel("all rows, mean of runs", "1st component / radius", "share of rows",
                  {row: list(zip(middles, shares.tolist(), strict=True)) for row, shares in along.items()}),
        ),
        across=2,
    )  # fmt: skip
    lines, curves = [], {}
    for row, of_seeds in measured.items():
        shares = zip(*(one["explained"] for one in of_seeds), strict=True)
        near = [statistics.fmean(one) for one in zip(*(one["near"] for one in of_seeds), strict=True)]
        lines.append((row, *(f"{statistics.fmean(share):.3f}" for share in shares), f"{near[half]:.3f}"))
        curves[row] = list(zip(NEAR, near, strict=True))
    rows = Section(
        "rows", "Figure 3: where the rows of items lie",
        ("", "1st component", "2nd", "3rd", "within half the radius"), tuple(lines),
        (
            "Over the rows of trained items: each component's share of the variance; share of rows that are nearer to "
            "one of two centres than half the root mean square distance.",
            said,
        ),
        (Panel("rows of items", "distance to the nearer centre / radius", "share of rows", curves),),
    )  # fmt: skip
    lines, curves = [], {}
    first = next(iter(measured))
    for name, title in (("own", "own labels"), ("theirs", "labels of the rows swapped to")):
        quantiles = np.mean([one["rademacher"][name] for one in measured[first]], axis=0)
        curves[title] = list(zip(PROBABILITIES, quantiles[:, 1].tolist(), strict=True))
        cells = [f"{middle:.5f} ({low:.5f} to {high:.5f})" for low, middle, high in quantiles] or [NOT_RUN]
        lines.append((title, *cells))
    complexity = Section(
        "complexity", "Figure 5: the Rademacher complexity of equation 9, simulated",
        ("", *(f"p {p:g}" for p in PROBABILITIES)), tuple(lines),
        (
            f"Of {first}, SSE-SE on users and items: the median of {NUM_DRAWS} draws of signs, and what nine in ten "
            "lie between. Own labels: a swapped row is judged by the label of the example that it is swapped into, as "
            "in training. Labels of the rows swapped to: it is judged by the labels of the training examples that have "
            "this row.",
        ),
        (Panel(first, "probability of a swap", "|mean of sign times loss|", curves),),
    )  # fmt: skip
    return [spreads, rows, complexity]
