"""Maps from an anchor generation's vectors back to those of earlier generations, for consumers trained on these.

    g = unit([h, 1] A)

h is a unit vector of the generation, A [d + 1, e] the map, g the vector in the earlier generation's e coordinates (the
backward transformation of Hu et al. 2022, "Learning Backward Compatible Embeddings"). A is fitted when the generation
opens (embeddings.refresh.backward_maps), and is stored with its first version, as ``map-g0001.arrow`` for the map to
generation 1. Later versions of the generation are aligned onto the first, so A is valid for them and their new items.

``VIEW@gN`` names the view VIEW in generation N, ``COLLECTION@gN`` the vectors of generation N themselves. Views and
collections have no ``@`` in their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embeddings.store.files import UnknownView
from embeddings.store.manifest import VersionManifest
from embeddings.vectors.item_vectors import Array, unit_float32, unit_rows

MAP_PREFIX = "map-"
_NAME = re.compile(r"(?P<base>[^@]+)@g(?P<generation>[1-9]\d{0,8})")


@dataclass(frozen=True)
class GenerationMap:
    """The map to an earlier generation.

    Attributes:
        generation: number of the earlier generation.
        matrix: A [d + 1, e], float64; the last row is added to the product.
        figures: quality of the map on items on which it was not fitted, for the manifest.
        reasons: reasons for which it is not served; empty: it is served.
    """

    generation: int
    matrix: Array
    figures: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the map's entry in the manifest of the generation's first version."""
        entry = {"generation": self.generation, "dim": self.matrix.shape[1], **self.figures}
        return {**entry, "reasons": list(self.reasons)}


def map_rows(h: Array, matrix: Array) -> Array:
    """Return unit([unit(h), 1] A), float32 [n, e], of vectors ``h`` [n, d]; a zero row (missing) stays zero."""
    directions, norms = unit_rows(np.asarray(h))
    mapped = directions @ matrix[:-1] + matrix[-1]
    mapped[norms == 0] = 0.0
    return unit_float32(mapped)


def file_of(generation: int) -> str:
    """Return the name of the file with the map to an earlier generation."""
    return f"{MAP_PREFIX}g{generation:04d}.arrow"


def split_name(view: str) -> tuple[str, int | None]:
    """Return (VIEW, N) of ``VIEW@gN``, and (VIEW, None) of any other name."""
    parts = _NAME.fullmatch(view)
    return (view, None) if parts is None else (parts["base"], int(parts["generation"]))


def in_words(entry: Mapping[str, Any]) -> str:
    """Return a line of text about a map, from its entry in the manifest."""
    views = f"views @g{entry['generation']}"
    if entry["reasons"]:
        return f"{views} are held: {'; '.join(entry['reasons'])}"
    cosine = entry.get("cosine")
    return f"{views} are served" + (
        "" if cosine is None else f", with a mean cosine of {cosine:.3f} to the earlier vectors"
    )


def entry_of(first: VersionManifest, generation: int, view: str) -> Mapping[str, Any]:
    """Return the entry of the map to ``generation`` in the manifest of the first version of the generation read.

    Raises:
        UnknownView: there is no such map, or it is not served.
    """
    entry = next((entry for entry in first.maps if entry["generation"] == generation), None)
    where = f"view '{view}' of collection '{first.collection}'"
    if entry is None:
        served = ", ".join(f"g{entry['generation']}" for entry in first.maps) or "none"
        raise UnknownView(
            f"{where}: generation {first.anchor_generation} has no map to generation {generation} (it has: {served}; "
            "publish.keep_generations limits them): retrain the consumer, or pin a version of its generation"
        )
    if entry["reasons"]:
        raise UnknownView(f"{where} is held: {'; '.join(entry['reasons'])}")
    return entry
