"""How far the similarities that an RFF view serves changed."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio
from embeddings.refresh.gate_checks.cosines import cosines_of


class KernelChange(GateCheck):
    """``kernel_rms``: root mean square change of exp(-sigma^2 |d|^2 / 2) over random pairs, in units of its spread.

    A rotation does not change it.
    """

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
        (old, new), generator, sampling = comparison.shared, comparison.generator, comparison.sampling
        if len(old) < 2:
            return {"kernel_rms": float("nan")}
        first = generator.integers(len(old), size=sampling.num_pairs)
        second = (first + generator.integers(1, len(old), size=sampling.num_pairs)) % len(old)
        kernels = []
        for vectors, rows in ((comparison.served.vectors, old), (comparison.candidate.vectors, new)):
            cosines = cosines_of(vectors, vectors, rows[first], rows[second])
            kernels.append(np.exp(-(sampling.sigma**2) * (1.0 - cosines)))
        return {"kernel_rms": ratio(np.sqrt(np.mean((kernels[1] - kernels[0]) ** 2)), kernels[0].std())}
