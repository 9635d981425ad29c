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

    ``parts``: feature -> a table row for each sample, or a list of them; other features are empty in every sample.
    """
    lengths = np.zeros((len(keys), num_samples), dtype=np.int64)
    values: list[npt.NDArray[np.integer]] = [np.empty(0, dtype=np.int64)]
    for number, key in enumerate(keys):
        part = parts.get(key.name)
        if part is not None:
            lengths[number] = part.lengths if isinstance(part, Jagged) else 1
            values.append(part.values if isinstance(part, Jagged) else part)
    flat = np.concatenate(values, dtype=np.int64)
    weights = torch.ones(len(flat)) if any(key.weighted for key in keys) else None
    return features_of([key.name for key in keys], flat, lengths, weights)


def features_of(
    names: Sequence[str], values: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64],
    weights: torch.Tensor | None = None,
) -> KeyedJaggedTensor:  # fmt: skip
    """Return ``values``, key by key and sample by sample, as features; ``lengths`` is [keys, samples]."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths.ravel(), out=offsets[1:])
    flat, ends = torch.from_numpy(lengths.ravel()), torch.from_numpy(offsets)
    return KeyedJaggedTensor(
        list(names), torch.from_numpy(values), weights, lengths=flat, offsets=ends, stride=lengths.shape[1]
    )
