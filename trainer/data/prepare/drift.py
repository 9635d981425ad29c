"""Comparison of a warm-started run's rows with its parent's rows: reported, never an error. Torch-free.

Rows that cannot be trained on are errors when they are read: a missing column, ids that were integers and are now text,
invalid numbers. The differences found in this module are for a person to look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW, GrownTable
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.label_figures import LabelFigures
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.workers import Workers

PROFILE_FILE = "profile.json"
"""Name of the profile's file in prepared data and in a run's checkpoints."""
HELD_OUT_FROM = "held_out_from"
"""Key of a profile for the earliest held-out time of a split by time, as a number of the ordering column."""
NEW_IDS = 0.2
"""Limit of the share of examples with an id that is not in the parent's rows; a larger share counts as drift."""
MISSING = 0.05
"""Limit of the difference in the share of missing values, or in the mean label; a larger one counts as drift."""
PSI = 0.2
"""Limit of the population stability index of a numeric feature; a higher index is commonly read as a shift."""
VECTOR = 0.2
"""Limit of a mean vector's distance from the parent's, as a share of the mean length of the parent's vectors."""
ROWS = 2.0
"""Limit of the ratio between the two runs' numbers of rows, in either direction."""
_BINS = 10
_SAMPLE_ROWS = 1 << 20
_LEAST_SHARE = 1e-4

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """One comparison with the parent's rows.

    Attributes:
        what: kind of figure: columns, type, window, rows, label, missing, new_ids, numeric or vector.
        name: column, label, feature or table that is compared; empty for the rows as a whole.
        before: the parent's figure.
        now: this run's figure, or its distance from the parent's.
        moved: True if the difference is beyond its limit.
    """

    what: str
    name: str
    before: Any
    now: Any
    moved: bool

    def __str__(self) -> str:
        before, now = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in (self.before, self.now))
        name = f"of '{self.name}' " if self.name else ""
        return {
            "columns": f"column '{self.name}' {'is new' if self.before is None else 'is gone'}",
            "type": f"column '{self.name}' was {before} and is {now}",
            "window": f"the window has {now} days, it had {before}",
            "rows": f"{now} rows, there were {before}",
            "label": f"mean label {name}{now}, it was {before}",
            "missing": f"{now} of '{self.name}' is missing, it was {before}",
            "new_ids": f"{now} of the examples have a new '{self.name}'",
            "numeric": f"'{self.name}' has another distribution (PSI {now})",
            "vector": f"the mean of '{self.name}' has moved by {now} of its length",
        }[self.what]


def profile_of(
    plan: DataPlan,
    encoded: Encoded,
    row_counts: Mapping[str, npt.NDArray[np.int64]],
    labels: Sequence[LabelFigures],
    workers: Workers,
) -> dict[str, Any]:
    """Return the profile of a run's rows, by which runs are compared.

    The profile has the names of all columns, the types of the columns that are read, the days of the window and the
    number of rows. Of the training rows it has the mean of each label and the shares of missing ids. Of all rows it has
    the deciles of each numeric feature with the shares between them, and the mean and mean length of each vector.
    """
    window = plan.job.dataset.window
    read = {name: str(plan.source.column_type(name)) for name in plan.columns()}
    names = [one.name for one in plan.numeric]
    shapes = workers.map(lambda name: _shape_of(_sample(encoded.values[name])), names)
    return {
        "columns": plan.source.column_names(),
        "types": read,
        "window_days": None if window is None else window.days,
        "rows": encoded.num_rows,
        "label_mean": labels[0].mean,
        "label_means": {one.name: one.mean for one in labels if one.name},
        "missing": {name: float(counts[UNKNOWN_ROW] / max(counts.sum(), 1)) for name, counts in row_counts.items()},
        "numeric": dict(zip(names, shapes, strict=True)),
        "vectors": {one.name: _vector_shape(_sample(encoded.values[one.name])) for one in plan.row_vectors},
    }


