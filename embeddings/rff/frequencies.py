"""The frequencies U of random Fourier features, from a generator that is specified to the last bit.

The same seed gives other numbers in other builds of a library, because logarithm, cosine and QR round differently. So
this module uses only operations that IEEE 754 fixes, on float64, each rounded separately: + - * /, square root, floor,
and the split into fraction and exponent. Any machine and language that follows the recipe gets the same U and so the
same sha256; tests/embeddings/rff/test_frequencies.py follows it in plain Python.

**Normals.** ``normals(seed, stream, n)``: Philox4x32-10 with key (seed, crc32("evenkeel.rff")) and counter (j, 0,
stream, 0) gives words w0 .. w3. With a = (((w0 * 2^32 + w1) >> 11) + 0.5) / 2^53 and b likewise from w2, w3, normals
2j and 2j+1 are r cos(2 pi b) and r sin(2 pi b), where r = sqrt(-2 ln a) (Box and Muller 1958), and

- ln a: a = f 2^e with f in [T, 2T), T = float64(sqrt(1/2)) = 0.7071067811865476; s = (f - 1) / (f + 1), z = s s; p is
  the polynomial in z with coefficients 1 / (2k + 1), k = 0 .. 11, by Horner from the highest; ln a = e L + 2 s p, L =
  float64(ln 2) = 0.6931471805599453;
- cos and sin: q = floor(4 b + 0.5), x = (4 b - q) H, H = float64(pi / 2) = 1.5707963267948966, y = x x; sin x = x
  times the polynomial in y with coefficients (-1)^k / (2k + 1)!, cos x the polynomial with (-1)^k / (2k)!, k = 0 .. 9,
  by Horner; (cos, sin) of 2 pi b are (c, s), (-s, c), (-c, -s), (s, -c) for q mod 4 = 0, 1, 2, 3.

**Sums** over coordinates are trees: pad with zeros to the next power of two; add the second half to the first, until
one number is left.

**Gaussian**: G of m rows is the normals of stream 0, row by row. **Orthogonal** (Yu et al. 2016): blocks of d rows,
each orthogonalised by modified Gram-Schmidt (for i = 0 .. d-1: row i divided by the root of its sum of squares; then
(sum of row_j * row_i) * row_i is subtracted from every later row j); row i of a block is then multiplied by the root of
the sum of squares of the same row of stream 1, which makes lengths those of independent normal vectors (chi). The last
block is cut.

**Structured** (Yu et al. 2016, section 4): blocks of D rows, D the power of two that is not below d: S D1 S D2 S D3 / D
without the columns from d on, with S the D x D matrix of signs (-1)^popcount(i and j) and Dk a diagonal of signs, of
which entry i in block b is -1 where the highest bit of w0 of counter (i, k - 1, 2, b) is set. All values are
integers until the division, which is exact; zeros are +0. The last block is cut.

U = float32(sigma * these rows). The first m rows do not depend on how many follow.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from embeddings.tables.philox import philox4x32
from embeddings.vectors.item_vectors import Array

FREQUENCIES = ("orthogonal", "gaussian", "structured")
MIN_SIGMA, MAX_SIGMA = 1e-6, 1e6
"""Outside these bounds the kernel of all pairs is 1, or 0, in float32; far outside, frequencies are 0 or infinite."""

_KEY = zlib.crc32(b"evenkeel.rff")
_SQRT_HALF = 0.7071067811865476
_LN2 = 0.6931471805599453
_HALF_PI = 1.5707963267948966
_LN = [1.0 / (2 * k + 1) for k in range(12)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(10)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(10)]


def draw_frequencies(dim_in: int, dim: int, sigma: float, seed: int = 0, kind: str = "orthogonal") -> Array:
    """Draw U, float32 [dim / 2, dim_in], by the recipe of this module.

    Args:
        dim_in: coordinates of the vectors.
        dim: output coordinates, even.
        sigma: standard deviation of the frequencies, MIN_SIGMA to MAX_SIGMA.
        seed: uint32.
        kind: one of ``FREQUENCIES``.

    Raises:
        ValueError: an argument outside these bounds.
    """
    if dim_in < 1:
        raise ValueError(f"dim_in is {dim_in}, expected at least 1")
    if dim < 2 or dim % 2:
        raise ValueError(f"dim is {dim}: a cosine and a sine for each frequency make it even")
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"sigma is {sigma}, expected a positive number")
    if not MIN_SIGMA <= sigma <= MAX_SIGMA:
        raise ValueError(f"sigma is {sigma}, expected {MIN_SIGMA:g} to {MAX_SIGMA:g}: beyond, float32 has no angles")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, expected 0 <= seed < 2^32")
    if kind not in FREQUENCIES:
        raise ValueError(f"frequencies is '{kind}', expected one of {', '.join(FREQUENCIES)}")
    draw = {"orthogonal": _orthogonal, "gaussian": _gaussian, "structured": _structured}[kind]
    return (float(sigma) * draw(seed, dim // 2, dim_in)).astype(np.float32)


def normals(seed: int, stream: int, count: int) -> Array:
    """Return ``count`` standard normals, float64, by the recipe above."""
    num_pairs = (count + 1) // 2
    words = philox4x32((np.arange(num_pairs), 0, stream, 0), (seed, _KEY))
    a, b = (
        (((high << np.uint64(32) | low) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        for high, low in ((words[0], words[1]), (words[2], words[3]))
    )
    radius = np.sqrt(-2.0 * _logarithm(a))
    cosine, sine = _turn(b)
    return np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)[:count]


def _logarithm(a: Array) -> Array:
    fraction, exponent = np.frexp(a)
    low = fraction < _SQRT_HALF
    fraction = np.where(low, 2.0 * fraction, fraction)
    exponent = np.where(low, exponent - 1, exponent).astype(np.float64)
    s = (fraction - 1.0) / (fraction + 1.0)
    return exponent * _LN2 + 2.0 * s * _horner(_LN, s * s)


def _turn(b: Array) -> tuple[Array, Array]:
    """Return (cos, sin) of 2 pi b."""
    quarter = np.floor(4.0 * b + 0.5)
    x = (4.0 * b - quarter) * _HALF_PI
    y = x * x
    cosine, sine = _horner(_COS, y), x * _horner(_SIN, y)
    quadrant = quarter.astype(np.int64) % 4
    return np.choose(quadrant, (cosine, -sine, -cosine, sine)), np.choose(quadrant, (sine, cosine, -sine, -cosine))


def _horner(coefficients: list[float], x: Array) -> Array:
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        # Two statements, so that each operation is rounded, as the recipe says.
        value *= x
        value += coefficient
    return value


def _tree_sum(values: Array) -> Array:
    """Return sums over the last axis, kept with length 1, in the order that the recipe fixes; destroys ``values``."""
    length = values.shape[-1]
    width = 1 << max(length - 1, 0).bit_length()
    while width > 1:
        half = width // 2
        if length > half:
            values[..., : length - half] += values[..., half:length]
            length = half
        width = half
    return values[..., :1]


def _gaussian(seed: int, num_frequencies: int, dim_in: int) -> Array:
    return normals(seed, 0, num_frequencies * dim_in).reshape(num_frequencies, dim_in)


def _orthogonal(seed: int, num_frequencies: int, dim_in: int) -> Array:
    shape = (-(-num_frequencies // dim_in), dim_in, dim_in)
    rows = normals(seed, 0, math.prod(shape)).reshape(shape)
    of_lengths = normals(seed, 1, math.prod(shape)).reshape(shape)
    for i in range(dim_in):
        row = rows[:, i : i + 1]
        row /= np.sqrt(_tree_sum(row * row))
        later = rows[:, i + 1 :]
        later -= _tree_sum(later * row) * row
    rows *= np.sqrt(_tree_sum(of_lengths * of_lengths))
    return rows.reshape(-1, dim_in)[:num_frequencies]


def _structured(seed: int, num_frequencies: int, dim_in: int) -> Array:
    size = 1 << (dim_in - 1).bit_length()
    signs = np.ones((1, 1))
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    blocks = []
    for block in range(-(-num_frequencies // size)):
        product = signs
        for factor in range(3):
            (words, *_) = philox4x32((np.arange(size), factor, 2, block), (seed, _KEY))
            diagonal = 1.0 - 2.0 * (words >> np.uint64(31)).astype(np.float64)
            product = product * diagonal
            if factor < 2:
                product = product @ signs
        # Adding 0.0 turns -0.0 into +0.0, which the bytes of U need.
        blocks.append(product[:, :dim_in] / size + 0.0)
    return np.concatenate(blocks)[:num_frequencies]
