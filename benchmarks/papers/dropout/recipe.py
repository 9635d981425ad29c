"""``dropout``: the effect of dropout in expectation, and by its noise (Wei, Kakade and Ma 2020, tables 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.data import documents
from benchmarks.papers.dropout.training_share import write_training_share
from benchmarks.papers.pages import published
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.generalization.label_randomization import at
from trainer.spec import DatasetSpec, Split

RATE = 0.4
HASH = {"kind": "hash", "std": 0.01}
APPROXIMATE_NOISE = {"noise": "approximate"}
HESSIAN = {"masks": 0, "explicit": "output_hessian"}
LOSS_JACOBIAN = {"masks": 0, "explicit": "loss_jacobian"}
IDENTITY = {"masks": 0, "explicit": "identity"}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "DROPOUT_1": {},
    "DROPOUT_2": {"masks": 2},
    "DROPOUT_4": {"masks": 4},
    "DROPOUT_8": {"masks": 8},
    "DROPOUT_32": {"masks": 32},
    **{f"DROPOUT_{k} + noise": {"masks": k, "noise": "exact"} for k in (2, 4, 8)},
    **{f"DROPOUT_{k} + xi_approx": {"masks": k} | APPROXIMATE_NOISE for k in (2, 4, 8)},
    "R_approx": HESSIAN,
    "R_approx (8 samples)": HESSIAN | {"label_samples": 8},
    "R_approx + xi_approx": HESSIAN | APPROXIMATE_NOISE,
    "R~": LOSS_JACOBIAN,
    "R~ + xi_approx": LOSS_JACOBIAN | APPROXIMATE_NOISE,
    "identity Hessian": IDENTITY,
    "identity Hessian (sampled)": IDENTITY | {"sign_samples": 1},
}
"""Setting ``dropout_method`` of each row of the table; without it the row has no dropout at all."""
QUICK: tuple[str, ...] = ("none", "DROPOUT_1", "DROPOUT_8", "R_approx", "R_approx + xi_approx")

STRENGTHS = "strengths"
TUNED = (
    "R_approx", "R_approx + xi_approx", "R~", "R~ + xi_approx", "identity Hessian", "identity Hessian (sampled)",
)  # fmt: skip
QUICK_TUNED = ("identity Hessian",)
FACTORS = (0.0625, 0.25, 1.0, 4.0, 16.0)
"""Multiples of lambda_1 = q / (1 - q), the coefficient of the equations, that are tried."""
PLAIN, RATES = "DROPOUT_1", (0.1, 0.2, 0.4, 0.6)
"""Row of plain dropout, and the rates that are tried."""
L2 = "l2"
L2_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
SIZED = ("none", "DROPOUT_1", "DROPOUT_2", "DROPOUT_4", "R_approx", "R_approx + xi_approx")
QUICK_SIZED = ("none",)
SHARE = 0.2
"""Share of the training rows in table 2."""
FIFTH = "fifth"
ML1M = "ml1m"
"""AUC on ml1m rises for four epochs, where that of epinions falls after the first."""


class Size(NamedTuple):
    """Trainings of a form of the recipe.

    ``of``: data sets, keyed by name, on which a training on all rows is compared with a training on a fifth of the
    rows. The first data set has all methods. ``fields``: fields of all jobs; ``of_strengths``: other fields, of the
    jobs that try strengths.
    """

    of: dict[str, DatasetSpec]
    methods: tuple[str, ...]
    tuned: tuple[str, ...]
    factors: tuple[float, ...]
    rates: tuple[float, ...]
    l2: tuple[float, ...]
    sized: tuple[str, ...]
    batch_size: int
    fields: dict[str, Any]
    of_strengths: dict[str, Any]

    @property
    def first(self) -> str:
        return next(iter(self.of))


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return a tower on epinions, and in part on ml1m; ``quick``: on a small click log.

    ``rows``: the folder of the files that it writes.
    """
    size = _quick(data) if quick else _whole(data)
    paths = {name: rows / f"{name}_fifth.parquet" for name in size.of}
    fifths = {name: at(of, paths[name]) for name, of in size.of.items()}
    trials = [
        trial
        for seed in range(seeds)
        for trial in (*_methods(size, seed), *_strengths(size, fifths[size.first], seed), *_fifths(size, fifths, seed))
    ]

    def prepare() -> None:
        for name, of in size.of.items():
            write_training_share(of, Split.model_validate(documents.RANDOM["split"]), paths[name], SHARE)

    claims = [*_claims(size.first), *([] if quick else _claims_of_parts(size))]
    return Recipe(
        "dropout", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), tuple(_tables(size, quick)), tuple(claims), prepare
    )


