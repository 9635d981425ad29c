"""Bias and excess risk of SSE for a trained model: equations 7 and 8 and remark 2 of Wu et al. 2019.

R is the mean loss without swaps. S is that of equation 6: the expected loss when rows are swapped by P. R(Theta) <=
S_n(Theta*) + |R - S| + |S - S_n|, where |R - S| is the bias and |S - S_n| the excess risk. If rows of one table are
swapped with probability p, then S = (1 - p) R + p S', where S' is the mean loss with every row swapped, and the bias is
p |S' - R|. This module measures R and S' on training (index n) and on test.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.vocabulary import Codes
from trainer.report_pages.section import Section
from trainer.search.records import facts
from trainer.spec import DatasetSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ANY = "any other"
TABLES = ("user", "item")
SPLITS = ("train", "test")


class Examples(NamedTuple):
    """User rows, item rows and labels of n examples, each [n]; row 0 is the first id."""

    user: Ints
    item: Ints
    label: Floats

    def whose(self, table: str, chosen: npt.NDArray[np.bool_]) -> Examples:
        """Return the examples whose row of ``table`` is chosen; ``chosen``: bool [m]."""
        kept = chosen[getattr(self, table)]
        return Examples(self.user[kept], self.item[kept], self.label[kept])


def measures(users: Floats, items: Floats, data: PreparedData, dataset: DatasetSpec) -> dict[str, Any]:
    """Return mean squared errors without swaps and with one table's rows swapped, by table and transition, as JSON.

    The transitions are to any other row, as in SSE-SE, and for each graph of the dataset to a neighbour. Transitions to
    neighbours are measured over the examples whose row has a neighbour. Transitions to any other row are also measured
    over these examples, for comparison. Examples with an id that is not in training are left out.

    Args:
        users: [rows of the user table, d], special rows first.
        items: the same for items.
        data: the prepared examples, of features ``user`` and ``item``.
        dataset: the dataset; its graphs have integer ids.
    """
    rows = {name: of[NUM_SPECIAL_ROWS:] for name, of in zip(TABLES, (users, items), strict=True)}
    transitions = {name: {ANY: to_any(len(of))} for name, of in rows.items()}
    for name, graph in dataset.graphs.items():
        ids = Codes(data.vocabulary(graph.of))
        edges = pq.read_table(graph.uri, columns=[graph.source, graph.target])
        source, target = (ids.encode(column.cast(pa.int64()).combine_chunks()) for column in edges.columns)
        known = (source >= 0) & (target >= 0)
        transitions[graph.of][name] = to_neighbours(source[known], target[known], len(rows[graph.of]))
    examples = {split: _examples(data, split) for split in SPLITS}

    found: dict[str, Any] = {}
    for table, by_name in transitions.items():
        any_other = by_name[ANY]
        found[table] = {}
        for name, chances in by_name.items():
            moving = {split: of.whose(table, chances.diagonal() == 0) for split, of in examples.items()}
            found[table][name] = {
                "share": len(moving["test"].label) / len(examples["test"].label),
                "own": {split: float(np.mean(losses(rows, of))) for split, of in moving.items()},
                **{
                    key: {split: float(np.mean(swapped_losses(rows, table, by, of))) for split, of in moving.items()}
                    for key, by in (("swapped", chances), ("any", any_other))
                },
            }
    return {"test_share": len(examples["test"].label) / data.num_examples["test"], "tables": found}


def to_any(num_rows: int) -> Floats:
    """Return equation 5's transitions of a swapped row, [num_rows, num_rows]: uniform over all other rows."""
    return (1.0 - np.eye(num_rows)) / max(num_rows - 1, 1)


def to_neighbours(source: Ints, target: Ints, num_rows: int) -> Floats:
    """Return transitions uniform over the neighbours, [num_rows, num_rows]; a row without neighbours stays."""
    chances = np.zeros((num_rows, num_rows))
    chances[source, target] = chances[target, source] = 1.0
    np.fill_diagonal(chances, 0.0)
    degrees = chances.sum(axis=1)
    np.fill_diagonal(chances, degrees == 0)
    chances /= np.maximum(degrees, 1.0)[:, None]
    return chances


