"""Stable 64-bit hashes of raw ids, and random words as a function of a counter. numpy only, torch-free.

Everything random in the data layer is ``splitmix64`` of (key, index): the same on every machine and for every chunking
and world size, and computed at any position without earlier positions. The bits never change between versions: splits,
orders, negatives and hash initial values depend on them.

splitmix64 is Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
its published C code: word i of the stream that starts at ``key`` is ``mix(key + (i + 1) * GOLDEN)``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_UNMIX_1 = pow(0xBF58476D1CE4E5B9, -1, 2**64)
_UNMIX_2 = pow(0x94D049BB133111EB, -1, 2**64)
_STRING_MULTIPLIER = 0xD1342543DE82EF95  # odd, so that multiplication is a bijection of the 64-bit words


def mix(words: UInt64s) -> UInt64s:
    """Apply splitmix64's finalizer, a bijection of the 64-bit words."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def unmix(words: UInt64s) -> UInt64s:
    """Invert :func:`mix`."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))) * np.uint64(_UNMIX_2)
        words = (words ^ (words >> np.uint64(27)) ^ (words >> np.uint64(54))) * np.uint64(_UNMIX_1)
        return words ^ (words >> np.uint64(30)) ^ (words >> np.uint64(60))


def derive_key(*parts: int) -> int:
    """Derive one 64-bit key from several non-negative integers; their order matters."""
    key = len(parts)
    for part in parts:
        key = int(mix(np.array([((key ^ (part & _MASK)) + GOLDEN) & _MASK], dtype=np.uint64))[0])
    return key


def random_words(key: int, index: npt.NDArray[np.integer]) -> UInt64s:
    """Return uint64 word number ``index`` of the stream ``key``: distinct indices give distinct words."""
    with np.errstate(over="ignore"):
        return mix(np.uint64(key & _MASK) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))


def below(words: UInt64s, bound: int | Int64s) -> Int64s:
    """Return uniform integers in [0, bound), bound < 2^32, by multiply and shift: relative bias under bound / 2^32."""
    with np.errstate(over="ignore"):
        product = (words >> np.uint64(32)) * np.asarray(bound).astype(np.uint64)
    return (product >> np.uint64(32)).astype(np.int64)


def unit_interval(words: UInt64s) -> npt.NDArray[np.float64]:
    """Return uniform float64 in [0, 1), 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def combine(*keys: UInt64s) -> UInt64s:
    """Combine several hashes per position into a single hash; their order matters."""
    state = np.zeros(np.broadcast_shapes(*(key.shape for key in keys)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = mix((state ^ key) + np.uint64(GOLDEN))
    return state


def id_keys(ids: pa.Array) -> UInt64s:
    """Return a stable uint64 per raw id, the same in every run and table: the seed of its hash initial value.

    Integers: mix of the two's complement int64. Strings: the wrapping sum over bytes of (byte + 1) * M^(position + 1),
    mixed with the length; an integer and its decimal string differ. ``ids`` is int64 or large_string without nulls.
    """
    if pa.types.is_int64(ids.type):
        return mix(ids.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64))
    strings = ids.cast(pa.large_binary())
    if len(strings) == 0:
        return np.empty(0, dtype=np.uint64)
    _, offset_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[strings.offset : strings.offset + len(strings) + 1]
    start, stop = int(offsets[0]), int(offsets[-1])
    lengths = np.diff(offsets)
    sums = np.zeros(len(strings), dtype=np.uint64)
    if stop > start:
        data = np.frombuffer(data_buffer, dtype=np.uint8)[start:stop].astype(np.uint64)
        position = np.arange(stop - start) - np.repeat(offsets[:-1] - start, lengths)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(int(lengths.max()), _STRING_MULTIPLIER, dtype=np.uint64))
            terms = (data + np.uint64(1)) * powers[position]
            filled = lengths > 0
            sums[filled] = np.add.reduceat(terms, (offsets[:-1] - start)[filled])
    return combine(sums, lengths.astype(np.uint64))
