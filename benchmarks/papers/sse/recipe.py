"""``sse``: Stochastic Shared Embeddings in their native settings (Wu et al. 2019, tables 1 to 4)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.papers.data import documents
from benchmarks.papers.sse import bias, figures, graphs
from benchmarks.papers.sse.tables import BPR_DIMS, CLAIMS, FEW_DIMS, RMSE, TABLES
from benchmarks.papers.trials.trial import Claim, Recipe, Table, Trial
from trainer.generalization.label_randomization import write_table
from trainer.report_pages.section import NOT_RUN, Findings, Section
from trainer.search.records import facts
from trainer.spec import DatasetSpec

FEW = {"early_stopping": {"patience": 3}}


def both(probability: float, **more: Any) -> dict[str, Any]:
    """Return SSE-SE on both tables."""
    return {name: {"probability": probability, **more} for name in ("user", "item")}


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return MF, BPR and SASRec with and without SSE; ``quick``: MF on a small click log.

    ``rows``: the folder for the graphs of movies.
    """
    if quick:
        return _quick(data, seeds, rows)
    parts = (
        _ml1m,
        partial(_movies, rows),
        partial(_few, rows),
        partial(_figures, rows),
        partial(_few_dims, rows),
        _douban,
        _epinions,
        partial(_bpr, rows),
        partial(_bpr_dims, rows),
        _gowalla,
        _sasrec,
        _sasrec_200,
    )
    trials = [trial for seed in range(seeds) for part in parts for trial in part(data, seed)]
    prepare = partial(_write, data, rows)
    return Recipe("sse", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), TABLES, CLAIMS, prepare, _findings)


MF: dict[str, Any] = {
    "evaluation": documents.RANDOM, "rate": 0.01, "batch_size": 256, "epochs": 60, "biases": True,
}  # fmt: skip


def _mf(
    table: str, row: str, of: DatasetSpec, seed: int, dim: int, l2: float, sse: dict[str, Any] | None = None, *,
    column: str = "mf", tried: str = "", measured_by: str = "", **changes: Any,
) -> Trial:  # fmt: skip
    """Return SGD-MF as in the paper, p <- p + rate (e q - l2 p) for each rating.

    Our step uses the batch mean of the gradient of e^2 + l2 |p|^2, so its rate is the paper's rate times half the batch
    size. ``changes``: changed settings of MF, and more regularizers.
    """
    settings = MF | changes
    more = {name: value for name, value in changes.items() if name not in MF}
    init = {"kind": "hash", "std": 0.1}
    return documents.trial(
        table, column, row, of, tried=tried, measured_by=measured_by,
        model={"kind": "mf", "embedding_dim": dim, "loss": "mse", "init": init, "biases": settings["biases"]},
        optimizer={"kind": "sgd", "learning_rate": settings["rate"] * settings["batch_size"] / 2},
        regularizers={"l2": l2, **FEW, **more}, seed=seed,
        **{name: settings[name] for name in ("epochs", "batch_size", "evaluation")},
        sse=sse or None,
    )  # fmt: skip


PRODUCTS: dict[str, Any] = {"biases": False, "epochs": 120, "early_stopping": {"patience": 10}}
"""Settings of MF without biases. Rows must learn the mean too, so training takes longer; at a constant rate the
validation error may rise in three successive epochs by chance, hence the larger patience."""
NO_BIASES: dict[str, Any] = PRODUCTS | {"batch_size": 1024}
DROP: dict[str, Any] = {"dropout": 0.1, "dropout_layers": "embeddings"}
Variants = tuple[tuple[str, dict[str, Any] | None, dict[str, Any]], ...]
"""(row of the table, settings of SSE, other changed settings)."""


