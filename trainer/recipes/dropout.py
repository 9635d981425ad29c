"""``dropout``: the effect of dropout in expectation, and by its noise (Wei, Kakade and Ma 2020, tables 1 and 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.recipes.pages import documents, published
from trainer.recipes.trials.trial import Claim, Column, Recipe, Table

RATE = 0.4
HASH = {"kind": "hash", "std": 0.01}
HESSIAN = {"masks": 0, "explicit": "output_hessian"}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "DROPOUT_1": {},
    "DROPOUT_2": {"masks": 2},
    "DROPOUT_4": {"masks": 4},
    "DROPOUT_8": {"masks": 8},
    "DROPOUT_32": {"masks": 32},
    "DROPOUT_8 + noise": {"masks": 8, "noise": "exact"},
    "DROPOUT_8 + xi_approx": {"masks": 8, "noise": "approximate"},
    "R_approx": HESSIAN,
    "R_approx + xi_approx": HESSIAN | {"noise": "approximate"},
    "R~": {"masks": 0, "explicit": "loss_jacobian"},
    "identity Hessian": {"masks": 0, "explicit": "identity"},
}
"""By row ``dropout_method``; none of it: no dropout at all."""
QUICK: tuple[str, ...] = ("none", "DROPOUT_1", "DROPOUT_8", "R_approx", "R_approx + xi_approx")


def recipe(data: Path, seeds: int = 3, quick: bool = False) -> Recipe:
    """Return a tower on epinions; ``quick``: on a small click log."""
    if quick:
        of, table, rows, batch_size = documents.click_log(data), "quick", QUICK, 128
        fields = documents.tower(8, [32], HASH)
        evaluation = {"split": {"kind": "time", "validation": 0.15, "test": 0.15}}
    else:
        of = documents.epinions(data, {"rule": "rating >= 4"})
        table, rows, batch_size = "epinions", tuple(METHODS), 1024
        fields, evaluation = documents.tower(16, [128, 64], HASH), documents.RANDOM
    trials = tuple(
        documents.trial(
            table, "dnn", row, of, regularizers=_regularizers(METHODS[row]), batch_size=batch_size, seed=seed,
            optimizer={"kind": "adam", "learning_rate": 0.001}, evaluation=evaluation, **fields,
        )
        for seed in range(seeds) for row in rows
    )  # fmt: skip
    shown = Table(
        table,
        f"{'own log, small' if quick else 'epinions'}, DNN, dropout {RATE} on rows and hidden layers: test logloss "
        "after epochs 1/2/3/4",
        (Column("logloss", "dnn", "logloss"),),
        "epochs",
        "logloss",
        lower=True,
        published={} if quick else published.DROPOUT_PTB,
        published_is=""
        if quick
        else "validation perplexity of an LSTM on Penn Treebank: only the order of methods compares",
        comparable=False,
    )
    claims = tuple(
        Claim(text, table, "dnn", (row, "last"), ("none", "last"), 0.0)
        for row, text in (
            ("DROPOUT_1", "dropout ends below no dropout"),
            ("R_approx", "the explicit regularizer alone ends below no dropout"),
        )
    )
    return Recipe("dropout", _TITLE, _SOURCE, _PROTOCOL, trials, (shown,), claims)


def _regularizers(method: dict[str, Any] | None) -> dict[str, Any]:
    if method is None:
        return {}
    return {"dropout": RATE, "dropout_layers": "both"} | ({"dropout_method": method} if method else {})


_TITLE = "Dropout taken apart: DROPOUT_k, noise added back, explicit regularizers"
_SOURCE = "Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout (2020), tables 1 and 3"
_PROTOCOL = """\
A CTR tower (dimension 16, 128-64) trained by Adam with rate .001; dropout .4 on looked-up rows and after each hidden
layer, or what stands for it with the coefficients of the equations, none tuned. epinions, ratings of 4 and above, a
random tenth tests and one validates. The paper trains language models, whose perplexities stand beside for the order
of methods."""