def _quick(data: Path) -> Size:
    of = {"quick": documents.click_log(data)}
    fields = documents.tower(8, [32], HASH) | {"evaluation": documents.RANDOM}
    return Size(of, QUICK, QUICK_TUNED, (0.25, 1.0), (), (), QUICK_SIZED, 128, fields, {"epochs": 1})


def _whole(data: Path) -> Size:
    liked = {"rule": "rating >= 4"}
    of = {"epinions": documents.epinions(data, liked), ML1M: documents.ml1m(data, liked, order="pos")}
    fields = documents.tower(16, [128, 64], HASH) | {"evaluation": documents.RANDOM}
    return Size(of, tuple(METHODS), TUNED, FACTORS, RATES, L2_STRENGTHS, SIZED, 1024, fields, {})


def _methods(size: Size, seed: int) -> Iterator[Trial]:
    for name, of in size.of.items():
        for row in size.methods if name == size.first else size.sized:
            yield _trial(size, name, "dnn", row, of, seed, _regularizers(METHODS[row]), {})


def _strengths(size: Size, of: DatasetSpec, seed: int) -> Iterator[Trial]:
    """Yield the candidates for the strength of each explicit regularizer, for dropout's rate, and those of l2."""
    for row in size.tuned:
        for factor in size.factors:
            method = (METHODS[row] or {}) | {"explicit_strength": factor * RATE / (1.0 - RATE)}
            tried = f"lambda_1 times {factor:g}"
            yield _trial(size, STRENGTHS, "dnn", row, of, seed, _regularizers(method), size.of_strengths, tried)
    for rate in size.rates:
        yield _trial(
            size, STRENGTHS, "dnn", PLAIN, of, seed, _regularizers({}, rate), size.of_strengths, f"rate {rate:g}"
        )
    for strength in size.l2:
        # s |theta|^2: rows of a sample add it to the loss, dense weights add 2 s theta to the gradient.
        dense = size.fields["dense_optimizer"] | {"weight_decay": 2.0 * strength}
        fields = size.of_strengths | {"dense_optimizer": dense}
        yield _trial(size, STRENGTHS, "dnn", L2, of, seed, {"l2": strength}, fields, f"{strength:g}")


def _fifths(size: Size, fifths: Mapping[str, DatasetSpec], seed: int) -> Iterator[Trial]:
    for name, of in fifths.items():
        for row in size.sized:
            yield _trial(size, name, FIFTH, row, of, seed, _regularizers(METHODS[row]), {})


def _trial(
    size: Size, table: str, column: str, row: str, of: DatasetSpec, seed: int, regularizers: dict[str, Any],
    fields: dict[str, Any], tried: str = "",
) -> Trial:  # fmt: skip
    name = f"{table} {row} {tried}" if column == "dnn" else f"{table} {column} {row}"
    return documents.trial(
        table, column, row, of, tried=tried, name=name, regularizers=regularizers, batch_size=size.batch_size,
        seed=seed, optimizer={"kind": "adam", "learning_rate": 0.001}, **(size.fields | fields),
    )  # fmt: skip


def _regularizers(method: dict[str, Any] | None, rate: float = RATE) -> dict[str, Any]:
    if method is None:
        return {}
    return {"dropout": rate, "dropout_layers": "both"} | ({"dropout_method": method} if method else {})


