"""Construction of a model's input features from table rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

from trainer.data.batches.keys import Key
from trainer.data.columns.jagged import Jagged


def bags_of(
    keys: Sequence[Key], parts: Mapping[str, npt.NDArray[np.integer] | Jagged], num_samples: int
) -> KeyedJaggedTensor:
    """Return the features of samples as a KeyedJaggedTensor.

    Args:
        keys: the keys of the features.
        parts: feature -> a table row for each sample or a list of them; other features are empty in every sample.
        num_samples: number of samples.
    """
    lengths = np.zeros((len(keys), num_samples), dtype=np.int64)
    values: list[npt.NDArray[np.integer]] = [np.empty(0, dtype=np.int64)]
    for number, key in enumerate(keys):
        part = parts.get(key.name)
        if part is not None:
            lengths[number] = part.lengths if isinstance(part, Jagged) else 1
            values.append(part.values if isinstance(part, Jagged) else part)
    flat = np.concatenate(values, dtype=np.int64)
    return KeyedJaggedTensor(
        keys=[key.name for key in keys],
        values=torch.from_numpy(flat),
        weights=torch.ones(len(flat)) if any(key.weighted for key in keys) else None,
        lengths=torch.from_numpy(lengths.ravel()),
        offsets=torch.from_numpy(np.append(0, np.cumsum(lengths.ravel()))),
        stride=num_samples,
    )
