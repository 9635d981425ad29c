"""Strings and occurrences of the ids that have a row of the published table."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from embeddings.dynamic.id_map import DynamicIdMap
from embeddings.dynamic.settings import IdMapSettings
from trainer.data.columns.hashing import id_keys
from trainer.data.one_pass.rows import RawIds
from trainer.distributed.dynamic_tables import PublishedIds
from trainer.sizing.memory import PUBLISHED_ID_BYTES

WORDS = st.lists(st.text(max_size=3), min_size=1, max_size=8)


def strings_of(words):
    return pa.array(words, pa.large_string())


@given(parts=st.lists(WORDS, min_size=1, max_size=5))
def test_strings_come_back_from_their_hashes(parts):
    joined = RawIds.joined([RawIds.of(strings_of(sorted(set(words)))) for words in parts])
    everything = [word for words in parts for word in words]
    assert joined.of_keys(id_keys(strings_of(everything)).view(np.int64)) == everything
    assert sorted(joined.ids.to_pylist()) == sorted(set(everything))


@given(batches=st.lists(WORDS, min_size=1, max_size=30), capacity=st.integers(1, 12))
def test_they_follow_who_has_a_row(batches, capacity):
    """Counted by a dictionary: an id that lost its row begins anew when it is back."""
    ids = DynamicIdMap(IdMapSettings(capacity))
    published = PublishedIds("item", ids, has_strings=True)
    plain: Counter[str] = Counter()
    for step, words in enumerate(batches, start=1):
        given_ = ids.assign(id_keys(strings_of(words)).view(np.int64), step)
        published.note(given_, RawIds.of(strings_of(sorted(set(words)))))
        live = set(published.strings().to_pylist())
        gone = {word for word in words if word not in live} | (plain.keys() - live)
        new = {int(one) for one in given_.new_ids}
        for word in [*gone, *(one for one in live if int(id_keys(strings_of([one])).view(np.int64)[0]) in new)]:
            plain.pop(word, None)
        plain.update(word for word in words if word in live)
        counts = dict(zip(published.strings().to_pylist(), published._counts[ids.ids()[0]].tolist(), strict=True))
        assert counts == dict(plain)


def test_memory_is_what_is_predicted():
    capacity = 20_000
    words = [f"{number:050d}" for number in range(capacity)]
    raw, keys = RawIds.of(strings_of(words)), id_keys(strings_of(words)).view(np.int64)
    ids = DynamicIdMap(IdMapSettings(capacity))
    given_ = ids.assign(keys, 1)
    del words
    tracemalloc.start()
    try:
        published = PublishedIds("item", ids, has_strings=True)
        published.note(given_, raw)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 * PUBLISHED_ID_BYTES < held / capacity < 1.05 * PUBLISHED_ID_BYTES
    assert sys.getsizeof(published.strings()[0].as_py()) < PUBLISHED_ID_BYTES