def _ml1m(data: Path, seed: int) -> Iterator[Trial]:
    of = documents.ml1m(data, {"value": "rating"}, "ml1m_ratings")
    variants: Variants = (
        ("MF", None, {}),
        ("Dropout + MF", None, DROP),
        ("SSE-SE + MF", both(0.005), {}),
        ("MF, no biases", None, NO_BIASES),
        ("SSE-SE + MF, no biases", both(0.005), NO_BIASES),
    )
    for row, sse, more in variants:
        yield _mf("ml1m", row, of, seed, 100, 0.1, sse, **more)


def _movie_graphs(rows: Path) -> dict[str, Any]:
    return {
        name: {"uri": str(rows / f"ml1m_{name}.parquet"), "source": "source", "target": "target", "of": "item"}
        for name in ("genres", "titles")
    }


def _ages(rows: Path) -> dict[str, Any]:
    uri = str(rows / "ml1m_ages.parquet")
    return {"ages": {"uri": uri, "source": "source", "target": "target", "of": "user"}}


def _movies(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    """Yield SSE-Graph with graphs of shared genres and titles; the paper's graph connects movies by their cast."""
    of = documents.ml1m(data, {"value": "rating"}, "ml1m_ratings", graphs=_movie_graphs(rows))
    for name in ("genres", "titles"):
        yield _mf("ml1m", f"SSE-Graph ({name}) + MF", of, seed, 100, 0.1, _by_graph(name))


def _by_graph(name: str) -> dict[str, Any]:
    return both(0.005) | {"item": {"probability": 0.005, "graph": name, "rho": 200}}


def _laplacian(strength: float) -> dict[str, Any]:
    return {"laplacian": {"feature": "item", "graph": "genres", "strength": strength}}


def _few(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    """Yield table 1's own rows: users with fewer than 60 ratings."""
    few = rows / "ml1m_few.parquet"
    plain = documents.dataset("ml1m_few", few, {"value": "rating"})
    of = documents.dataset("ml1m_few", few, {"value": "rating"}, graphs=_movie_graphs(rows) | _ages(rows))
    # In the paper an id that is not in training has a row of its own, which is drawn like any other.
    unseen = both(0.005, include_unknown=True)
    by_age = {"user": {"probability": 0.005, "include_unknown": True, "graph": "ages", "rho": 500}}
    by_genre = {"item": {"probability": 0.005, "include_unknown": True, "graph": "genres", "rho": 200}}
    variants: Variants = (
        ("MF", None, {}),
        ("Graph Laplacian + MF", None, _laplacian(0.01)),
        ("SSE-SE + MF", both(0.005), {}),
        ("MF, no biases", None, PRODUCTS),
        ("SSE-SE + MF, no biases", both(0.005), PRODUCTS),
        ("SSE-SE (p .05) + MF, no biases", both(0.05), PRODUCTS),
        ("SSE-SE, unseen too + MF, no biases", unseen, PRODUCTS),
        ("SSE-SE (p .05), unseen too + MF, no biases", both(0.05, include_unknown=True), PRODUCTS),
        # Alternating least squares uses the same graphs.
        ("SSE-Graph (ages, genres) + MF, no biases", by_age | by_genre, PRODUCTS | {"measured_by": "als"}),
        ("SSE-Graph (ages) + MF, no biases", unseen | by_age, PRODUCTS),
        ("SSE-Graph (genres) + MF, no biases", unseen | by_genre, PRODUCTS),
        *(
            (
                "Graph Laplacian + MF, no biases",
                None,
                PRODUCTS | _laplacian(strength) | {"tried": f"strength {strength:g}"},
            )
            for strength in (0.01, 0.1, 1.0)
        ),
        *((f"SSE-Graph ({name}) + MF", _by_graph(name), {}) for name in ("genres", "titles")),
    )
    for row, sse, more in variants:
        yield _mf("ml1m_few", row, of if "Graph" in row else plain, seed, 10, 0.1, sse, **more)


def _figures(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    """Yield the jobs of figures 3 and 5, which examine the trained rows."""
    of = documents.dataset(
        "ml1m_few", rows / "ml1m_few.parquet", {"value": "rating"}, graphs=_movie_graphs(rows) | _ages(rows)
    )
    by_genre = both(0.05) | {"item": {"probability": 0.05, "graph": "genres", "rho": 200}}
    for row, sse in (("MF", None), ("SSE-SE + MF", both(0.05)), ("SSE-Graph (genres) + MF", by_genre)):
        yield _mf("figures", row, of, seed, 10, 0.1, sse, measured_by="sse_figures", **PRODUCTS)


def _few_dims(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    """Yield rows of table 1 in other dimensions; the paper says that SSE-SE helps in all of them (tables 2 and 3)."""
    of = documents.dataset("ml1m_few", rows / "ml1m_few.parquet", {"value": "rating"})
    variants: tuple[tuple[str, dict[str, Any] | None], ...] = (
        ("MF, no biases", None),
        ("SSE-SE (p .05) + MF, no biases", both(0.05)),
        ("SSE-SE (p .05), unseen too + MF, no biases", both(0.05, include_unknown=True)),
    )
    for dim in FEW_DIMS:
        for row, sse in variants:
            yield _mf("few_dims", row, of, seed, dim, 0.1, sse, column=f"d{dim}", **PRODUCTS)


def _write(data: Path, rows: Path) -> None:
    """Write the graphs of movies and the rows of users with few ratings; existing files are kept."""
    for name, column, edges in (("genres", "genres", graphs.genre_edges), ("titles", "title", graphs.title_edges)):
        graphs.write_edges_by(data / "ml1m_movies.parquet", column, edges, rows / f"ml1m_{name}.parquet")
    few, many = rows / "ml1m_few.parquet", rows / "ml1m_many.parquet"
    ratings = pq.read_table(data / "ml1m.parquet", columns=["user", "item", "rating"])
    if not few.exists():
        write_table(ratings.filter(_users_with(ratings, pc.less, 60)), few)
    if not many.exists():
        write_table(_fifty_of_each(ratings.filter(_users_with(ratings, pc.greater_equal, 60))), many)
    graphs.write_edges_by(
        data / "ml1m_users.parquet", "age", _ages_of(few), rows / "ml1m_ages.parquet", of="user"
    )  # fmt: skip


def _users_with(ratings: pa.Table, compare: Callable[[Any, int], Any], number: int) -> pa.Array:
    """Return bool [n], True for rows whose user has a number of ratings for which ``compare`` is true."""
    counts = ratings.group_by("user").aggregate([("item", "count")])
    users = counts.filter(compare(counts["item_count"], number))["user"].combine_chunks()
    return pc.is_in(ratings["user"], value_set=users)


def _fifty_of_each(ratings: pa.Table) -> pa.Table:
    """Return the rows with ``is_test``: false for fifty random rows of each user, true for the others."""
    drawn = np.random.default_rng(0).permutation(len(ratings))
    users = ratings["user"].to_numpy()[drawn]
    by_user = np.argsort(users, kind="stable")
    starts = np.flatnonzero(np.diff(users[by_user], prepend=-1))
    place = np.arange(len(users)) - np.repeat(starts, np.diff(starts, append=len(users)))
    is_test = np.empty(len(users), dtype=bool)
    is_test[drawn[by_user]] = place >= 50
    return ratings.append_column("is_test", pa.array(is_test))


def _ages_of(few: Path) -> Callable[[dict[int, Any]], graphs.Edges]:
    """Return a function that makes edges between users of the same age, for users that occur in ``few``."""

    def edges(ages: dict[int, Any]) -> graphs.Edges:
        users = set(pq.read_table(few, columns=["user"])["user"].to_pylist())
        return graphs.cluster_edges({user: age for user, age in ages.items() if user in users})

    return edges


def _douban(data: Path, seed: int) -> Iterator[Trial]:
    of = documents.dataset("douban_ratings", data / "douban.parquet", {"value": "rating"})
    by_column = {"split": {"kind": "column", "column": "is_test"}}
    variants: Variants = (
        ("MF", None, {}),
        ("Dropout + MF", None, DROP),
        ("SSE-SE + MF", both(0.008), {}),
        ("SSE-SE + Dropout + MF", both(0.005), DROP | {"rate": 0.005}),
        ("MF, no biases", None, PRODUCTS),
        ("Dropout + MF, no biases", None, PRODUCTS | DROP),
        ("SSE-SE + MF, no biases", both(0.008), PRODUCTS),
        ("SSE-SE + Dropout + MF, no biases", both(0.005), PRODUCTS | DROP | {"rate": 0.005}),
        ("SSE-SE, unseen too + MF, no biases", both(0.008, include_unknown=True), PRODUCTS),
        ("SSE-SE (p .05), unseen too + MF, no biases", both(0.05, include_unknown=True), PRODUCTS),
    )
    for row, sse, more in variants:
        yield _mf("douban", row, of, seed, 10, 0.08, sse, evaluation=by_column, batch_size=64, **more)


def _epinions(data: Path, seed: int) -> Iterator[Trial]:
    of = documents.dataset("epinions_ratings", data / "epinions.parquet", {"value": "rating"}, graphs=documents.TRUST)
    trusted = {"user": {"probability": 0.01, "graph": "trust", "rho": 200}, "item": {"probability": 0.01}}
    laplacian = {"laplacian": {"feature": "user", "graph": "trust", "strength": 0.01}}
    variants: Variants = (
        ("MF", None, {}),
        ("Graph Laplacian + MF", None, laplacian),
        ("SSE-SE + MF", both(0.01), {}),
        ("SSE-Graph + MF", trusted, {}),
    )
    for row, sse, more in variants:
        yield _mf("epinions", row, of, seed, 10, 0.1, sse, **more)


BPR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BPR": ({}, {}),
    "Dropout + BPR": ({}, {"dropout": 0.1}),
    "SSE-SE + BPR": (both(0.01), {}),
    "SSE-SE (p .05) + BPR": (both(0.05), {}),
    "SSE-SE (p .2) + BPR": (both(0.2), {}),
    "SSE-SE (p .4) + BPR": (both(0.4), {}),
}
"""The settings of SSE and other regularizers, by row of the table."""


def _pairwise(
    table: str, of: DatasetSpec, seed: int, watched: str, evaluation: dict[str, Any], *, rate: float, l2: float,
    patience: int, column: str = "bpr", dim: int = 64, rows: Sequence[str] = ("BPR", "SSE-SE + BPR"),
) -> Iterator[Trial]:  # fmt: skip
    """Yield the trials of BPR, dropout and SSE-SE that ``rows`` names."""
    regularizers = {"early_stopping": {"metric": watched, "patience": patience}, "l2": l2}
    for row in rows:
        sse, more = BPR[row]
        yield documents.trial(
            table, column, row, of,
            model={"kind": "bpr", "loss": "bpr", "embedding_dim": dim, "init": {"kind": "hash", "std": 0.1}},
            optimizer={"kind": "adam", "learning_rate": rate}, regularizers=regularizers | more,
            epochs=40, batch_size=2048, seed=seed, evaluation=evaluation, sse=sse or None,
        )  # fmt: skip


def _bpr(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    """Yield table 3's task: users with at least 60 ratings, all positive; fifty ratings of each user train.

    The paper cites Wu, Hsieh and Sharpnack (KDD 2017, ICML 2018) for this task.
    """
    return _fifty("ml1m_bpr", rows, seed, rows_of=tuple(BPR))


def _bpr_dims(rows: Path, data: Path, seed: int) -> Iterator[Trial]:
    for dim in BPR_DIMS:
        yield from _fifty("bpr_dims", rows, seed, column=f"d{dim}", dim=dim, rows_of=("BPR", "SSE-SE (p .2) + BPR"))


def _fifty(table: str, rows: Path, seed: int, *, rows_of: Sequence[str], **of_pairs: Any) -> Iterator[Trial]:
    of = documents.dataset("ml1m_many", rows / "ml1m_many.parquet", {"rule": "rating >= 1"})
    split = {"kind": "column", "column": "is_test", "validation": 0.02}
    evaluation = {"split": split, "metrics": [f"precision_{k}_full" for k in (1, 5, 10)]}
    # Only one of fifty ratings validates: precision then counts few hits, and may not rise for some epochs by chance.
    return _pairwise(
        table, of, seed, "precision_5_full", evaluation, rate=0.005, l2=0.01, patience=10, rows=rows_of, **of_pairs
    )


def _gowalla(data: Path, seed: int) -> Iterator[Trial]:
    of = documents.dataset("gowalla", data / "gowalla.parquet", documents.NEGATIVES)
    split = {"kind": "column", "column": "is_test"}
    evaluation = {"split": split, "metrics": ["recall_20_full", "ndcg_20_full"]}
    return _pairwise("gowalla", of, seed, "recall_20_full", evaluation, rate=0.001, l2=0.001, patience=3)


P_X, P_Y = {"item": {"probability": 0.1}}, {"label": {"probability": 0.1}}
SASREC: dict[str, dict[str, Any]] = {"SASRec": {}, "p_x .1": P_X, "p_y .1": P_Y, "p_x .1, p_y .1": P_X | P_Y}


def _sasrec(data: Path, seed: int) -> Iterator[Trial]:
    return _sequences("ml1m_sasrec", _ml1m_sequences(data), seed, dim=100, dropouts=(0.1, 0.2), epochs=80)


def _sasrec_200(data: Path, seed: int) -> Iterator[Trial]:
    """Yield table 4's six cells with the paper's sequence length and weight decay."""
    for blocks, rows in ((2, tuple(SASREC)), (6, ("SASRec", "p_x .1, p_y .1"))):
        yield from _sequences(
            "ml1m_sasrec_200", _ml1m_sequences(data), seed, dim=100, dropouts=(0.1,), epochs=80, length=200,
            blocks=blocks, weight_decay=1e-5, rows=rows,
        )  # fmt: skip


def _ml1m_sequences(data: Path) -> DatasetSpec:
    return documents.ml1m(data, {"rule": "rating >= 1"}, "ml1m_sequences", order="pos")


def _sequences(
    table: str, of: DatasetSpec, seed: int, *, dim: int, dropouts: tuple[float, ...], epochs: int, length: int = 50,
    blocks: int = 2, weight_decay: float = 0.0, rows: Sequence[str] = tuple(SASREC),
) -> Iterator[Trial]:  # fmt: skip
    """Yield every method with each dropout rate; the validation split chooses one rate for each method.

    ``weight_decay``: weight decay of all parameters except the item rows, which SSE regularizes.
    """
    column = "sasrec" if blocks == 2 else f"sasrec_{blocks}"
    for row, dropout in itertools.product(rows, dropouts):
        yield documents.trial(
            table, column, row, of, tried=f"dropout {dropout:g}" if len(dropouts) > 1 else "",
            model={
                "kind": "sasrec", "loss": "bce", "embedding_dim": dim, "length": length, "blocks": blocks, "heads": 1,
                "negatives": 1
            },
            optimizer={"kind": "adam", "learning_rate": 0.001},
            dense_optimizer={"weight_decay": weight_decay} if weight_decay else None,
            regularizers={"dropout": dropout, "early_stopping": {"metric": "ndcg_10", "patience": 5}},
            epochs=epochs, batch_size=128, seed=seed,
            evaluation=documents.LAST_ITEMS | {"metrics": ["auc", "ndcg_10", "hit_rate_10"]},
            sse=SASREC[row] or None,
        )  # fmt: skip


def _findings(recipe: Recipe, records: Mapping[str, dict[str, Any]], out: Path) -> Findings:
    of_records = [records[trial.key] for trial in recipe.jobs if trial.measured_by == "als" and trial.key in records]
    looked_at: dict[str, list[dict[str, Any]]] = {}
    for trial in recipe.jobs:
        if trial.measured_by == "sse_figures" and records.get(trial.key, {}).get("state") == "done":
            looked_at.setdefault(trial.row, []).append(records[trial.key])
    sections = (
        _als([one for one in of_records if one["state"] == "done"]),
        *figures.sections(looked_at),
        bias.section(looked_at),
    )
    return Findings(tuple(filter(None, sections)))


def _als(records: Sequence[dict[str, Any]]) -> Section | None:
    """Return the section on alternating least squares on the data of table 1; None if no run has measured it."""
    if not records:
        return None
    measured = [record["measured"] for record in records]
    lines = []
    for method, name, paper in (("ALS-MF", "als", ""), ("Graph Laplacian + ALS-MF", "als_laplacian", "1.0464")):
        of_seeds = [dict(one[name]) for one in measured]
        values = [one.pop("test") for one in of_seeds]
        deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else NOT_RUN
        choices = "; ".join(", ".join(f"{key} {value:g}" for key, value in one.items()) for one in of_seeds)
        lines.append((method, f"{statistics.fmean(values):.4f}", deviation, choices, paper))
    return Section(
        "als", "MovieLens-1M, users with fewer than 60 ratings: alternating least squares, dimension 10, no biases",
        ("method", "test RMSE", "sd", "chosen on validation, by seed", "published"), tuple(lines),
        ("Graphs: users of one age, movies by genres.", facts(records)),
    )  # fmt: skip


def _quick(data: Path, seeds: int, rows: Path) -> Recipe:
    edges = rows / "clusters.parquet"
    near = {"near": {"uri": str(edges), "source": "source", "target": "target", "of": "item"}}
    of = documents.dataset("clicks", data / "clicklog", {"value": "click"}, graphs=near)
    by_graph = both(0.2) | {"item": {"probability": 0.2, "graph": "near", "rho": 50}}
    trials = tuple(
        _mf("quick", row, of, seed, 8, 0.02, sse, batch_size=64, epochs=8)
        for seed in range(seeds)
        for row, sse in (("MF", None), ("SSE-SE + MF", both(0.2)), ("SSE-Graph + MF", by_graph))
    ) + tuple(
        _mf("figures", "MF", of, seed, 8, 0.02, batch_size=64, epochs=2, biases=False, measured_by="sse_figures")
        for seed in range(seeds)
    )
    table = Table("quick", "own log, small, MF: test RMSE at the best epoch", RMSE, "best", "rmse", lower=True)
    claims = tuple(
        Claim(f"{row} is below plain MF", "quick", "mf", (f"{row} + MF", "best"), ("MF", "best"), 0.0)
        for row in ("SSE-SE", "SSE-Graph")
    )
    prepare = partial(graphs.write_edges_by, data / "clicklog", "cluster", graphs.cluster_edges, edges)
    return Recipe("sse", _TITLE, _SOURCE, _PROTOCOL, trials, (table,), claims, prepare, _findings)


_TITLE = "Stochastic Shared Embeddings: matrix factorization, BPR, SASRec"
_SOURCE = "Wu et al., Stochastic Shared Embeddings (NeurIPS 2019), tables 1 to 4"
_PROTOCOL = """\
Each run is evaluated at the epoch that is best on the validation split, with early stopping (patience 3; MF without
biases and BPR on ml1m 10; SASRec 5). MF: SGD with rate .01 per rating, biases and a global mean unless a row or its
table says that there are none, L2 on all parameters that a rating reads, biases included. Splits: MF on ml1m and
epinions: a random tenth tests and one validates; BPR on ml1m: fifty ratings of each user train and validate; douban and
gowalla: their own test rows, a tenth of the others validates; SASRec: each user's last items. The paper tunes its rates
on each data set; here they are the published ones where the paper gives them."""
