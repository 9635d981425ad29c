"""Feature views of a collection: a name, the parameters of a map, and for random Fourier features the published U.

A view belongs to an anchor generation, because its consumers were trained in that generation's coordinates. When a
collection starts a new generation the view gets a new entry for it, with a U of its own, the moment somebody publishes
or creates it there. ``views/NAME/g0001.json`` is the entry of generation 1, ``views/NAME/g0001.arrow`` its U.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.rff import DEFAULT_SIGMA, FREQUENCIES, RandomFourierFeatures, digest
from embeddings.store_files import (
    UnknownView,
    ViewExists,
    fsync_directory,
    make_directory,
    read_document,
    replace_document,
    sweep,
)
from embeddings.store_version import read_arrow, verify_file, write_arrow
from embeddings.vectors import Array

KINDS = ("rff", "identity")
PARAMETERS = ("kind", "dim", "sigma", "seed", "frequencies")


def default_view(collection: str) -> str:
    """The name of the view that every collection is published with, cut to the length that names may have."""
    return f"{collection}_rff"[:63]


def define_view(
    name: str,
    dim_in: int,
    *,
    kind: str = "rff",
    dim: int | None = None,
    sigma: float = DEFAULT_SIGMA,
    seed: int = 0,
    frequencies: str = "orthogonal",
) -> dict[str, Any]:
    """A view's parameters with the defaults filled in: dim 2d for "rff"; "identity" has the vectors' own dim. Raises
    ValueError for what cannot be."""
    if kind not in KINDS:
        raise ValueError(f"view {name}: kind '{kind}' is not one of {', '.join(KINDS)}")
    if frequencies not in FREQUENCIES:
        raise ValueError(f"view {name}: frequencies '{frequencies}' is not one of {', '.join(FREQUENCIES)}")
    if kind == "identity":
        if dim not in (None, dim_in):
            raise ValueError(f"view {name}: an identity view has the collection's dim {dim_in}, not {dim}")
        return {"name": name, "kind": kind, "dim": dim_in, "sigma": None, "seed": None, "frequencies": None}
    dim = 2 * dim_in if dim is None else dim
    return {"name": name, "kind": kind, "dim": dim, "sigma": float(sigma), "seed": seed, "frequencies": frequencies}


class ViewRegistry:
    """The views of one collection. Changes are made under the collection's writer lock, which the caller holds."""

    def __init__(self, directory: Path, collection: str):
        self._directory = directory
        self._collection = collection
        self._features: dict[str, RandomFourierFeatures] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(
            path.name
            for path in self._directory.iterdir()
            if not path.name.startswith(".") and any(path.glob("g*.json"))
        )

    def get(self, name: str, generation: int) -> dict[str, Any]:
        """The view's entry for an anchor generation. Raises UnknownView."""
        entry = read_document(self._entry_path(name, generation)) if name in self.names() else None
        if entry is not None:
            return entry
        if name in self.names():
            raise UnknownView(
                f"view '{name}' of collection '{self._collection}' is not defined for anchor generation {generation}, "
                "which another model or dim began: create it again, and retrain its consumers on it"
            )
        raise UnknownView(
            f"collection '{self._collection}' has no view '{name}' (there are: {', '.join(self.names()) or 'none'})"
        )

    def all(self, generation: int) -> list[dict[str, Any]]:
        """Entries of every view that is defined for the generation, by name."""
        entries = (read_document(self._entry_path(name, generation)) for name in self.names())
        return [entry for entry in entries if entry is not None]

    def create(self, parameters: dict[str, Any], dim_in: int, generation: int) -> dict[str, Any]:
        """Adds the entry of a view for a generation and returns it; the existing one where it is the same. Raises
        ViewExists where it differs."""
        name = parameters["name"]
        path = self._entry_path(name, generation)
        existing = read_document(path)
        if existing is not None:
            differing = [key for key in PARAMETERS if existing[key] != parameters[key]]
            if differing or existing["dim_in"] != dim_in:
                raise ViewExists(
                    f"view '{name}' exists with other {', '.join(differing) or 'vectors'}: its consumers rely on it; "
                    "take another name, or delete it first"
                )
            return existing
        make_directory(path.parent)
        sweep(path.parent)
        entry = {
            **parameters,
            "collection": self._collection,
            "dim_in": dim_in,
            "anchor_generation": generation,
            "materialized": False,
            "created_at": utc_now(),
            "sha256": None,
            "file": None,
        }
        if parameters["kind"] == "rff":
            features = RandomFourierFeatures(
                dim_in, parameters["dim"], parameters["sigma"], parameters["seed"], parameters["frequencies"]
            )
            material = path.with_suffix(".arrow")
            material.unlink(missing_ok=True)
            entry["file"] = write_arrow(material, frequencies_batch(features.frequencies))
            entry["sha256"] = features.sha256
        replace_document(path, entry)
        return entry

    def delete(self, name: str) -> None:
        """Removes a view in every generation. Raises UnknownView."""
        if name not in self.names():
            raise UnknownView(f"collection '{self._collection}' has no view '{name}'")
        grave = self._directory / f".gone-{uuid.uuid4().hex}"
        (self._directory / name).rename(grave)
        fsync_directory(self._directory)
        shutil.rmtree(grave, ignore_errors=True)
        with self._lock:
            self._features.clear()

    def clean(self) -> None:
        """Removes what killed writers left."""
        if self._directory.is_dir():
            for grave in self._directory.glob(".gone-*"):
                shutil.rmtree(grave, ignore_errors=True)
            for path in self._directory.iterdir():
                sweep(path)

    def features(self, entry: dict[str, Any]) -> RandomFourierFeatures:
        """The features of an "rff" entry, from its published U, whose sha256 is checked. Raises CorruptStore,
        ValueError."""
        with self._lock:
            features = self._features.get(entry["sha256"])
            if features is None:
                directory = self._entry_path(entry["name"], entry["anchor_generation"]).parent
                frequencies = read_frequencies(verify_file(directory, entry["file"]))
                features = RandomFourierFeatures.from_frequencies(
                    frequencies,
                    sigma=entry["sigma"],
                    seed=entry["seed"],
                    kind=entry["frequencies"],
                    sha256=entry["sha256"],
                )
                self._features[entry["sha256"]] = features
            return features

    def _entry_path(self, name: str, generation: int) -> Path:
        return self._directory / name / f"g{generation:04d}.json"


def frequencies_batch(frequencies: Array) -> pa.RecordBatch:
    """U [m, d] as one Arrow record batch with the column ``u``, a fixed-size list per frequency."""
    flat = pa.array(np.ascontiguousarray(frequencies).reshape(-1))
    rows = pa.FixedSizeListArray.from_arrays(flat, frequencies.shape[1])
    batch = pa.record_batch({"u": rows})
    return batch.replace_schema_metadata({"sha256": digest(frequencies)})


def read_frequencies(path: Path) -> Array:
    """U [m, d] of a file that ``frequencies_batch`` made."""
    column = read_arrow(path).column("u")
    return np.array(column.flatten().to_numpy().reshape(len(column), column.type.list_size))


def utc_now() -> str:
    """Now, RFC 3339 in UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