def drift(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    plan: DataPlan,
    encoded: Encoded,
    grown: Mapping[str, GrownTable],
    row_counts: Mapping[str, npt.NDArray[np.int64]],
) -> list[Comparison]:
    """Return the comparisons of the parent's profile with this run's; those beyond their limits come first."""
    comparisons = [
        Comparison("columns", name, name, None, True) for name in before["columns"] if name not in now["columns"]
    ]
    comparisons += [
        Comparison("columns", name, None, name, True) for name in now["columns"] if name not in before["columns"]
    ]
    both = [name for name in now["types"] if name in before["types"]]
    comparisons += [
        Comparison("type", name, before["types"][name], now["types"][name], True)
        for name in both
        if before["types"][name] != now["types"][name]
    ]
    days = (before.get("window_days"), now["window_days"])
    if None not in days:
        comparisons.append(Comparison("window", "", *days, days[0] != days[1]))
    times = now["rows"] / max(before["rows"], 1)
    comparisons.append(Comparison("rows", "", before["rows"], now["rows"], not 1 / ROWS <= times <= ROWS))
    means = {"": (before["label_mean"], now["label_mean"])}
    if now["label_means"]:
        before_means = before.get("label_means", {})
        means = {name: (before_means[name], mean) for name, mean in now["label_means"].items() if name in before_means}
    for name, (old, new) in means.items():
        comparisons.append(Comparison("label", name, old, new, abs(new - old) > MISSING))
    shares = [(name, before["missing"].get(name), share) for name, share in now["missing"].items()]
    shares += [
        (name, before["numeric"].get(name, {}).get("missing"), one["missing"]) for name, one in now["numeric"].items()
    ]
    comparisons += [
        Comparison("missing", name, old, share, abs(share - old) > MISSING)
        for name, old, share in shares
        if old is not None
    ]
    for table, rows in grown.items():
        if table not in before["missing"]:
            continue  # of a feature that the parent did not read
        new = rows.parent_rows < 0
        new[:NUM_SPECIAL_ROWS] = False
        share = float(row_counts[table][new].sum() / max(row_counts[table].sum(), 1))
        comparisons.append(Comparison("new_ids", table, 0.0, share, share > NEW_IDS))
    for feature in plan.numeric:
        if feature.name in before["numeric"]:
            values = _sample(encoded.values[feature.name])
            index = stability_index(before["numeric"][feature.name], values[~np.isnan(values)])
            comparisons.append(Comparison("numeric", feature.name, 0.0, index, index > PSI))
    comparisons += _of_vectors(before.get("vectors", {}), now["vectors"])
    return sorted(comparisons, key=lambda one: not one.moved)


def _of_vectors(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Comparison]:
    found = []
    for name, one in now.items():
        old = before.get(name)
        if old is None or len(old["mean"]) != len(one["mean"]):
            continue
        moved = float(np.linalg.norm(np.subtract(one["mean"], old["mean"])) / max(old["length"], 1e-12))
        found.append(Comparison("vector", name, 0.0, moved, moved > VECTOR))
        share = abs(one["missing"] - old["missing"])
        found.append(Comparison("missing", name, old["missing"], one["missing"], share > MISSING))
    return found


def in_words(comparisons: list[Comparison]) -> str:
    moved = "; ".join(str(one) for one in comparisons if one.moved)
    return f"rows moved since the parent run: {moved}" if moved else "rows are like those of the parent run"


def as_json(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """Return the comparisons, each with a ``message``; an infinite index, which JSON cannot express, is None."""
    return [
        {**asdict(one), "now": None if one.now == float("inf") else one.now, "message": str(one)} for one in comparisons
    ]


def write_profile(profile: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(profile, indent=1), "utf-8")


def open_profile(path: Path) -> dict[str, Any]:
    """Return the profile in a file that :func:`write_profile` wrote."""
    return json.loads(path.read_text("utf-8"))


def stability_index(before: Mapping[str, Any], values: Float64s) -> float:
    """Return the population stability index of values against a numeric feature's entry in a profile.

    The index is the sum over bins of (p - q) log(p / q), with p and q the shares of values in this run and before.
    Shares below .0001 count as .0001.
    """
    if not len(values) or not before["shares"]:
        return float("inf") if len(values) != len(before["shares"]) else 0.0
    q = np.maximum(before["shares"], _LEAST_SHARE)
    p = np.maximum(_shares(values, np.array(before["edges"])), _LEAST_SHARE)
    return float(((p - q) * np.log(p / q)).sum())


def _vector_shape(vectors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Return the share of missing vectors, and the mean and mean length of the others."""
    there = vectors[vectors.any(axis=1)].astype(np.float64)
    mean = there.mean(axis=0) if len(there) else np.zeros(vectors.shape[1])
    length = float(np.linalg.norm(there, axis=1).mean()) if len(there) else 0.0
    return {"missing": 1.0 - len(there) / max(len(vectors), 1), "mean": mean.tolist(), "length": length}


def _shape_of(values: Float64s) -> dict[str, Any]:
    there = values[~np.isnan(values)]
    edges = np.unique(np.quantile(there, np.linspace(0, 1, _BINS + 1)[1:-1])) if len(there) else np.empty(0)
    missing = 1.0 - len(there) / max(len(values), 1)
    return {"edges": edges.tolist(), "shares": _shares(there, edges), "missing": missing}


def _shares(values: Float64s, edges: Float64s) -> list[float]:
    """Return the share of values in each bin between edges, [len(edges) + 1]; an empty list without values."""
    if not len(values):
        return []
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    return (counts / len(values)).tolist()


def _sample(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values of rows at even distances, with at most ``_SAMPLE_ROWS`` numbers in all."""
    return np.asarray(values[:: sample_stride(len(values), math.prod(values.shape[1:]))])


def sample_stride(num_rows: int, width: int = 1) -> int:
    """Return the distance s of sampled rows: every s-th row is in the sample by which runs are compared.

    ``width`` is the number of numbers in a row.
    """
    return max(1, -(-num_rows // max(1, _SAMPLE_ROWS // width)))
