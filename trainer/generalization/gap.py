"""The generalization gap after each epoch: Delta = L_D - L_S, the test split standing for D.

Mądry's lecture, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOSSES = ("logloss", "rmse", "mae")


def gaps(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the gap of each epoch that has figures of both splits, as a row of split ``gap``.

    It is test - train of losses, train - test of AUC, so that larger is worse throughout.
    """
    by_epoch_and_split = {(one["epoch"], one["split"]): one for one in metrics}
    rows = []
    for epoch in sorted({epoch for epoch, _ in by_epoch_and_split}):
        train, test = by_epoch_and_split.get((epoch, "train"), {}), by_epoch_and_split.get((epoch, "test"), {})
        row: dict[str, Any] = {}
        for name in (*LOSSES, "auc"):
            if train.get(name) is not None and test.get(name) is not None:
                difference = float(test[name]) - float(train[name])
                row[name] = -difference if name == "auc" else difference
        if row:
            rows.append({"epoch": epoch, "split": "gap", **row})
    return rows
