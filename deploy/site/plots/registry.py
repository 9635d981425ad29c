"""Plots, keyed by file name: title, its tables in docs/reports, and the function that draws it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from deploy.site.plots import overfitting, quality, refreshes, speed
from deploy.site.plots.figure import svg
from deploy.site.plots.tables import Source

HERE = Path(__file__).parent
_STAMP = re.compile(r"<!-- drawn of (\w+), picture (\w+) -->\n\Z")


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of tables of a report.

    Attributes:
        title: Alternative text for readers who do not see the plot.
        draw: Draws a figure of matplotlib from the tables.
        sources: Positions of its tables; the report that has the first table shows the plot.
    """

    title: str
    draw: Callable[..., Any]
    sources: tuple[Source, ...]

    @property
    def report(self) -> str:
        return self.sources[0].report

    def svg(self) -> str:
        """Return the plot as SVG, with a stamp: digests of its tables and code, and of the SVG itself."""
        tables = [source.read() for source in self.sources]
        text = svg(lambda: self.draw(*tables), self.title)
        return f"{text}<!-- drawn of {self.digest()}, picture {_digest(text)} -->\n"

    def is_current(self, text: str) -> bool:
        """Return True if the stamp in an SVG shows that it was drawn from the present tables and code."""
        stamp = _STAMP.search(text)
        return stamp is not None and stamp[1] == self.digest() and stamp[2] == _digest(text[: stamp.start()])

    def digest(self) -> str:
        """Return a digest of the title, the tables and the code that draws."""
        tables = [source.read() for source in self.sources]
        modules = ("tables", "figure", "charts", self.draw.__module__.rpartition(".")[2])
        code = [(HERE / f"{module}.py").read_text("utf-8") for module in modules]
        return _digest(repr((self.title, self.draw.__name__, tables, code)))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


PLOTS = {
    "one_epoch": Plot(
        "Test AUC by epoch on three data sets with Adam, MEDA, AdamAR and AdamAR by epoch",
        overfitting.one_epoch,
        (
            Source("one_epoch", "| epinions, 616,029"),
            Source("one_epoch", "| amazon_sports, 379,086"),
            Source("one_epoch", "| ml1m, 800,103"),
        ),
    ),
    "alpha": Plot(
        "AUC lost by one half-life for all cases, by half-life",
        overfitting.alpha,
        (Source("alpha", "| one half-life for all"),),
    ),
    "dropout": Plot(
        "Test logloss by epoch of the dropout paper's methods",
        overfitting.dropout,
        (Source("dropout", "| method | ours"),),
    ),
    "dynamic_tables": Plot(
        "Test AUC by the rows that a table has and by when ids are let in",
        overfitting.dynamic_tables,
        (Source("dynamic_tables", "| item table"),),
    ),
    "generalization": Plot(
        "Test AUC and gap of the logloss by epoch of Adam and AdamAR on epinions",
        overfitting.generalization,
        (Source("generalization", "| measure | Adam | AdamAR"),),
    ),
    "towers": Plot(
        "Test AUC by the share of training labels that are permuted",
        overfitting.towers,
        (Source("towers", "| labels permuted | training AUC"),),
    ),
    "frozen_consumer": Plot(
        "Accuracy and flips of a model frozen on day 0: as trained, aligned, and aligned and averaged",
        refreshes.frozen_consumer,
        (Source("refresh", "| refresh | served | of day 0", keys=2, below="## BPR on MovieLens-1M"),),
    ),
    "frozen_consumer_item2vec": Plot(
        "Accuracy and flips of a frozen model of item2vec's vectors",
        refreshes.frozen_consumer,
        (Source("refresh", "| refresh | served | of day 0", keys=2, below="## item2vec"),),
    ),
    "random_fourier_features": Plot(
        "A consumer fitted on the run it reads, frozen on another one, and frozen with aligned runs",
        refreshes.random_fourier_features,
        (
            Source("random_fourier_features", "| task 1: a movie's first genre"),
            Source("random_fourier_features", "| task 2: the next item"),
        ),
    ),
    "kernel_error": Plot(
        "Kernel error of orthogonal, structured and Gaussian frequencies",
        quality.kernel_error,
        (Source("random_fourier_features", "| d, m | sigma", keys=2),),
    ),
    "news_days_consumer": Plot(
        "AUC of a consumer on articles that live for two days, fitted once and fitted each day",
        refreshes.news_days_consumer,
        (Source("news_days", "| way"),),
    ),
    "sse": Plot(
        "Test RMSE of MF with and without SSE, here and as published",
        quality.sse,
        (Source("sse", "| method | RMSE | sd"),),
    ),
    "sse_complexity": Plot(
        "Simulated Rademacher complexity by the probability of a swap",
        quality.sse_complexity,
        (Source("sse", "| judged by | p 0"),),
    ),
    "sse_rows": Plot(
        "Items along the first principal component of their rows, with and without SSE",
        quality.sse_rows,
        (Source("sse", "| along the first component"),),
    ),
    "ctr_libraries": Plot(
        "Test AUC of three models by three libraries and their optimizers",
        quality.ctr_libraries,
        (Source("ctr_libraries", "| | DNN | DCNv2 | DeepFM | processor s"),),
    ),
    "several_labels": Plot(
        "Test AUC of two labels: one job each, and models of both",
        quality.several_labels,
        (Source("several_labels", "| 4 epochs"), Source("several_labels", "| 8 epochs")),
    ),
    "hosts": Plot(
        "Time of a step of two ranks by what connects them",
        speed.hosts,
        (Source("hosts", "| | step, median (best), ms"),),
    ),
    "exchanges": Plot(
        "Time of an exchange in shared memory and by gloo, by its size",
        speed.exchanges,
        (Source("scaling", "| bytes | shared memory"),),
    ),
    "job_start": Plot(
        "Parts of a job with a Ray cluster for each run and forked",
        speed.job_start,
        (Source("job_start", "| case | | queue", keys=2),),
    ),
    "preparation": Plot(
        "Time and memory of preparing 4 million rows",
        speed.preparation,
        (Source("data_pipeline", "| | seconds | processor seconds | anonymous memory"),),
    ),
    "feature_store": Plot(
        "Time of 1000 random ids beside LMDB and SQLite",
        speed.feature_store,
        (Source("feature_store", "| | ours | LMDB | SQLite | goal"),),
    ),
    "event_loop": Plot(
        "p50 and p99 of fetches by threads and on the event loop",
        speed.event_loop,
        (Source("control_plane", "| how | p50 | p99"),),
    ),
}
