"""Feature maps by the kind that views name; plugins register theirs as entry points ``evenkeel.feature_maps``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from embeddings.outside_packages import load

if TYPE_CHECKING:
    from embeddings.rff.feature_map import FeatureMap

GROUP = "evenkeel.feature_maps"
# Specs need only the names of kinds, so a class is imported when a view of it is made or served.
_OURS = {
    "rff": EntryPoint("rff", "embeddings.rff.features:RandomFourierFeatures", GROUP),
    "identity": EntryPoint("identity", "embeddings.rff.feature_map:Identity", GROUP),
    "exponential": EntryPoint("exponential", "embeddings.rff.exponential:ExponentialVectors", GROUP),
}
FEATURE_MAPS = _OURS | {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _OURS}
"""Entry points of the classes of feature maps, by kind of map."""


@cache
def feature_map(kind: str) -> type[FeatureMap]:
    """Return the class of a kind.

    Raises:
        ValueError: No installed package has a map of this kind, or the package cannot be imported.
    """
    if kind not in FEATURE_MAPS:
        raise ValueError(
            f"kind '{kind}' is not one of {', '.join(FEATURE_MAPS)}: install the package that has it here too"
        )
    return load(FEATURE_MAPS[kind])
