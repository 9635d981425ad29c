"""DeepCTR-Torch (extra ``bench``) as its users run it: its feature columns, its ``fit``, ``compile`` and ``predict``.

Input is what its ``fit`` takes, an array for each feature, lists padded with 0. Settings are its defaults (initial
values, L2 of 1e-5 on embeddings), but for tower, dimension and learning rate, which all libraries share, and for the
first-order weights of its WDL and DCN, which are left out: WDL is then its DNN, and DCN with a matrix DCNv2 in
parallel. It trains dense gradients; there is no other form. ``verbose=0`` and no metrics while it trains make it
fastest: with the defaults of its examples it computes an AUC and updates a progress bar at each step.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.ctr_peers.tasks import CROSS_LAYERS, HELD_OUT, Request, answer, auc_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged

PREDICT_BATCH = 8192
VARIANTS = ("adam", "adam_no_l2", "adagrad_no_l2")
"""Optimizer and L2. The first is trained for AUC; the others leave work out, for speed."""


def run(request: Request, data: PreparedData) -> dict[str, Any]:
    """Return ``validation`` and ``test``, AUC after each epoch; or ``examples_per_second``."""
    library = imported()
    with contextlib.redirect_stdout(sys.stderr):
        model = _model(library, request, data)
        kind = torch.optim.Adagrad if request.variant.startswith("adagrad") else torch.optim.Adam
        model.compile(kind(model.parameters(), lr=request.learning_rate), "binary_crossentropy")
        if request.timed_steps:
            return {"examples_per_second": _rate(library, model, request, data)}
        return _aucs(library, model, request, data)


def imported() -> Any:
    """Return the package.

    Raises:
        ImportError: The extra is not installed.
    """
    # Its import asks the package index for a newer version, in a thread that the process waits for.
    silent = types.ModuleType("deepctr_torch.utils")
    silent.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules.setdefault("deepctr_torch.utils", silent)
    import deepctr_torch
    import deepctr_torch.callbacks
    import deepctr_torch.inputs
    import deepctr_torch.models

    return deepctr_torch


def _model(library: Any, request: Request, data: PreparedData) -> Any:
    columns = _feature_columns(library.inputs, request, data)
    l2 = 0.0 if request.variant.endswith("no_l2") else 1e-5
    common = {
        "dnn_hidden_units": request.hidden,
        "l2_reg_embedding": l2,
        "l2_reg_linear": l2,
        "seed": request.seed,
    }
    if request.model == "dnn":
        return library.models.WDL([], columns, **common)
    if request.model == "dcnv2":
        return library.models.DCN([], columns, cross_num=CROSS_LAYERS, cross_parameterization="matrix", **common)
    return library.models.DeepFM(columns, columns, **common)


def _feature_columns(inputs: Any, request: Request, data: PreparedData) -> list[Any]:
    found = []
    for key in data.keys:
        rows = data.tables[key.table].num_rows
        column = inputs.SparseFeat(key.name, rows, embedding_dim=request.dim, embedding_name=key.table)
        if key.is_list:
            length = padded(data.column("train", key)).shape[1]
            column = inputs.VarLenSparseFeat(column, maxlen=length, combiner=key.pooling)
        found.append(column)
    return found


def padded(column: Jagged | npt.NDArray[np.int32], length: int | None = None) -> npt.NDArray[np.int32]:
    """Return lists as rows [n, longest], or [n, ``length``], padded with 0 behind; single ids as they are."""
    if not isinstance(column, Jagged):
        return np.asarray(column)
    lengths = column.lengths
    width = int(lengths.max(initial=1)) if length is None else length
    found = np.zeros((len(lengths), width), dtype=np.int32)
    found[np.arange(width) < lengths[:, None]] = column.values[column.offsets[0] : column.offsets[-1]]
    return found


def _inputs(data: PreparedData, split: str, rows: Any = slice(None)) -> dict[str, npt.NDArray[np.int32]]:
    widths = {key.name: padded(data.column("train", key)).shape[1] for key in data.keys if key.is_list}
    return {key.name: padded(data.column(split, key), widths.get(key.name))[rows] for key in data.keys}


def _labels(data: PreparedData, split: str, rows: Any = slice(None)) -> npt.NDArray[np.float32]:
    return np.asarray(data.labels(split)[rows], dtype=np.float32)


def _aucs(library: Any, model: Any, request: Request, data: PreparedData) -> dict[str, Any]:
    held_out = {split: _inputs(data, split) for split in HELD_OUT}
    found: dict[str, Any] = {split: [] for split in HELD_OUT}

    class Evaluate(library.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for split in HELD_OUT:
                found[split].append(auc_of(model.predict(held_out[split], PREDICT_BATCH), data, split))
            model.train()

    fit = {"batch_size": request.batch_size, "epochs": request.epochs, "verbose": 0, "callbacks": [Evaluate()]}
    model.fit(_inputs(data, "train"), _labels(data, "train"), **fit)
    return found


def _rate(library: Any, model: Any, request: Request, data: PreparedData) -> float:
    """Run ``fit`` for two epochs over as many rows as ``timed_steps`` take, and time the second."""
    num_rows = request.timed_steps * request.batch_size
    rows = np.sort(np.random.default_rng(request.seed).permutation(data.num_examples["train"])[:num_rows])
    started: list[float] = []
    ended: list[float] = []

    class Clock(library.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            started.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ended.append(time.perf_counter())

    fit = {"batch_size": request.batch_size, "epochs": 2, "verbose": 0, "callbacks": [Clock()]}
    model.fit(_inputs(data, "train", rows), _labels(data, "train", rows), **fit)
    return len(rows) / (ended[1] - started[1])


if __name__ == "__main__":
    answer(sys.argv[1], run)