def _tables(size: Size, quick: bool) -> Iterator[Table]:
    rows = "own log, small" if quick else size.first
    perplexity = "" if quick else "validation perplexity of a language model, {}: only the order of methods compares"
    yield Table(
        size.first,
        f"{rows}, DNN, dropout {RATE} on rows and hidden layers: test logloss after epochs 1/2/3/4",
        (Column("logloss", "dnn", "logloss"),),
        "epochs",
        "logloss",
        lower=True,
        published={} if quick else published.DROPOUT_PTB,
        published_is=perplexity.format("an LSTM on Penn Treebank"),
        comparable=False,
    )
    yield Table(
        STRENGTHS,
        f"{rows}, a fifth of the training rows, each method with the strength that the validation split takes: logloss "
        "after the epoch best there",
        (Column("validation", "dnn", "logloss", "validation"), Column("test", "dnn", "logloss")),
        "best",
        "logloss",
        lower=True,
        published={} if quick else published.DROPOUT_TUNED,
        published_is=perplexity.format("an LSTM on Penn Treebank, R_approx untuned"),
        comparable=False,
    )
    yield Table(
        f"{STRENGTHS}:epochs",
        f"{rows}, the same: test logloss after epochs 1/2/3/4",
        (Column("logloss", "dnn", "logloss"),),
        "epochs",
        "logloss",
        lower=True,
    )
    for name in size.of:
        yield Table(
            f"{name}:sizes",
            f"{rows if name == size.first else name}, all of the training rows and a fifth of them: test logloss after "
            "epochs 1/2/3/4",
            (Column("all rows", "dnn", "logloss"), Column("a fifth", FIFTH, "logloss")),
            "epochs",
            "logloss",
            lower=True,
            published={} if quick else published.DROPOUT_SIZES,
            published_is=perplexity.format("Transformer-XL on WikiText-103"),
            comparable=False,
        )


def _claims(table: str) -> Iterator[Claim]:
    for row, text in (
        ("DROPOUT_1", "dropout ends below no dropout"),
        ("R_approx", "the explicit regularizer alone ends below no dropout"),
    ):
        yield Claim(text, table, "dnn", (row, "last"), ("none", "last"), 0.0)


def _claims_of_parts(size: Size) -> Iterator[Claim]:
    """Yield the paper's claims on tuned strengths (section 5.2) and on the size of the data (section 5.3)."""
    text = "with strengths tuned alike, the output Hessian is no worse than the identity"
    yield Claim(text, STRENGTHS, "dnn", ("R_approx", "best"), ("identity Hessian", "best"), 0.0)
    text = "R~ with its strength tuned is better than l2"
    yield Claim(text, STRENGTHS, "dnn", ("R~", "best"), ("l2", "best"), 0.0)
    for name in size.of:
        text = f"{name}: on a fifth of the rows, one mask ends below the mean of four"
        yield Claim(text, name, FIFTH, ("DROPOUT_1", "last"), ("DROPOUT_4", "last"), 0.0)


_TITLE = "Dropout taken apart: DROPOUT_k, noise added back, explicit regularizers"
_SOURCE = "Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout (2020), tables 1 to 3"
_PROTOCOL = """\
A CTR tower (dimension 16, 128-64) trained by Adam with rate .001; dropout .4 on looked-up rows and after each hidden
layer, or the regularizer in its place with the coefficients of the equations, which only `strengths` tunes. epinions
and ml1m, ratings of 4 and above, a random tenth tests and another validates. `fifth` trains on a random fifth of the
other rows, for four epochs too, and holds out the same rows. `strengths` trains on the fifth of epinions: lambda_1
is one of five multiples of q / (1 - q), chosen by the validation logloss of the best epoch. The rate of dropout and
the strength of l2, on rows and dense weights, are chosen in the same way. The paper trains language models, whose
perplexities are listed only to compare the order of the methods."""
