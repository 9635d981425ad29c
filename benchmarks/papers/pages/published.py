"""Published figures of the papers' tables, by row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Figures = Mapping[tuple[str, str], Sequence[float]]
"""The figures of each cell, by (row, column label)."""


def _epochs(text: str) -> tuple[float, ...]:
    return tuple(float(value) for value in text.split("/"))


def _grid(columns: Sequence[str], rows: Mapping[str, str]) -> Figures:
    """Parse rows: blanks separate their cells, slashes the epochs of a cell."""
    return {
        (name, column): _epochs(cell)
        for name, cells in rows.items()
        for column, cell in zip(columns, cells.split(), strict=True)
    }


MODELS = ("DNN", "WDL", "xDeepFM", "WuKong")

ADAM_ON_AMAZON = _grid(
    MODELS,
    {
        "Adam": ".8482/.8548/.8335/.8180 .8474/.8510/.8261/.8156 .8460/.8535/.8287/.8163 .8580/.8600/.8348/.8232",
        "MEDA": ".8482/.8544/.8556/.8573 .8474/.8506/.8566/.8566 .8460/.8519/.8551/.8562 .8580/.8611/.8621/.8626",
        "SAM": ".8507/.8587/.8417/.8249 .8516/.8567/.8396/.8213 .8505/.8587/.8390/.8232 .8588/.8639/.8404/.8225",
        "AdamW": ".8476/.8571/.8426/.8276 .8461/.8533/.8380/.8223 .8446/.8557/.8381/.8240 .8564/.8632/.8478/.8349",
        "AdamAR": ".8507/.8683/.8708/.8686 .8496/.8654/.8689/.8659 .8483/.8676/.8687/.8675 .8582/.8696/.8693/.8664",
    },
)
"""AdamAR slides, table 1, Amazon: test AUC after epochs 1 to 4, mean of 3 seeds."""

ADAGRAD_ON_AMAZON = _grid(
    MODELS,
    {
        "Adagrad": ".8438/.8402/.8141/.8042 .8406/.8345/.8085/.7982 .8405/.8374/.8103/.7996 .8491/.8472/.8156/.8046",
        "MEDA": ".8438/.8481/.8495/.8505 .8406/.8470/.8497/.8510 .8405/.8463/.8476/.8500 .8491/.8569/.8587/.8609",
        "SAM": ".8500/.8527/.8361/.8193 .8490/.7995/.8325/.8155 .8483/.8521/.8325/.8170 .8556/.8567/.8356/.8174",
        "AdagradW": ".8428/.8578/.8563/.8535 .8424/.8553/.8531/.8498 .8410/.8565/.8522/.8508 .8513/.8630/.8617/.8606",
        "AdagradAR": ".8479/.8659/.8711/.8712 .8453/.8631/.8687/.8707 .8444/.8641/.8681/.8703 .8538/.8690/.8708/.8700",
    },
)
"""AdamAR slides, table 2, Amazon."""

SSE_DOUBAN = _grid(
    ("RMSE",),
    {
        "MF": ".7339",
        "Dropout + MF": ".7296",
        "SSE-SE + MF": ".7201",
        "SSE-SE + Dropout + MF": ".7185",
        "MF, no biases": ".7339",
        "Dropout + MF, no biases": ".7296",
        "SSE-SE + MF, no biases": ".7201",
        "SSE-SE + Dropout + MF, no biases": ".7185",
    },
)
"""SSE, table 2, Douban. The paper does not say whether its MF has biases."""

SSE_ML1M = _grid(("RMSE",), {"MF": "1.0984", "SSE-SE + MF": "1.0150"})
"""SSE, table 1, MovieLens-1M: only users with fewer than 60 ratings."""

SSE_ML1M_FEW = _grid(
    ("RMSE",),
    {
        "MF": "1.0984",
        "Graph Laplacian + MF": "1.0464",
        "SSE-SE + MF": "1.0150",
        "MF, no biases": "1.0984",
        "SSE-SE + MF, no biases": "1.0150",
        "SSE-SE, unseen too + MF, no biases": "1.0150",
        "Graph Laplacian + MF, no biases": "1.0464",
        "SSE-Graph (ages, genres) + MF, no biases": "1.0145",
        "SSE-Graph (genres) + MF": "1.0145",
        "SSE-Graph (titles) + MF": "1.0145",
    },
)
"""SSE, table 1: the Laplacian with alternating least squares, SSE-Graph with a graph of casts. The paper does not say
whether its MF has biases; the MF that it cites has none."""

SSE_BPR = _grid(
    ("P@1", "P@5", "P@10"),
    {"BPR": ".6977 .6568 .6257", "Dropout + BPR": ".7031 .6548 .6273", "SSE-SE + BPR": ".7254 .6813 .6469"},
)
"""SSE, table 3, MovieLens-1M."""

SSE_SASREC = _grid(
    ("NDCG@10", "HR@10"),
    {
        "SASRec": ".5941 .8182",
        "p_x .1": ".6092 .8250",
        "p_y .1": ".6085 .8293",
        "p_x .1, p_y .1": ".6200 .8315",
    },
)
"""SSE, table 4, MovieLens-1M, two blocks of dimension 100."""

SSE_SASREC_200: Figures = {
    **SSE_SASREC,
    **_grid(("NDCG@10, 6 blocks", "HR@10, 6 blocks"), {"SASRec": ".5996 .8272", "p_x .1, p_y .1": ".6265 .8364"}),
}
"""The whole of table 4: two blocks and six."""

SSE_SENTIMENT: Mapping[str, Figures] = {
    "movie_reviews": {
        ("Pre-training + Fine-tuning", "test accuracy"): (0.9518,),
        ("(SSE-SE + Pre-training) + Fine-tuning", "test accuracy"): (0.9542,),
    },
    "sentence_polarity": {
        ("Pre-training + Fine-tuning", "test accuracy"): (0.938,),
        ("(SSE-SE + Pre-training) + Fine-tuning", "test accuracy"): (0.943,),
        ("(SSE-SE + Pre-training) + (SSE-SE + Fine-tuning)", "test accuracy"): (0.945,),
    },
}
"""SSE, tables 6 and 7, by the name of our file: IMDB, and the test split of SST-2."""

GOWALLA = _grid(("recall@20", "NDCG@20"), {"BPR": ".1291 .1109"})
"""Wang et al., Neural Graph Collaborative Filtering (2019, revised), table 2: MF trained by BPR, dimension 64."""

DROPOUT_PTB = _grid(
    ("logloss",),
    {
        "none": "122.16",
        "DROPOUT_1": "73.76",
        "DROPOUT_8": "83.82",
        "DROPOUT_32": "89.12",
        "DROPOUT_8 + xi_approx": "74.49",
        "R_approx": "84.52",
        "R_approx (8 samples)": "84.27",
        "R_approx + xi_approx": "72.99",
    },
)
"""Wei, Kakade and Ma, tables 1 and 3: validation perplexity of an LSTM on Penn Treebank, q = .4."""

DROPOUT_TUNED = _grid(
    ("validation",),
    {
        "R_approx": "84.52",
        "R~": "84.06",
        "R~ + xi_approx": "79.54",
        "identity Hessian (sampled)": "108.76",
        "l2": "112.04",
    },
)
"""The same paper, table 1 and section 5.2: all strengths are tuned except R_approx's."""

