"""CLI command that finds which dimension and sigma of a view suit a user's own task."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag
from service.client import Client

if TYPE_CHECKING:
    from embeddings.refresh.consumer_accuracy import TaskAdvice
    from embeddings.vectors.item_vectors import Array


def register(app: typer.Typer) -> None:
    app.command()(advise)


def advise(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION")],
    task: Annotated[Path, typer.Argument(metavar="TASK.parquet", help="Columns id and label.")],
    version: Annotated[str, typer.Option(help="The version whose vectors are tried.")] = "current",
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="A chart of it (needs matplotlib).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Try views of several dims and sigmas on a task, and recommend one."""
    from embeddings.refresh.consumer_accuracy import advise as tried

    with tempfile.TemporaryDirectory(prefix="evenkeel-advise-") as folder, Client() as client:
        vectors, labels = _labelled(client.snapshot(collection, Path(folder) / "vectors.parquet", version), task)
    try:
        advice = tried(vectors, labels)
    except ValueError as error:
        raise CommandError(f"{task}: {error}", "give a label for the ids of this collection") from None
    if plot is not None:
        draw(advice, plot, f"{collection}, {task.stem}")
    best = advice.best
    if as_json:
        output.print_json(
            {
                "best": {"dim": best.dim, "sigma": best.sigma, "accuracy": best.accuracy},
                "majority": advice.majority,
                "standard_error": advice.standard_error,
                "items": advice.num_items,
                "tried": [{"dim": one.dim, "sigma": one.sigma, "accuracy": one.accuracy} for one in advice.tried],
            }
        )
        return
    rows = [{"dim": one.dim, "sigma": one.sigma or "vectors", "accuracy": one.accuracy} for one in advice.tried]
    output.print_table(rows, output.headings("dim", "sigma", "accuracy"), "")
    output.note(
        f"take dim {best.dim}, sigma {best.sigma:g}: accuracy {best.accuracy:.3f} on {advice.num_held_out} items that "
        f"it was not fitted on (the vectors themselves {advice.tried[0].accuracy:.3f}, most frequent class "
        f"{advice.majority:.3f}; differences below {advice.standard_error:.3f} are chance)"
    )


def _labelled(snapshot: Path, task: Path) -> tuple[Array, list[Any]]:
    """Return (vectors [n, d], labels) of the items that have both."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        asked = pq.read_table(task, columns=["id", "label"]).drop_null()
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"{task}: {error}", "a Parquet file with the columns id and label") from None
    served = pq.read_table(snapshot, columns=["id", "status", "vector"])
    served = served.filter(pc.not_equal(served["status"].cast(pa.string()), "missing"))
    row_of = {identifier: row for row, identifier in enumerate(served["id"].to_pylist())}
    pairs = [
        (row_of[identifier], label)
        for identifier, label in zip(asked["id"].to_pylist(), asked["label"].to_pylist(), strict=True)
        if identifier in row_of
    ]
    column = served["vector"].combine_chunks()
    matrix = np.asarray(column.flatten(), dtype=np.float32).reshape(len(served), column.type.list_size)
    return matrix[[row for row, _ in pairs]], [label for _, label in pairs]


def draw(advice: TaskAdvice, path: Path, title: str) -> None:
    """Draw accuracy against dimension, one line per sigma, as PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("--plot draws with matplotlib, which is not installed", "pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    own = next(one for one in advice.tried if one.sigma is None)
    for sigma in sorted({one.sigma for one in advice.tried if one.sigma is not None}):
        line = sorted((one.dim, one.accuracy) for one in advice.tried if one.sigma == sigma)
        axes.errorbar(
            *zip(*line, strict=True), yerr=advice.standard_error, marker="o", capsize=3, label=f"sigma {sigma:g}"
        )
    axes.axhline(own.accuracy, color="black", linestyle="--", label=f"the vectors themselves (dim {own.dim})")
    axes.axhline(advice.majority, color="grey", linestyle=":", label="most frequent class")
    axes.set_xscale("log", base=2)
    ticks = sorted({one.dim for one in advice.tried if one.sigma is not None})
    axes.set_xticks(ticks, [str(dim) for dim in ticks])
    axes.minorticks_off()
    axes.set(xlabel="dim of the view", ylabel="accuracy on held-out items", title=title)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, format="png")
