"""The pinned generator: the module's recipe followed in plain Python gives the same bits; draws are as it says."""

from __future__ import annotations

import hashlib
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.rff import RandomFourierFeatures
from embeddings.rff.frequencies import FREQUENCIES, draw_frequencies, normals


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 word by word, as published (Salmon et al. 2011)."""
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def plain_polynomial(coefficients: list[float], x: float) -> float:
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def plain_logarithm(a: float) -> float:
    fraction, exponent = math.frexp(a)
    if fraction < 0.7071067811865476:
        fraction, exponent = 2 * fraction, exponent - 1
    s = (fraction - 1) / (fraction + 1)
    return exponent * 0.6931471805599453 + 2 * s * plain_polynomial([1 / (2 * k + 1) for k in range(12)], s * s)


def plain_turn(b: float) -> tuple[float, float]:
    quarter = math.floor(4 * b + 0.5)
    x = (4 * b - quarter) * 1.5707963267948966
    c = plain_polynomial([(-1) ** k / math.factorial(2 * k) for k in range(10)], x * x)
    s = x * plain_polynomial([(-1) ** k / math.factorial(2 * k + 1) for k in range(10)], x * x)
    return [(c, s), (-s, c), (-c, -s), (s, -c)][quarter % 4]


def plain_normals(seed: int, stream: int, count: int) -> list[float]:
    drawn: list[float] = []
    for j in range((count + 1) // 2):
        w = plain_philox([j, 0, stream, 0], [seed, zlib.crc32(b"evenkeel.rff")])
        a = (((w[0] << 32 | w[1]) >> 11) + 0.5) / 2**53
        b = (((w[2] << 32 | w[3]) >> 11) + 0.5) / 2**53
        radius = math.sqrt(-2 * plain_logarithm(a))
        cosine, sine = plain_turn(b)
        drawn += [radius * cosine, radius * sine]
    return drawn[:count]


def plain_sum(values: list[float]) -> float:
    width = 1
    while width < len(values):
        width *= 2
    values = values + [0.0] * (width - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [values[k] + values[half + k] for k in range(half)]
    return values[0]


def plain_frequencies(dim_in: int, num_frequencies: int, sigma: float, seed: int, kind: str) -> bytes:
    """U as little-endian float32, row by row."""
    if kind == "structured":
        rows = plain_structured(dim_in, num_frequencies, seed)
        return b"".join(struct.pack("<f", sigma * x) for row in rows for x in row)
    num_rows = num_frequencies if kind == "gaussian" else -(-num_frequencies // dim_in) * dim_in
    flat, lengths = (plain_normals(seed, stream, num_rows * dim_in) for stream in (0, 1))
    rows = [flat[k * dim_in : (k + 1) * dim_in] for k in range(num_rows)]
    if kind == "orthogonal":
        for block in range(0, num_rows, dim_in):
            for i in range(block, block + dim_in):
                norm = math.sqrt(plain_sum([x * x for x in rows[i]]))
                rows[i] = [x / norm for x in rows[i]]
                for j in range(i + 1, block + dim_in):
                    share = plain_sum([x * y for x, y in zip(rows[j], rows[i], strict=True)])
                    rows[j] = [x - share * y for x, y in zip(rows[j], rows[i], strict=True)]
        for i in range(num_rows):
            of_length = lengths[i * dim_in : (i + 1) * dim_in]
            length = math.sqrt(plain_sum([x * x for x in of_length]))
            rows[i] = [x * length for x in rows[i]]
    return b"".join(struct.pack("<f", sigma * x) for row in rows[:num_frequencies] for x in row)


def plain_structured(dim_in: int, num_frequencies: int, seed: int) -> list[list[float]]:
    """Entry by entry: the sum over all ways through the three matrices of signs."""
    size, rows = 1, []
    while size < dim_in:
        size *= 2

    def sign(i: int, j: int) -> int:
        return -1 if (i & j).bit_count() % 2 else 1

    for number in range(num_frequencies):
        block, i = divmod(number, size)
        first, second, third = (
            [-1 if plain_philox((j, factor, 2, block), (seed, zlib.crc32(b"evenkeel.rff")))[0] >> 31 else 1
             for j in range(size)]
            for factor in range(3)
        )  # fmt: skip
        through = [sum(sign(i, a) * first[a] * sign(a, b) for a in range(size)) for b in range(size)]
        rows.append([
            sum(through[b] * second[b] * sign(b, j) for b in range(size)) * third[j] / size for j in range(dim_in)
        ])  # fmt: skip
    return rows


@given(seed=st.integers(0, 2**32 - 1), stream=st.integers(0, 3), count=st.integers(0, 40))
def test_normals_are_those_of_the_recipe_to_the_last_bit(seed: int, stream: int, count: int) -> None:
    assert normals(seed, stream, count).tolist() == plain_normals(seed, stream, count)


@pytest.mark.parametrize("kind", FREQUENCIES)
@pytest.mark.parametrize(
    ("dim_in", "num_frequencies", "sigma", "seed"),
    [(1, 3, 1.0, 0), (4, 4, 0.4, 0), (5, 13, 0.7, 2**32 - 1), (16, 16, 0.4, 8), (24, 30, 2.5, 1)],
)
def test_frequencies_are_those_of_the_recipe_to_the_last_bit(
    dim_in: int, num_frequencies: int, sigma: float, seed: int, kind: str
) -> None:
    drawn = draw_frequencies(dim_in, 2 * num_frequencies, sigma, seed, kind)
    assert drawn.dtype == np.float32
    assert drawn.astype("<f4").tobytes() == plain_frequencies(dim_in, num_frequencies, sigma, seed, kind)


@pytest.mark.parametrize(
    ("arguments", "sha256"),
    [
        ((4, 8), "b98ece7883bb1569d3d45b8b2f00652db3712217991668d1295e3e5b540e2e10"),
        ((4, 8, 1.0, 7, "gaussian"), "51dcf9426bf95b09294a77f344055254999b12e1a2ebad8e55d92db218e39a9f"),
        ((64, 128), "61fb2a32220423b4f5b21ddbcc838c68b0c7bb7713c0659e79166f25edfff139"),
    ],
)
def test_published_bits(arguments: tuple, sha256: str) -> None:
    """Known answers: a change of the generator breaks every consumer's features."""
    features = RandomFourierFeatures(*arguments)
    assert features.sha256 == hashlib.sha256(features.frequencies.astype("<f4").tobytes()).hexdigest()
    assert features.sha256 == sha256


