"""``language``: small versions of the papers' language models: LSTMs with dropout methods on the Brown corpus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.data.quick_texts import write_quick_texts
from benchmarks.papers.pages import published
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, TextTrial

RATE = 0.4
SAMPLED: dict[str, Any] = {"masks": 0, "explicit": "output_hessian", "label_samples": 1}
LOSS_JACOBIAN: dict[str, Any] = {"masks": 0, "explicit": "loss_jacobian"}
APPROXIMATE_NOISE = {"noise": "approximate"}
DROPOUT: dict[str, dict[str, Any] | None] = {
    "none": None,
    "DROPOUT_1": {},
    "DROPOUT_4": {"masks": 4},
    "R_approx": SAMPLED,
    "R_approx (8 samples)": SAMPLED | {"label_samples": 8},
    "R_approx + xi_approx": SAMPLED | APPROXIMATE_NOISE,
    "DROPOUT_4 + xi_approx": {"masks": 4} | APPROXIMATE_NOISE,
    "DROPOUT_4 + noise": {"masks": 4, "noise": "exact"},
    "DROPOUT_8": {"masks": 8},
    "DROPOUT_8 + xi_approx": {"masks": 8} | APPROXIMATE_NOISE,
    "DROPOUT_32": {"masks": 32},
}
"""Setting ``dropout_method`` of each row of the table; None: no dropout at all."""
COSTLY = ("R_approx (8 samples)", "DROPOUT_8", "DROPOUT_8 + xi_approx", "DROPOUT_32")
"""Rows that the small form leaves out."""
IDENTITY = "identity Hessian (sampled)"
TUNED: dict[str, dict[str, Any]] = {
    "R~": LOSS_JACOBIAN,
    "R~ + xi_approx": LOSS_JACOBIAN | APPROXIMATE_NOISE,
    IDENTITY: {"masks": 0, "explicit": "identity", "sign_samples": 1},
}
"""The same for the rows whose strength is chosen by validation, as in the paper."""
FACTORS = (0.25, 1.0, 4.0)
"""Multiples of lambda_1 = q / (1 - q), the coefficient of the equations, that are tried."""
IDENTITY_FACTORS = (0.0001, 0.001, 0.01, 0.1)
"""The identity's trace is the number of words, the Hessian's of the loss at most 1."""
L2_STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3)
ADAPTIVE: dict[str, dict[str, Any] | None] = {"none": None, "R_approx + xi_approx": SAMPLED | APPROXIMATE_NOISE}
"""Rows of the adaptive softmax (below claim C.1)."""
CLUSTERS = [200, 500]
QUICK: dict[str, Any] = {
    "num_training": 4, "num_held_out": 1, "num_words": 40, "dim": 8, "length": 10, "batch_size": 4, "epochs": 2,
}  # fmt: skip


def recipe(data: Path, seeds: int = 3, quick: bool = False) -> Recipe:
    """Return LSTMs on the Brown corpus; ``quick``: on a small text of its own."""
    small = QUICK if quick else {}
    files = ("brown.parquet",)
    clusters = [10, 20] if quick else CLUSTERS
    methods = [
        *(("full", row, "", {"method": method}) for row, method in DROPOUT.items() if not (quick and row in COSTLY)),
        *_tuned(1 if quick else None),
        *(("adaptive", row, "", {"method": method, "adaptive": clusters}) for row, method in ADAPTIVE.items()),
    ]
    trials = tuple(
        TextTrial("lstm", column, row, "word_lstm", data, files, settings | small, seed, tried)
        for seed in range(seeds)
        for column, row, tried, settings in methods
    )
    table = Table(
        "lstm",
        f"{'own text, small' if quick else 'Brown corpus, 4 documents, 1000 words'}, LSTM of 2 layers, dropout .4: "
        "perplexity after the epoch that is best on validation",
        (
            Column("validation", "full", "perplexity", "validation"),
            Column("test", "full", "perplexity"),
            Column("training", "full", "perplexity", "train"),
            Column("adaptive softmax, validation", "adaptive", "perplexity", "validation"),
        ),
        "best",
        "perplexity",
        lower=True,
        published={} if quick else published.DROPOUT_LSTM,
        published_is="" if quick else "an LSTM with 100 times the text and ten times the words, Penn Treebank",
        comparable=False,
        digits=2,
    )
    claims = tuple(
        Claim(text, "lstm", "full", (left, "best"), (right, "best"), 0.0)
        for left, right, text in (
            ("DROPOUT_1", "none", "dropout ends below no dropout"),
            ("DROPOUT_1", "DROPOUT_4", "one mask ends below the mean of four"),
            ("R_approx + xi_approx", "DROPOUT_1", "both approximate terms end below dropout"),
            ("R~", "l2", "R~ with its strength tuned is better than l2"),
        )
    )
    prepare = partial(write_quick_texts, data) if quick else None
    # The small text decides no claim.
    return Recipe("language", _TITLE, _SOURCE, _PROTOCOL, trials, (table,), () if quick else claims, prepare)


def _tuned(most: int | None) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield (column, row, tried, settings) of the candidates for each strength, at most ``most`` for a row."""
    for row, method in TUNED.items():
        for factor in (IDENTITY_FACTORS if row == IDENTITY else FACTORS)[:most]:
            strength = {} if factor == 1.0 else {"explicit_strength": factor * RATE / (1.0 - RATE)}
            yield "full", row, f"lambda_1 times {factor:g}", {"method": method | strength}
    for l2 in L2_STRENGTHS[:most]:
        yield "full", "l2", f"{l2:g}", {"method": None, "l2": l2}


_TITLE = "Language models in small: dropout taken apart"
_SOURCE = "Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout (2020), tables 1 and 3"
_PROTOCOL = """\
Documents of the Brown corpus, lower case, of all categories: 4 train, 2 validate, 2 test, drawn once; 1000 words of the
training documents are known. So little text that it overfits in these epochs. Embedding and two LSTM layers of 128, no
tied weights, windows of 20 words, batches of 10, Adam with rate .01, gradients clipped to norm 1, 20 epochs. Dropout .4
on the embedding and the output of each layer, another mask for each position; R_approx with one label drawn for each
word. No DropConnect. The strengths of R~, of the identity and of l2 are chosen from a few on the validation split, by
the mean over seeds; nothing else is tuned, and other rows have no l2. Four in ten held-out words are unknown and count
as one word. The paper trains three layers of 1150 on 0.9 million words with 10,000 known for 150 epochs by SGD."""
