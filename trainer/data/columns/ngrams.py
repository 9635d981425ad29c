"""Texts as lists of ids: their n-grams, hashed into buckets. Torch-free.

A text is cut to ``max_length`` characters, brought to Unicode's normal form NFKC and, with ``lowercase``, to lower
case. The words are the longest runs of letters, marks and digits. With h the hash of a string
(:func:`trainer.data.columns.hashing.id_keys`) and c the combination of words of 64 bits
(:func:`trainer.data.columns.hashing.combine`),

- the n-gram of the words w_1 ... w_n has the key h(w_1) for n = 1, else c(h(w_1), ..., h(w_n));
- the n-gram of the characters a_1 ... a_n, code points of ``<word>``, has the key c(n, a_1, ..., a_n);

and an n-gram of key k is the id floor(floor(k / 2^32) buckets / 2^32). An n-gram that occurs twice is in the list
twice. The list has the n-grams of words, shortest first, then those of characters, word by word. Like the hashes, these
ids never change between versions.

Bojanowski et al., Enriching Word Vectors with Subword Information, TACL 2017 (section 3.2); Weinberger et al., Feature
Hashing for Large Scale Multitask Learning, ICML 2009.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import values
from trainer.data.columns.hashing import Int64s, UInt64s, below, combine, id_keys
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.vocabulary import encoded
from trainer.data.errors import DataError
from trainer.spec.ngrams import NGrams

_BETWEEN_WORDS = r"[^\pL\pM\pN]+"


def require_text(type_: pa.DataType, where: str) -> None:
    """Check that a column can be read as texts.

    Raises:
        DataError: it holds something else.
    """
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_null(type_):
        return
    remedy = "use type: id_list" if values.is_list(type_) else "use type: id or dense, or write the column as text"
    raise DataError(f"holds {type_}, and a text is one string for each row", where=where, remedy=remedy)


def ngram_lists(array: pa.Array, ngrams: NGrams, where: str) -> tuple[pa.Array, Int64s]:
    """Return the ids of all n-grams, int64, and their number for each text; null and texts without words have none.

    Numbers, as read from a file in which every text is a number, are taken as text.

    Raises:
        DataError: a value is neither text nor a number, or is not UTF-8.
    """
    # A title occurs in many rows: its n-grams are hashed once.
    distinct, places = encoded(values.as_ids(array, "string", where))
    try:
        lists = _of_texts(distinct, ngrams).take(places)
    except pa.ArrowInvalid:
        remedy = "write the column as UTF-8, or leave the feature out"
        raise DataError("holds bytes that are no text (UTF-8)", where=where, remedy=remedy) from None
    return pa.array(lists.values), lists.lengths


def _of_texts(texts: pa.Array, ngrams: NGrams) -> Jagged:
    texts = pc.utf8_normalize(pc.utf8_slice_codeunits(texts, 0, ngrams.max_length), form="NFKC")
    split = pc.split_pattern_regex(pc.utf8_lower(texts) if ngrams.lowercase else texts, _BETWEEN_WORDS)
    words = pc.list_flatten(split)
    is_word = pc.not_equal(words, "")
    owners = pc.list_parent_indices(split).filter(is_word).to_numpy(zero_copy_only=False).astype(np.int64)
    vocabulary, places = encoded(words.filter(is_word).cast(pa.large_string()))
    keys: list[UInt64s] = []
    of: list[Int64s] = []
    if ngrams.words is not None:
        hashes = id_keys(vocabulary)[places]
        for length in range(ngrams.words[0], ngrams.words[1] + 1):
            starts = _starts(owners, length)
            parts = [hashes[starts + number] for number in range(length)]
            keys.append(parts[0] if length == 1 else combine(*parts))
            of.append(owners[starts])
    if ngrams.characters is not None:
        of_words = _of_characters(vocabulary, ngrams.characters).take(places)
        keys.append(of_words.values)
        of.append(np.repeat(owners, of_words.lengths))
    every = np.concatenate(of)
    order = np.argsort(every, kind="stable")
    ids = below(np.concatenate(keys)[order], ngrams.buckets)
    return Jagged(ids, np.append(0, np.cumsum(np.bincount(every, minlength=len(texts)))))


def _of_characters(words: pa.Array, bounds: tuple[int, int]) -> Jagged:
    """Return the keys of each word's character n-grams, shortest first."""
    marked = [f"<{word}>" for word in words.to_pylist()]
    lengths = np.fromiter(map(len, marked), dtype=np.int64, count=len(marked))
    points = np.frombuffer("".join(marked).encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    owners = np.repeat(np.arange(len(words)), lengths)
    keys, of = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    for length in range(bounds[0], bounds[1] + 1):
        starts = _starts(owners, length)
        keys.append(combine(np.full(len(starts), length, np.uint64), *(points[starts + i] for i in range(length))))
        of.append(owners[starts])
    every = np.concatenate(of)
    order = np.argsort(every, kind="stable")
    return Jagged(np.concatenate(keys)[order], np.append(0, np.cumsum(np.bincount(every, minlength=len(words)))))


def _starts(owners: Int64s, length: int) -> Int64s:
    """Return the start of each run of ``length`` consecutive entries with the same owner."""
    last = np.arange(length - 1, len(owners))
    return np.flatnonzero(owners[last] == owners[last - (length - 1)])