def test_normals_are_box_mullers() -> None:
    """The polynomials against the library's functions, on words that reach every quarter and both ends."""
    drawn = normals(3, 0, 20_000)
    from embeddings.tables.philox import philox4x32

    words = philox4x32((np.arange(10_000), 0, 0, 0), (3, zlib.crc32(b"evenkeel.rff")))
    a, b = (
        (((high << np.uint64(32) | low) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        for high, low in (words[:2], words[2:])
    )
    radius = np.sqrt(-2 * np.log(a))
    expected = np.stack([radius * np.cos(2 * np.pi * b), radius * np.sin(2 * np.pi * b)], axis=1).reshape(-1)
    # A few roundings of float64.
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=5e-15)


def test_normals_are_normal() -> None:
    drawn = normals(5, 0, 400_000)
    # Standard errors: 1/sqrt(n) of the mean, sqrt(2/n) of the variance, sqrt(96/n) of the fourth moment.
    assert abs(drawn.mean()) < 5 / math.sqrt(len(drawn))
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / len(drawn))
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / len(drawn))


@pytest.mark.parametrize(("dim_in", "num_frequencies"), [(5, 5), (5, 10), (5, 13), (1, 3), (200, 200)])
def test_orthogonal_blocks(dim_in: int, num_frequencies: int) -> None:
    u = draw_frequencies(dim_in, 2 * num_frequencies, 1.0, 9).astype(np.float64)
    assert u.shape == (num_frequencies, dim_in)
    for start in range(0, num_frequencies, dim_in):
        block = u[start : start + dim_in]
        directions = block / np.linalg.norm(block, axis=1, keepdims=True)
        np.testing.assert_allclose(directions @ directions.T, np.eye(len(block)), atol=1e-6)


def test_orthogonal_lengths_are_chi() -> None:
    u = draw_frequencies(16, 2 * 16 * 400, 1.0, 0).astype(np.float64)
    squared = np.sum(u**2, axis=1)
    # Chi-squared with 16 degrees: mean 16, variance 32; 6400 draws.
    assert abs(squared.mean() - 16) < 5 * math.sqrt(32 / 6400)
    assert abs(squared.var() - 32) < 4


@pytest.mark.parametrize("kind", FREQUENCIES)
def test_a_smaller_view_is_the_beginning_of_a_larger_one(kind: str) -> None:
    larger = draw_frequencies(6, 50, 0.4, 3, kind)
    np.testing.assert_array_equal(draw_frequencies(6, 16, 0.4, 3, kind), larger[:8])
