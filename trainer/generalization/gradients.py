"""Norms of gradients by layer, which show whether they vanish or explode (Mądry's lecture, section 1, equation 1)."""

from __future__ import annotations

from trainer.generalization.parameters import Point


def gradient_norms(point: Point) -> dict[str, tuple[float, float]]:
    """Return by parameter (|gradient|, |gradient| / |value|), Euclidean; the ratio is NaN for a parameter of zeros."""
    norms = {}
    for (name, leaf), gradient in zip(point.parameters.items(), point.gradient(), strict=True):
        length, size = float(gradient.double().norm()), float(leaf.detach().double().norm())
        norms[name] = (length, length / size if size > 0 else float("nan"))
    return norms
