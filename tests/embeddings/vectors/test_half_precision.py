"""Half-precision rows are widened to the bits that NumPy gives."""

import numpy as np

from embeddings.vectors.half_precision import as_float32


def test_every_half_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    expected = halves.astype(np.float32)
    for given in (halves, halves.reshape(2, -1), halves[::3]):
        wide = as_float32(given)
        assert (wide.dtype, wide.shape) == (np.float32, given.shape)
    np.testing.assert_array_equal(as_float32(halves).view(np.uint32), expected.view(np.uint32))  # -0.0 is not 0.0
