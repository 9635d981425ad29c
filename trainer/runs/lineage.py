"""Lineage of a run: enough to make it again, or to say why that would give something else. Torch-free."""

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

PACKAGES = (
    "evenkeel",
    "torch",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "ray",
    "numpy",
    "pyarrow",
    "triton",
)
ROOT = Path(__file__).resolve().parents[2]


def lineage_of(run: Run) -> dict[str, Any]:
    """Return the lineage of an attempt whose data are prepared.

    The fields are ``dataset_fingerprint`` (the rows, trainer.data), ``drift`` (what of them moved since the run that it
    goes on from, trainer.data.prepare.drift), ``warnings`` (of joins and graphs that find few ids), ``row_figures`` (of
    the rows, trainer.data.prepare.row_figures), ``spec_sha256``, ``packages`` and their versions, ``git_commit`` of the
    code where it is a checkout, ``parent_version``, ``warm_start`` (the checkpoints that it began from), ``inherited``
    (in words, which features came, went or have other names since), ``start_version`` (the held version that these are
    of) and ``window`` ({last, days} of the job's, by which the gate tells a shorter one from lost rows); null where
    there is none.
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
    """Describe the features that changed since the parent, as far as its run directory is here."""
    if run.init_checkpoint is None:
        return []
    from trainer.runs.parents import check_parent

    # The run itself has checked it: the parent's directory may be another's now.
    with contextlib.suppress(ValueError, OSError):
        return check_parent(run.job, run.dataset, Path(run.init_checkpoint).parent)
    return []


def spec_sha256(job: JobSpec) -> str:
    """Return the sha256 of the whole spec, defaults filled in, as canonical JSON: equal for equal jobs."""
    text = json.dumps(job.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def installed_packages() -> dict[str, str]:
    """Return the versions of packages that decide what a training gives, without those that are not installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_commit(root: Path) -> str | None:
    """Return the commit that is checked out at ``root``; None where that is no git checkout. Runs no other program."""
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
