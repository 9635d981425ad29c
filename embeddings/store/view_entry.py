"""Documents of a feature view: its definition, and its entry for an anchor generation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from embeddings.rff.feature_map import MapParameters
from embeddings.store.files import CorruptStore, FileEntry

ANCHORS = "anchors"
"""Kind of a collection's settings with the anchors of a view, the items whose vectors are its matrix."""


@dataclass(frozen=True, kw_only=True)
class ViewDefinition:
    """A view as a user defines it, with the defaults of its kind; settings that its kind does not use are None."""

    name: str
    kind: str
    dim: int
    sigma: float | None
    seed: int | None
    frequencies: str | None
    dim_in: int

    @property
    def parameters(self) -> MapParameters:
        """The parameters of the view's feature map."""
        return MapParameters(self.dim_in, self.dim, self.sigma, self.seed, self.frequencies)


@dataclass(frozen=True, kw_only=True)
class ViewEntry(ViewDefinition):
    """A view of one anchor generation, as stored in the entry's file and in manifests of versions.

    Attributes:
        materialized: True if versions are written with the view's rows.
        sha256: hash of the map's matrix U; None for a map without U.
        file: file with U, next to the entry's own file; None for a map without U, and in manifests.
        extra: every other field, as it is in the document.
    """

    collection: str
    anchor_generation: int
    materialized: bool
    created_at: str
    sha256: str | None
    file: FileEntry | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: Path) -> ViewEntry:
        """Return the entry that ``document`` describes; ``where`` is its file, for error messages.

        Raises:
            CorruptStore: a required field is missing.
        """
        extra = {name: value for name, value in document.items() if name not in _FIELDS}
        known = {name: document[name] for name in document if name in _FIELDS}
        try:
            if known.get("file") is not None:
                known["file"] = FileEntry(**known["file"])
            return cls(**known, extra=extra)
        except TypeError as error:
            raise CorruptStore(f"{where}: is no entry of a view ({error}): restore it from a backup") from error

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a document, like the one it was read from, with names sorted."""
        file = None if self.file is None else self.file._asdict()
        return dict(sorted({**self.public(), "file": file}.items()))

    def public(self) -> dict[str, Any]:
        """Return :meth:`to_json` without ``file``, the form for users and manifests."""
        document = {name: getattr(self, name) for name in _FIELDS if name != "file"}
        return dict(sorted({**document, **copy.deepcopy(dict(self.extra))}.items()))

    @property
    def map_key(self) -> tuple[str, MapParameters, str | None]:
        """Identity of the feature map: entries with equal keys compute equal features from equal vectors."""
        return self.kind, self.parameters, self.sha256


_FIELDS = frozenset(one.name for one in fields(ViewEntry)) - {"extra"}
