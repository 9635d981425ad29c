"""N-grams of texts against plain Python: which there are, in which order, and the bits of their ids."""

from __future__ import annotations

import itertools
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.ngrams import ngram_lists, require_text
from trainer.data.errors import DataError
from trainer.spec.ngrams import NGrams

MASK = 2**64 - 1
GOLDEN, MULTIPLIER = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def combine(*keys: int) -> int:
    state = 0
    for key in keys:
        state = mix(((state ^ key) + GOLDEN) & MASK)
    return state


def hash_of(word: str) -> int:
    text = word.encode()
    total = sum((byte + 1) * pow(MULTIPLIER, place + 1, 2**64) for place, byte in enumerate(text)) & MASK
    return combine(total, len(text))


def words_of(text: str, ngrams: NGrams) -> list[str]:
    text = unicodedata.normalize("NFKC", text[: ngrams.max_length])
    text = text.lower() if ngrams.lowercase else text
    runs = itertools.groupby(text, lambda letter: unicodedata.category(letter)[0] in "LMN")
    return ["".join(run) for is_word, run in runs if is_word]


def windows(values, bounds):
    """All runs of ``values`` of these lengths, shortest first."""
    for length in range(bounds[0], bounds[1] + 1):
        yield from (values[start : start + length] for start in range(len(values) - length + 1))


def reference(text: str | None, ngrams: NGrams) -> list[int]:
    words = [] if text is None else words_of(text, ngrams)
    keys = []
    if ngrams.words is not None:
        runs = windows(words, ngrams.words)
        keys += [hash_of(run[0]) if len(run) == 1 else combine(*map(hash_of, run)) for run in runs]
    if ngrams.characters is not None:
        for word in words:
            keys += [combine(len(run), *map(ord, run)) for run in windows(f"<{word}>", ngrams.characters)]
    return [(key >> 32) * ngrams.buckets >> 32 for key in keys]


def lists_of(texts: list[str | None], ngrams: NGrams) -> list[list[int]]:
    ids, lengths = ngram_lists(pa.array(texts, pa.string()), ngrams, "here")
    assert ids.type == pa.int64()
    ends = np.cumsum(lengths)
    return [ids[int(end - length) : int(end)].to_pylist() for end, length in zip(ends, lengths, strict=True)]


# Letters that Python and Arrow bring to lower case alike, whatever versions of Unicode they have.
ALPHABET = "abcXYZ019 -_.éÉßЖж東京ＡｂｃĳＩ\u0301\t"
BOUNDS = st.none() | st.tuples(st.integers(1, 4), st.integers(0, 2)).map(lambda pair: (pair[0], sum(pair)))
SETTINGS = st.fixed_dictionaries(
    {
        "words": BOUNDS,
        "characters": BOUNDS,
        "buckets": st.sampled_from([1, 7, 1000, 2**31 - 3]),
        "lowercase": st.booleans(),
        "max_length": st.integers(1, 30),
    }
).filter(lambda one: one["words"] is not None or one["characters"] is not None)


@given(st.lists(st.none() | st.text(ALPHABET, max_size=30), max_size=6), SETTINGS)
def test_lists_are_those_of_plain_python(texts, settings):
    ngrams = NGrams(**settings)
    assert lists_of(texts, ngrams) == [reference(text, ngrams) for text in texts]


def test_the_bits_of_ids_never_change():
    """Trained tables are of these ids: a change of them changes what a row stands for."""
    title = ["Toy Story (1995)"]
    assert lists_of(title, NGrams()) == [[20220, 54767, 8958]]
    assert lists_of(title, NGrams(words=(1, 2))) == [[20220, 54767, 8958, 49357, 29203]]
    assert lists_of(["Toy"], NGrams(words=None, characters=(3, 5))) == [[50511, 12028, 27866, 57028, 45014, 31503]]


def test_what_a_text_is_read_as():
    words = NGrams(buckets=2**31 - 3)
    same = lists_of(["Star  Wars!", "star wars", "ｓｔａｒ—ＷＡＲＳ", "STAR_WARS"], words)
    assert same == [same[0]] * 4
    assert len(same[0]) == 2
    assert lists_of(["Star", "star"], NGrams(lowercase=False))[0] != lists_of(["star"], NGrams())[0]
    # Composed or not, an accent is one letter's.
    assert lists_of(["caf\u00e9"], words) == lists_of(["cafe\u0301"], words) != lists_of(["cafe"], words)
    assert lists_of([None, "", " -- "], words) == [[], [], []]
    assert lists_of(["ab ab"], words)[0][0] == lists_of(["ab ab"], words)[0][1]
    assert lists_of(["abcdef ghi"], NGrams(max_length=3)) == lists_of(["abc"], NGrams())
    # A run of words is another n-gram than one word of the same letters, and than the other order.
    pair = NGrams(words=(2, 2), buckets=2**31 - 3)
    assert lists_of(["new york"], pair) != lists_of(["york new"], pair)


def test_large_texts_slices_and_numbers_are_read_alike():
    texts = pa.array(["a b", None, "c", "a b"])
    expected = ngram_lists(texts, NGrams(), "here")
    for other in (texts.cast(pa.large_string()), pa.concat_arrays([texts, texts]).slice(4)):
        found = ngram_lists(other, NGrams(), "here")
        assert found[0].equals(expected[0])
        assert np.array_equal(found[1], expected[1])
    # A file in which every title is a year has numbers.
    assert ngram_lists(pa.array([1984, None]), NGrams(), "here")[0].to_pylist() == lists_of(["1984"], NGrams())[0]


@pytest.mark.parametrize(
    ("type_", "remedy"),
    [
        (pa.int64(), "use type: id or dense"),
        (pa.list_(pa.string()), "use type: id_list"),
        (pa.binary(), "use type: id"),
    ],
)
def test_a_column_of_something_else_is_refused(type_, remedy):
    with pytest.raises(DataError, match=remedy):
        require_text(type_, "rows, column 'title'")
    require_text(pa.large_string(), "rows")


def test_bytes_that_are_no_text_are_refused():
    offsets, bytes_ = np.array([0, 2], dtype=np.int64), pa.py_buffer(b"\xff\xfe")
    broken = pa.Array.from_buffers(pa.large_string(), 1, [None, pa.py_buffer(offsets), bytes_])
    with pytest.raises(DataError, match=r"rows.parquet, row 3: holds bytes that are no text \(UTF-8\)"):
        ngram_lists(broken, NGrams(), "rows.parquet, row 3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"words": None}, "neither words nor characters"),
        ({"words": (2, 1)}, r"words: \[2, 1\] has the longest first: write \[1, 2\]"),
        ({"characters": (5, 3)}, r"characters: \[5, 3\]"),
        ({"buckets": 0}, "greater than or equal to 1"),
        ({"words": (0, 1)}, "greater than or equal to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NGrams(**settings)
