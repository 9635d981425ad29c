"""Lineage of a run: facts to repeat it, or to explain why a repetition would differ. Does not import torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from embeddings.refresh.gate_checks.row_figures import ROW_FIGURES
from embeddings.refresh.windows import WINDOW
from trainer.runs.directory import Run
from trainer.spec import JobSpec

PACKAGES = ("evenkeel", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray", "numpy", "pyarrow", "triton")
ROOT = Path(__file__).resolve().parents[2]


def lineage_of(run: Run) -> dict[str, Any]:
    """Return the lineage of an attempt, whose data must have been prepared. A field that does not apply is None.

    - ``dataset_fingerprint``: hash of the rows; ``row_figures``: their figures (trainer.data.prepare.row_figures);
    - ``drift``: columns that moved since the parent's data, None without one (trainer.data.prepare.drift);
    - ``warnings``: about joins and graphs that find few ids;
    - ``spec_sha256``, ``packages`` (name -> version), ``git_commit`` (if the code is a checkout);
    - ``parent_version``: the version that was served when the job started;
    - ``warm_start``: the checkpoints that the job started from, and ``start_version``: the held version of their run;
    - ``inherited``: messages on features that were added, dropped or renamed since the parent;
    - ``window``: {last, days} of the job's window of data, by which the gate tells a shorter window from lost rows.
    """
    from trainer.data.batches.prepared import PreparedData

    data, window = PreparedData.open(run.data), run.job.dataset.window
    return {
        "dataset_fingerprint": data.dataset_fingerprint,
        "drift": None if data.drift is None else [one for one in data.drift if one["moved"]],
        "warnings": data.warnings,
        ROW_FIGURES: data.row_figures,
        "spec_sha256": spec_sha256(run.submitted),
        "packages": installed_packages(),
        "git_commit": git_commit(ROOT),
        "parent_version": run.parent_version,
        "warm_start": run.init_checkpoint,
        "inherited": _inherited(run),
        "start_version": run.start_version,
        WINDOW: None if window is None else {"last": window.start, "days": window.days},
    }


def _inherited(run: Run) -> list[str]:
    """Return messages on features that changed since the parent; [] if its run directory cannot be read."""
    if run.init_checkpoint is None:
        return []
    from trainer.runs.parents import check_parent

    # The run has checked this itself; its parent's directory may belong to another run by now.
    with contextlib.suppress(ValueError, OSError):
        return check_parent(run.job, run.dataset, Path(run.init_checkpoint).parent)
    return []


def spec_sha256(job: JobSpec) -> str:
    """Return the sha256 of the spec with all defaults as canonical JSON, so equal jobs have equal hashes."""
    text = json.dumps(job.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def installed_packages() -> dict[str, str]:
    """Return the versions of installed packages among PACKAGES, which may affect the result of a training."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_commit(root: Path) -> str | None:
    """Return the commit that is checked out at ``root``; None if that is no git checkout. Does not call git."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref: "):
            return head or None
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            return (git / ref).read_text("utf-8").strip() or None
        packed = (git / "packed-refs").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)
