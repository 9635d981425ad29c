"""DeepCTR-Torch (extra ``bench``) as its users run it: its feature columns, its ``fit``, ``compile`` and ``predict``.

Input is what its ``fit`` takes, an array for each feature, lists padded with 0. Settings are its defaults (initial
values, L2 of 1e-5 on embeddings), but for tower, dimension and learning rate, which all libraries share, and for the
first-order weights of its WDL and DCN, which are left out: WDL is then its DNN, and DCN with a matrix DCNv2 in
parallel. DeepCTR-Torch trains only with dense gradients. ``verbose=0`` and no metrics while it trains make it fastest:
with the defaults of its examples it computes an AUC and updates a progress bar at each step.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.ctr_peers.tasks import CROSS_LAYERS, HELD_OUT, Task, auc_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged

PREDICT_BATCH = 8192


def run(task: Task, model: str, seed: int, learning_rate: float, data: PreparedData) -> dict[str, Any]:
    """Return ``validation`` and ``test``, AUC after each epoch."""
    library = imported()
    with contextlib.redirect_stdout(sys.stderr):
        trained = built(library, task, model, seed, data)
        trained.compile(torch.optim.Adam(trained.parameters(), lr=learning_rate), "binary_crossentropy")
        return _aucs(library, trained, task, data)


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


def built(library: Any, task: Task, model: str, seed: int, data: PreparedData) -> Any:
    """Return the library's model of the kind."""
    columns = _feature_columns(library.inputs, task.dim, data)
    common = {"dnn_hidden_units": task.hidden, "seed": seed}
    if model == "dnn":
        return library.models.WDL([], columns, **common)
    if model == "dcnv2":
        return library.models.DCN([], columns, cross_num=CROSS_LAYERS, cross_parameterization="matrix", **common)
    return library.models.DeepFM(columns, columns, **common)


def _feature_columns(inputs: Any, dim: int, data: PreparedData) -> list[Any]:
    found = []
    for key in data.keys:
        rows = data.tables[key.table].num_rows
        column = inputs.SparseFeat(key.name, rows, embedding_dim=dim, embedding_name=key.table)
        if key.is_list:
            length = padded(data.column("train", key)).shape[1]
            column = inputs.VarLenSparseFeat(column, maxlen=length, combiner=key.pooling)
        found.append(column)
    return found


def padded(column: Jagged | npt.NDArray[np.int32], length: int | None = None) -> npt.NDArray[np.int32]:
    """Return lists as rows [n, longest], or [n, ``length``], padded with 0 at the end; single ids as they are."""
    if not isinstance(column, Jagged):
        return np.asarray(column)
    lengths = column.lengths
    width = int(lengths.max(initial=1)) if length is None else length
    found = np.zeros((len(lengths), width), dtype=np.int32)
    found[np.arange(width) < lengths[:, None]] = column.values[column.offsets[0] : column.offsets[-1]]
    return found


def _inputs(data: PreparedData, split: str) -> dict[str, npt.NDArray[np.int32]]:
    widths = {key.name: padded(data.column("train", key)).shape[1] for key in data.keys if key.is_list}
    return {key.name: padded(data.column(split, key), widths.get(key.name)) for key in data.keys}


def _labels(data: PreparedData, split: str) -> npt.NDArray[np.float32]:
    return np.asarray(data.labels(split), dtype=np.float32)


def _aucs(library: Any, model: Any, task: Task, data: PreparedData) -> dict[str, Any]:
    held_out = {split: _inputs(data, split) for split in HELD_OUT}
    found: dict[str, Any] = {split: [] for split in HELD_OUT}

    class Evaluate(library.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for split in HELD_OUT:
                found[split].append(auc_of(model.predict(held_out[split], PREDICT_BATCH), data, split))
            model.train()

    fit = {"batch_size": task.batch_size, "epochs": task.epochs, "verbose": 0, "callbacks": [Evaluate()]}
    model.fit(_inputs(data, "train"), _labels(data, "train"), **fit)
    return found
