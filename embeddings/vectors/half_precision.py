"""Half-precision rows, widened faster than NumPy does it."""

from __future__ import annotations

import numpy as np

from embeddings.vectors.lazy_rows import Array

_SIGN_EXPONENT_MANTISSA = np.int32(np.uint32(0x8FFFE000).astype(np.int32))
_BIAS = np.float32(2.0**112)


def as_float32(values: Array) -> Array:
    """Return finite ``values`` in float32, exactly.

    The bits of a float16 are sign-extended to 32 bits and shifted left by 13, so that sign, exponent and mantissa are
    at their positions in float32. Read as float32 this is the value divided by 2**112, since the exponents' biases
    differ by 112; that holds for denormal values too. NumPy's own conversion takes two to three times as long.
    """
    if values.dtype != np.float16:
        return values.astype(np.float32, copy=False)
    bits = values.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _SIGN_EXPONENT_MANTISSA
    widened = bits.view(np.float32)
    widened *= _BIAS
    return widened