def losses(rows: Mapping[str, Floats], of: Examples) -> Floats:
    """Return the squared error of each example, [n]."""
    found: Floats = (of.label - np.einsum("nd,nd->n", rows["user"][of.user], rows["item"][of.item])) ** 2
    return found


def swapped_losses(rows: Mapping[str, Floats], table: str, chances: Floats, of: Examples) -> Floats:
    """Return sum_k P[j, k] (label - <row k, other row>)^2 for each example, [n]; j is its row of ``table``.

    Args:
        rows: the rows [m, d] of each table.
        table: the table whose rows are swapped.
        chances: P [m, m] of that table.
        of: the examples.
    """
    swapped, others = rows[table], rows[next(name for name in TABLES if name != table)]
    row, other = (of.user, of.item) if table == TABLES[0] else (of.item, of.user)
    dim = swapped.shape[1]
    squares = (swapped[:, :, None] * swapped[:, None, :]).reshape(-1, dim * dim)
    means, seconds = chances @ swapped, (chances @ squares).reshape(-1, dim, dim)
    beside = others[other]
    found: Floats = (
        of.label**2
        - 2 * of.label * np.einsum("nd,nd->n", means[row], beside)
        + np.einsum("nd,nde,ne->n", beside, seconds[row], beside)
    )
    return found


def _examples(data: PreparedData, split: str) -> Examples:
    parts = [
        (*(batch.features[name].values().numpy() for name in TABLES), batch.labels.double().numpy())
        for batch in data.eval_batches(split)
    ]
    user, item, label = (np.concatenate(part) for part in zip(*parts, strict=True))
    user, item = (of.astype(np.int64) - NUM_SPECIAL_ROWS for of in (user, item))
    known = (user >= 0) & (item >= 0)
    return Examples(user[known], item[known], label[known])


# --- in the report ---------------------------------------------------------------------------------------------------


def section(records: Mapping[str, Sequence[dict[str, Any]]]) -> Section | None:
    """Return the section; ``records`` has for each row of the table one record per seed. None without records."""
    measured = {row: [record["measured"]["bias"] for record in of_seeds] for row, of_seeds in records.items()}
    if not measured:
        return None
    lines = []
    for row, of_seeds in measured.items():
        for table, by_name in of_seeds[0]["tables"].items():
            for name in by_name:
                swaps = [one["tables"][table][name] for one in of_seeds]
                lines.append((
                    row, f"{table}: {name}", f"{statistics.fmean(one['share'] for one in swaps):.3f}",
                    *(_mean(one[key]["test"] for one in swaps) for key in ("own", "swapped")),
                    *(_mean(abs(one[key]["test"] - one["own"]["test"]) for one in swaps) for key in ("swapped", "any")),
                    *(_mean(one[key]["test"] - one[key]["train"] for one in swaps) for key in ("own", "swapped")),
                ))  # fmt: skip
    shares = [one["test_share"] for of_seeds in measured.values() for one in of_seeds]
    return Section(
        "bias", "Equations 7 and 8, remark 2: bias and excess risk of SSE, every row of one table swapped",
        ("", "swapped for", "share of test", "test loss", "swapped", "bias", "bias, any other",
         "test less training loss", "swapped, test less training"),
        tuple(lines),
        (
            "Squared error over the examples whose row has a neighbour, in the mean of the seeds; bias, any other: of "
            "the same examples, swapped for any other row. With rows swapped with probability p the bias is p times as "
            "large, and the excess risk |(1 - p) a + p b|, a and b the last two columns. Test rows of ids that "
            f"training has not are left out ({1 - statistics.fmean(shares):.1%}).",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
    )  # fmt: skip


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.4f}"
