"""Texts of the CLI about jobs and publications: progress, the reasons why the gate held a version, and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from service.cli import output

AUC = "AUC (SPLIT, EPOCH)"
_FIELDS = {"metric": "METRIC", "value": "VALUE", "bound": "BOUND", "limit": "LIMIT", "times": "TIMES", "about": "ABOUT"}


def status(publication: Mapping[str, Any]) -> str:
    """Describe a publication, as in ``held v000004 (3 in a row)`` or ``published v000004 (new generation)``.

    The text is empty if nothing was published or held.
    """
    if publication.get("status") in (None, "none"):
        return ""
    words = " ".join(str(publication[name]) for name in ("status", "version") if publication.get(name))
    in_a_row = publication.get("held_in_a_row") or 0
    if publication.get("released"):
        return f"{words} (new generation)"
    return f"{words} ({in_a_row} in a row)" if in_a_row > 1 else words


def in_a_row(number: int, since: str | None) -> str:
    """Return text such as ``held 3 times in a row since TIME``."""
    return f"held {number} times in a row since {since}" if number > 1 else f"held since {since}"


def explain(document: Mapping[str, Any]) -> None:
    """Print the reasons for which a publication or version is held, or its failed checks if it was published."""
    diagnosis, held = document.get("diagnosis"), "held" in (document.get("status"), document.get("state"))
    if document.get("held_in_a_row"):
        typer.echo(in_a_row(document["held_in_a_row"], document.get("held_since")))
    if not diagnosis:
        for reason in document.get("reasons") or ():
            reason = output.in_words(reason)
            typer.echo(f"held because {reason}" if held else reason)
        return
    typer.echo(f"held because: {diagnosis['summary']}" if held else diagnosis["summary"])
    if diagnosis["failed"]:
        output.print_table([_row(failure) for failure in diagnosis["failed"]], _FIELDS, "")
    if held:
        typer.echo(f"what to do: {output.in_words(diagnosis['advice'])}")


def maps(version: Mapping[str, Any]) -> None:
    """Print for each of the version's maps to earlier generations whether it is served."""
    from embeddings.store.generation_maps import in_words

    for entry in version.get("maps") or ():
        output.note(f"{version['version']}: {in_words(entry)}")


def judge(document: Mapping[str, Any]) -> None:
    """Print the held-out metric of a publication's or version's model, if it overfits, and a proposed canary."""
    from trainer.runs import published_epoch

    quality = document.get("quality")
    if quality:
        output.note(f"model: {published_epoch.in_words(quality)}")
        if quality.get("overfits"):
            output.note(f"overfits: {quality['overfits']}")
    if document.get("proposed_canary"):
        output.note(document["proposed_canary"])


def compare(document: Mapping[str, Any]) -> None:
    """Print the metrics of a publication's or version's model and of the model served before it, slice by slice."""
    from trainer.runs.model_comparison import comparison_told, in_words

    comparison = comparison_told(document)
    if comparison is None:
        return
    if comparison.skipped:
        typer.echo(in_words(comparison))
        return
    typer.echo(f"compared with the model of {comparison.version}, on rows that neither model was trained on:")
    rows = [
        {name: _figure(value) for name, value in difference.items()}
        for difference in comparison.as_json()["differences"]
    ]
    fields = ("slice", "metric", "candidate", "served", "low", "high", "popularity", "rows")
    output.print_table(rows, output.headings(*fields, low="BETTER BY AT LEAST", high="AT MOST"), "")


def compared(document: Mapping[str, Any]) -> str:
    """Return text such as ``auc 0.8437 (0.7870) overfits``, with the served model's value in brackets.

    The values are of the same rows, or else of each model's own held-out rows. The text is empty without values.
    """
    from trainer.runs import published_epoch
    from trainer.runs.model_comparison import comparison_told

    comparison, quality = comparison_told(document), document.get("quality")
    text = "" if quality is None else published_epoch.beside(quality)
    if comparison is not None and comparison.differences:
        difference = comparison.differences[0]
        text = f"{difference.metric} {difference.candidate:.4f} ({difference.served:.4f})"
    return f"{text} overfits" if quality and quality.get("overfits") else text


def _figure(value: Any) -> Any:
    return f"{value:.4f}" if isinstance(value, float) else value


def _row(failure: Mapping[str, Any]) -> dict[str, Any]:
    times = failure["times"]
    return {**failure, "bound": failure["bound"].replace("_", " "), "times": None if times is None else f"{times:.1f}"}


def row(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job as a table shows them."""
    return {**job, "progress": progress(job), "auc": auc(job), "publication": status(job.get("publication") or {})}


def progress(job: Mapping[str, Any]) -> str:
    """Return a job's progress: the rows prepared so far, or the epoch; empty before preparation begins."""
    if job.get("preparation"):
        return output.preparation(job["preparation"])
    figures = job.get("progress") or {}
    return f"epoch {figures['epoch']}/{figures['epochs']}" if figures.get("epochs") else ""


def starved(job: Mapping[str, Any]) -> str | None:
    """Return a sentence for a running job that lacks processor time, else None."""
    from trainer.runs import starvation

    return starvation.in_words((job.get("progress") or {}).get("starved")) if job.get("state") == "running" else None


def best_epoch(job: Mapping[str, Any]) -> int | None:
    """Return the best epoch as :func:`trainer.spec.stored_specs.best_epoch` does."""
    from trainer.spec import stored_specs  # at the start of a command it would take too long

    return stored_specs.best_epoch(job)


def auc(job: Mapping[str, Any]) -> str:
    """Return the AUC of the best or else the last epoch, as in ``0.8437 test 3``; empty without an AUC."""
    best = best_epoch(job)
    for split in ("test", "validation"):
        values = _values(job, split, "auc")
        if values:
            epoch = best if best in values else max(values)
            return f"{values[epoch]:.4f} {split} {epoch}"
    return ""


def _values(job: Mapping[str, Any], split: str, metric: str) -> dict[int, float]:
    """Return a metric of a split by epoch; with several labels that of the first label."""
    from trainer.spec.evaluation import figures_named

    rows = [row for row in job.get("metrics") or [] if row.get("split") == split]
    name = next(iter(figures_named(metric, (figure for row in rows for figure in row))), metric)
    return {row["epoch"]: row[name] for row in rows if row.get(name) is not None}