DROPOUT_SIZES = {
    ("none", "all rows"): (29.45,),
    ("DROPOUT_1", "all rows"): (23.39,),
    ("DROPOUT_2", "all rows"): (23.13,),
    ("DROPOUT_4", "all rows"): (23.14,),
    ("R_approx", "all rows"): (24.12,),
    ("DROPOUT_1", "a fifth"): (46.05,),
    ("DROPOUT_2", "a fifth"): (46.07,),
    ("DROPOUT_4", "a fifth"): (47.40,),
}
"""The same paper, table 2: validation perplexity of Transformer-XL on WikiText-103 and on a fifth of it."""

DROPOUT_LSTM: Figures = {
    (row, "validation"): figures for grid in (DROPOUT_TUNED, DROPOUT_PTB) for (row, _), figures in grid.items()
}
"""Both tables."""

RFF_TASK_1 = {
    "h_32": ("64.82 (2.83)", "44.79 (2.21)"),
    "avg(h_32)": ("68.72", "59.04"),
    "phi_32": ("68.64 (.27)", "58.91 (.25)"),
    "phi_64": ("85.77 (.19)", "90.46 (.21)"),
}
"""Xu et al., table 1, MovieLens-1M task 1: accuracy and macro F1 in per cent, mean (sd) of ten runs."""

RFF_TASK_2 = {
    "h_32": ("66.55 (3.03)", "33.96 (1.83)"),
    "avg(h_32)": ("68.98", "35.02"),
    "phi_32": ("68.90 (.33)", "34.97 (.17)"),
    "phi_64": ("71.30 (.27)", "37.48 (.15)"),
}
"""The same table, task 2: recall@5 and NDCG@5."""

RFF_REVIEWS: Figures = {
    ("h_32", "#ws=3, #ns=3"): (0.7664,),
    ("h_32", "#ws=3, #ns=4"): (0.7823,),
    ("h_32", "#ws=4, #ns=3"): (0.7933,),
    ("h_32", "#ws=4, #ns=4"): (0.7887,),
    ("phi_32", "#ws=3, #ns=3"): (0.7826,),
    ("phi_32", "#ws=3, #ns=4"): (0.8007,),
    ("phi_32", "#ws=4, #ns=3"): (0.8105,),
    ("phi_32", "#ws=4, #ns=4"): (0.8079,),
    ("trained jointly", "#ws=3, #ns=3"): (0.8625,),
}
"""The same paper, table A.1, d = 32: accuracy on IMDB. The standard deviations over ten runs are 1.75 to 2.01 per cent
for h and .20 to .23 per cent for phi."""
