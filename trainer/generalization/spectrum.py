"""Spectra of weight matrices and tables: stable rank, and the loss of a model whose matrices are cut to lower rank.

Mądry's lecture, sections 7 and 7.2, figure 6; Arora et al. 2018. Compression is by truncated SVD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.generalization.parameters import restored

CHUNK_ROWS = 1 << 18
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the rank that are kept."""


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a matrix [n, d].

    ``values``: singular values [min(n, d)], descending. ``right``: right singular vectors as columns, [d, min(n, d)].
    """

    values: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]

    @property
    def stable_rank(self) -> float:
        """|M|_F^2 / |M|_2^2, at most the rank. NaN for a matrix of zeros.

        Mądry's lecture prints the ratio without the squares; its source, and the bound of :meth:`num_above`, use the
        squares.
        """
        top = self.values[0] ** 2
        return float(np.square(self.values).sum() / top) if top > 0 else float("nan")

    def num_above(self, t: float) -> int:
        """Return the number of singular values above t |M|_2: at most stable rank / t^2 (section 7)."""
        return int((self.values > t * self.values[0]).sum())

    def error(self, rank: int) -> float:
        """Return |M - M_r|_F / |M|_F of the best M_r of this rank, 0 for a matrix of zeros."""
        squares = np.square(self.values)
        whole = float(squares.sum())
        return float(np.sqrt(squares[rank:].sum() / whole)) if whole > 0 else 0.0

    def projector(self, rank: int) -> Tensor:
        """Return the projector P [d, d], float64, for which M P is the best approximation of this rank."""
        leading = torch.from_numpy(self.right[:, :rank])
        return leading @ leading.T


def spectrum(matrix: Tensor) -> Spectrum:
    """Return the spectrum of a matrix [n, d].

    A tall one goes through the eigenvectors of M^T M in float64, a chunk of rows at a time: singular values below 1e-8
    of the largest are then rounding.
    """
    rows, columns = matrix.shape
    if rows <= 4 * columns:
        _, values, right = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
        return Spectrum(values.numpy(), right.T.contiguous().numpy())
    gram = torch.zeros(columns, columns, dtype=torch.float64)
    for start in range(0, rows, CHUNK_ROWS):
        part = matrix[start : start + CHUNK_ROWS].detach().double()
        gram += part.T @ part
    squares, right = torch.linalg.eigh(gram)
    return Spectrum(squares.clamp_min(0.0).sqrt().flip(0).numpy(), right.flip(1).contiguous().numpy())


def rank_of(spectrum: Spectrum, share: float) -> int:
    """Return the rank that is ``share`` of the full rank, rounded, at least 1."""
    return max(1, round(share * len(spectrum.values)))


def truncated_losses(
    matrices: Mapping[str, Tensor],
    spectra: Mapping[str, Spectrum],
    loss: Callable[[], float],
    shares: Sequence[float] = SHARES,
) -> dict[str, list[float]]:
    """Return {matrix: ``loss()`` with this matrix cut to each share of its rank and all others whole}.

    The entry ``all`` has the losses with all matrices cut. ``matrices`` [n, d] are changed in place and restored.
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
