"""How far the similarities that an RFF view serves changed."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio
from embeddings.refresh.gate_checks.cosines import cosines_of
from embeddings.vectors.item_vectors import Array

_PURPOSE = 2  # of the draws for all shared items


class KernelChange(GateCheck):
    """``kernel_rms``: root mean square change of exp(-sigma^2 |d|^2 / 2) over random pairs, in units of its spread.

    The pairs are of evident items; ``kernel_rms_all`` is that of all shared ones, without a limit. A rotation changes
    neither.
    """

    about = "vectors"
    limits = (
        Limit(
            "kernel_rms",
            0.6,
            "similarities changed: check that ids and rows belong together, and the data",
            at_most=True,
            calibrated=Calibrated(1.2, 0.01),
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        metrics = {"kernel_rms": _change(comparison, comparison.evident, comparison.generator)}
        if not comparison.all_evident:
            metrics["kernel_rms_all"] = _change(comparison, comparison.shared, comparison.generator_of(_PURPOSE))
        return metrics


def _change(comparison: Comparison, rows: tuple[Array, Array], generator: np.random.Generator) -> float:
    (old, new), sampling = rows, comparison.sampling
    if len(old) < 2:
        return float("nan")
    first = generator.integers(len(old), size=sampling.num_pairs)
    second = (first + generator.integers(1, len(old), size=sampling.num_pairs)) % len(old)
    kernels = []
    for vectors, picked in ((comparison.served.vectors, old), (comparison.candidate.vectors, new)):
        cosines = cosines_of(vectors, vectors, picked[first], picked[second])
        kernels.append(np.exp(-(sampling.sigma**2) * (1.0 - cosines)))
    return ratio(np.sqrt(np.mean((kernels[1] - kernels[0]) ** 2)), kernels[0].std())
