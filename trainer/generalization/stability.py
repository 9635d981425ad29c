"""Uniform stability, measured on two trainings.

Bousquet and Elisseeff 2002; Hardt et al. 2015; Mądry's lecture, section 8.

An algorithm is uniformly stable with epsilon if sup_z |loss(A(S), z) - loss(A(S'), z)| <= epsilon for every S, S' that
differ in one example. Of one pair S, S' and the z of a held-out split this gives a lower bound of epsilon. Draws and
order are the same for both, so equal data give equal models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Distance:
    """Distances between two trained models.

    ``epsilon``: the largest difference of the loss of one example; ``mean``: the mean one (both absolute); ``risk``:
    difference of the mean losses, which the mean bounds; ``parameters``: |a - b| / |a|.
    """

    epsilon: float
    mean: float
    risk: float
    parameters: dict[str, float]


def distance(
    losses: Floats, other_losses: Floats, parameters: dict[str, Floats], other_parameters: dict[str, Floats]
) -> Distance:
    """Return the distances of models A(S) and A(S').

    Losses are [n], of the same held-out examples; parameters are by name.
    """
    apart = np.abs(losses.astype(np.float64) - other_losses)
    return Distance(
        float(apart.max()),
        float(apart.mean()),
        float(losses.mean(dtype=np.float64) - other_losses.mean(dtype=np.float64)),
        {
            name: float(np.linalg.norm(values.astype(np.float64) - other_parameters[name]) / np.linalg.norm(values))
            for name, values in parameters.items()
        },
    )
