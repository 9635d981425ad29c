"""Loss of a model of which one matrix, or all of them, keep a part of their rank.

By truncated SVD (Mądry's lecture, section 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.generalization.parameters import restored
from trainer.generalization.spectrum import Spectrum

SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the rank that are kept."""


def rank_of(spectrum: Spectrum, share: float) -> int:
    """Return the rank that is kept: at least 1."""
    return max(1, round(share * len(spectrum.values)))


def truncated_losses(
    matrices: Mapping[str, Tensor],
    spectra: Mapping[str, Spectrum],
    loss: Callable[[], float],
    shares: Sequence[float] = SHARES,
) -> dict[str, list[float]]:
    """Return ``loss()`` with each of ``matrices`` at each share of its rank, the others whole.

    As ``all``, also with all of them at once. ``matrices`` are [n, d] each, changed in place and put back.
    """
    groups = {name: [name] for name in matrices} | {"all": list(matrices)}
    losses: dict[str, list[float]] = {}
    for group, names in groups.items():
        for share in shares:
            with restored([matrices[name] for name in names]), torch.no_grad():
                for name in names:
                    rank = rank_of(spectra[name], share)
                    if rank < len(spectra[name].values):
                        matrix = matrices[name]
                        matrix.copy_((matrix.double() @ spectra[name].projector(rank)).to(matrix.dtype))
                losses.setdefault(group, []).append(loss())
    return losses
