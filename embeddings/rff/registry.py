"""Feature maps by the kind that views name; plugins register theirs as entry points ``evenkeel.feature_maps``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import entry_points

from embeddings.outside_packages import load
from embeddings.rff.feature_map import FeatureMap, Identity


def _rff() -> type[FeatureMap]:
    # Specs need only the names of kinds, so a class is imported when a view of it is made or served.
    from embeddings.rff.features import RandomFourierFeatures

    return RandomFourierFeatures


def _exponential() -> type[FeatureMap]:
    from embeddings.rff.exponential import ExponentialVectors

    return ExponentialVectors


_OURS: dict[str, Callable[[], type[FeatureMap]]] = {
    "rff": _rff,
    "identity": lambda: Identity,
    "exponential": _exponential,
}

FEATURE_MAPS: dict[str, Callable[[], type[FeatureMap]]] = _OURS | {
    entry.name: partial(load, entry) for entry in entry_points(group="evenkeel.feature_maps") if entry.name not in _OURS
}
"""Functions that import and return the class of a feature map, by kind of map."""


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
    return FEATURE_MAPS[kind]()
