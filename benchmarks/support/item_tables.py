"""Item vectors of many runs of one spec, trained once in this process and kept as files.

The benchmarks of refreshes and faults use them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Gate, Settings
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import ItemVectors
from trainer.checkpoint.format import latest_valid
from trainer.launch.in_process import train
from trainer.publishing.publish import item_vectors
from trainer.runs.directory import Run, read_run
from trainer.runs.protocol import EXIT_FILE
from trainer.spec import DatasetSpec, JobSpec, parse_job

_COLUMNS = ("vectors", "norms", "evidence", "counts")


def succeeded(directory: Path) -> bool:
    """Return True if the run in this directory ended successfully."""
    file = directory / EXIT_FILE
    return file.exists() and bool(json.loads(file.read_text())["state"] == "succeeded")


def _name(text: str) -> str:
    """Return the text as a valid name of a collection."""
    return text.replace("_", "-").replace(".", "-")


@dataclasses.dataclass
class ItemTables:
    """Runs of one job under ``folder``. Each name is trained once, also if the folder is used again."""

    dataset: DatasetSpec
    job: JobSpec
    folder: Path

    def table(
        self,
        name: str,
        seed: int,
        *,
        init: str | None = None,
        rows: Path | None = None,
        chain: str | None = None,
        held: dict[str, Any] | None = None,
        **changes: Any,
    ) -> ItemVectors:
        """Return the item rows of the run ``name``, which is trained unless it exists.

        Args:
            name: name of the run; each name is trained once.
            seed: seed of the job.
            init: the run whose weights it starts from.
            rows: a file whose rows replace those of the data set.
            chain: the collection that it is published to.
            held: anchor and frozen context in the job's ``publish``; used only if there is a ``chain``.
            changes: changed fields of the job.
        """
        if chain is not None:
            publish = {"collection": _name(chain), "gate": {"mode": "report"}, **(held or {})}
            changes["publish"] = self._publish() | publish
            if init is not None:
                changes["init_from"] = {"job": init}
        path = self.folder / "tables" / f"{name}.npz"
        if not path.exists():
            run = self._run(name, seed, init, rows, changes)
            checkpoint = latest_valid(run.checkpoints)
            assert checkpoint is not None
            items = item_vectors(run, checkpoint)
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = np.asarray(items.vectors)
            np.savez(
                path.with_suffix(".tmp.npz"), ids=items.keys, vectors=whole, norms=items.norms,
                evidence=items.evidence, counts=np.asarray(items.counts),
            )  # fmt: skip
            path.with_suffix(".tmp.npz").rename(path)
            if init is not None:
                # The coded rows of many refreshes would fill the disk, and are not read again.
                shutil.rmtree(run.data, ignore_errors=True)
        with np.load(path) as file:
            return ItemVectors(file["ids"], **{column: file[column] for column in _COLUMNS})

    def begin_chain(self, chain: str, day0: ItemVectors) -> None:
        """Create a collection whose first version is ``day0``, unless it exists."""
        target = self.chain(chain)
        if target.current() is None:
            publish_candidate(
                open_store(self._store()),
                target.name,
                RefreshRequest(
                    day0,
                    Settings(gate=Gate("off")),
                    parent_version=None,
                    model=self.job.model.kind,
                ),
            )

    def chain(self, chain: str) -> Collection:
        """Return the collection of a chain."""
        return open_store(self._store()).collection(_name(chain))

    def run(self, name: str) -> Run:
        """Return the run of that name; it must have been trained before."""
        return read_run(self._directory(name))

    def rows_but_a_tenth(self, seed: int) -> Path:
        """Return the data set without a tenth of its rows, a different tenth for each seed."""
        keep = np.random.default_rng(seed).random(pq.read_metadata(self.dataset.uri).num_rows) < 0.9
        return self.rows(f"tenth-{seed}", keep)

    def rows(self, name: str, keep: Any) -> Path:
        """Return a file of the data set's rows for which ``keep``, bool, is true."""
        path = self.folder / "rows" / f"{name}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pq.read_table(self.dataset.uri).filter(pa.array(keep)), path)
        return path

    def _directory(self, name: str) -> Path:
        return self.folder / "runs" / name

    def _run(self, name: str, seed: int, init: str | None, rows: Path | None, changes: dict[str, Any]) -> Run:
        # Each run has its own collection, since the caller decides what is published to shared ones.
        publish = self._publish() | {"collection": f"own-{_name(name)}"}
        document = self.job.model_dump(mode="json") | {"seed": seed, "name": name, "publish": publish} | changes
        dataset = self.dataset if rows is None else self.dataset.model_copy(update={"uri": str(rows)})
        directory = self._directory(name)
        # An interrupted run is resumed from its newest checkpoint.
        if not succeeded(directory):
            print(f"# {self.job.model.kind}: training {name}", file=sys.stderr, flush=True)
            with open(self._log(), "a") as log, contextlib.redirect_stdout(log):
                code = train(
                    dataset,
                    parse_job(document),
                    run_dir=directory,
                    store=self._store(),
                    init=None if init is None else self._directory(init),
                )
            if code:
                raise SystemExit(f"{name} ended with exit code {code}: see {self._log()}")
        return read_run(directory)

    def _publish(self) -> dict[str, Any]:
        assert self.job.publish is not None
        return self.job.publish.model_dump(mode="json")

    def _store(self) -> str:
        return str(self.folder / "own")

    def _log(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / "log.txt"
