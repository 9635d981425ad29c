"""Dynamic ids: the compiled map against the plain one, who is let in, who goes, and what a saved map goes on with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.dynamic.id_map import DynamicIdMap
from embeddings.dynamic.settings import IdMapSettings
from tests.embeddings.dynamic.reference_ids import ReferenceIds

# Few ids, so that they repeat; the ends of the range and neighbours among them.
RAW = st.one_of(st.integers(0, 30), st.sampled_from([-(2**63), 2**63 - 1, -1, 2**32, 2**62]))
SETTINGS = st.builds(
    IdMapSettings,
    capacity=st.sampled_from([1, 2, 5, 9, 20, 200]),
    admission_threshold=st.sampled_from([1, 2, 3]),
    ttl_steps=st.sampled_from([None, 1, 3, 20, 40]),
    eviction_policy=st.sampled_from(["oldest", "refuse"]),
)
BATCHES = st.lists(st.tuples(st.integers(0, 9), st.lists(RAW, max_size=40)), min_size=1, max_size=12)


def array(ids):
    return np.array(ids, dtype=np.int64)


def check_whole(ids):
    """Every id that has an entry is found at it, and no two share one."""
    entries, raw = ids.ids()
    assert len(ids) == len(entries) == len(set(raw.tolist())) <= ids.settings.capacity
    assert np.array_equal(ids.find(raw), entries)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(settings=SETTINGS, batches=BATCHES)
def test_equals_the_plain_form(settings, batches):
    """Entries, who came, who went, in order; also where a second map goes on from the state of the first."""
    ids, plain, step = DynamicIdMap(settings), ReferenceIds(settings), 0
    for more_steps, raw in batches:
        step += more_steps
        twin = DynamicIdMap(settings)
        twin.load(ids.state())
        expected = plain.assign(raw, step)
        for one in (ids, twin):
            found = one.assign(array(raw), step)
            assert (found.entries.tolist(), found.new_ids.tolist(), found.gone_ids.tolist()) == expected
            # What was let in was not made to go within the call.
            assert np.array_equal(one.find(found.new_ids), found.new_entries)
        check_whole(ids)
        assert ids.num_refused == plain.refused
        everyone = [*range(32), -1, 2**62]
        assert ids.find(array(everyone)).tolist() == plain.find(everyone)


def test_large_maps_equal_the_plain_form():
    """Thousands of ids that come and go: the map is made larger, and long runs of places are shifted back."""
    settings = IdMapSettings(capacity=3000, admission_threshold=2, ttl_steps=16)
    ids, plain, generator = DynamicIdMap(settings), ReferenceIds(settings), np.random.default_rng(0)
    for step in range(1, 60):
        raw = generator.zipf(1.2, 900) + step * 7
        raw = np.where(generator.random(900) < 0.3, generator.integers(0, 6000, 900), raw)
        found = ids.assign(raw, step)
        assert (found.entries.tolist(), found.new_ids.tolist(), found.gone_ids.tolist()) == plain.assign(
            raw.tolist(), step
        )
    check_whole(ids)
    assert len(ids) > 2000


def test_ids_get_a_row_at_their_kth_occurrence_and_never_later():
    ids = DynamicIdMap(IdMapSettings(capacity=1000, admission_threshold=3))
    assert ids.assign(array([7, 7, 8]), 1).entries.tolist() == [-1, -1, -1]
    given = ids.assign(array([9, 7, 7, 8]), 2)
    assert given.entries.tolist() == [-1, 0, 0, -1]
    assert given.new_ids.tolist() == [7]
    # Whatever else is counted, nobody waits for longer.
    generator = np.random.default_rng(0)
    for step in range(3, 40):
        raw = generator.integers(100, 10_000, 20)
        before = {value: int((raw == value).sum()) for value in raw}
        found = ids.assign(raw, step)
        for value, entry in zip(raw, found.entries, strict=True):
            assert entry >= 0 or before[value] < 3


def test_few_are_let_in_too_early():
    """Of ids that occur once, beside as many that were counted before: their four counters are seldom all taken."""
    ids = DynamicIdMap(IdMapSettings(capacity=20_000, admission_threshold=2))
    raw = np.random.default_rng(0).integers(0, 2**60, 40_000)
    assert len(np.unique(raw)) == len(raw)
    given = ids.assign(raw, 1)
    assert (given.entries >= 0).mean() < 0.03


def test_what_was_seldom_is_forgotten():
    ids = DynamicIdMap(IdMapSettings(capacity=64, admission_threshold=2))
    ids.assign(array([5]), 1)
    ids.assign(np.arange(1000, 1000 + 3 * 64), 2)
    assert ids.assign(array([5]), 3).entries.tolist() == [-1]


def test_an_id_that_is_gone_for_too_long_loses_its_entry_and_others_keep_theirs():
    ids = DynamicIdMap(IdMapSettings(capacity=100, ttl_steps=16))
    first = ids.assign(np.arange(10), 1)
    for step in range(2, 18):
        assert not len(ids.assign(np.arange(5), step).gone_ids)
    gone = ids.assign(np.arange(5), 18).gone_ids
    assert gone.tolist() == [5, 6, 7, 8, 9]
    # Entries that became free go to the next, the lowest first.
    assert ids.assign(array([77, 78]), 18).entries.tolist() == [5, 6]
    assert np.array_equal(ids.find(np.arange(5)), first.entries[:5])
    assert ids.find(array([9])).tolist() == [-1]


def test_a_map_that_goes_on_looks_for_expired_ids_when_the_other_would():
    ids, twin = (DynamicIdMap(IdMapSettings(capacity=10, ttl_steps=80)) for _ in range(2))
    ids.assign(array([1]), 1)
    ids.assign(array([2]), 80)
    # Between 80 and 90, where it is looked for again, 1 is unseen for too long and still there.
    twin.load(ids.state())
    for one in (ids, twin):
        assert not len(one.assign(array([2]), 89).gone_ids)
        assert one.assign(array([2]), 90).gone_ids.tolist() == [1]


def test_the_oldest_make_room_but_none_of_this_step():
    ids = DynamicIdMap(IdMapSettings(capacity=4))
    ids.assign(array([1, 2]), 1)
    ids.assign(array([3, 4]), 2)
    given = ids.assign(array([9, 1, 8, 7, 6]), 3)
    # 1 stands behind 9 in the batch, and stays. At last all four are of this step.
    assert given.gone_ids.tolist() == [2, 3, 4]
    assert given.entries.tolist() == [1, 0, 2, 3, -1]
    assert ids.num_refused == 1


def test_a_full_table_that_refuses_keeps_whom_it_has():
    ids = DynamicIdMap(IdMapSettings(capacity=2, eviction_policy="refuse"))
    ids.assign(array([1, 2]), 1)
    given = ids.assign(array([3, 3, 2]), 2)
    assert given.entries.tolist() == [-1, -1, 1]
    assert not len(given.gone_ids)
    assert ids.num_refused == 2


def test_memory_follows_the_ids_that_there_are():
    """A capacity of half a billion, and ten ids: the arrays are there, and pages are not."""
    before = resident_bytes()
    ids = DynamicIdMap(IdMapSettings(capacity=500_000_000))
    ids.assign(np.arange(10), 1)
    assert resident_bytes() - before < 64 << 20
    assert ids.state()["ids"].shape == (10,)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity must lie in"),
        ({"capacity": 2**31}, "capacity must lie in"),
        ({"capacity": 5, "admission_threshold": 256}, "admission_threshold must lie in"),
        ({"capacity": 5, "admission_threshold": 0}, "admission_threshold must lie in"),
        ({"capacity": 5, "ttl_steps": 0}, "ttl_steps must be at least 1"),
        ({"capacity": 5, "eviction_policy": "shout"}, "eviction_policy 'shout' is unknown"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        IdMapSettings(**settings)


def test_bad_ids_and_steps_are_refused():
    ids = DynamicIdMap(IdMapSettings(capacity=5))
    ids.assign(array([1]), 4)
    with pytest.raises(ValueError, match="step 3 comes after step 4"):
        ids.assign(array([1]), 3)
    with pytest.raises(ValueError, match="step 2147483648"):
        ids.assign(array([1]), 2**31)
    for wrong in (np.zeros(3, dtype=np.int32), np.zeros((2, 2), dtype=np.int64)):
        with pytest.raises(ValueError, match=r"ids must be int64 \[n\]"):
            ids.find(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("free"), "must hold"),
        (lambda s: s.update(numbers=s["numbers"][:3]), "numbers has shape"),
        (lambda s: s.update(ids=s["ids"][:-1]), "do not agree"),
        (lambda s: s["ids"].__setitem__(3, s["ids"][4]), "do not agree"),
        (lambda s: s["last_seen"].__setitem__(3, -1), "do not agree"),
        (lambda s: s["free"].__setitem__(0, 3), "do not agree"),
        (lambda s: s.update(counters=s["counters"][:-1]), "same capacity and admission_threshold"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    settings = IdMapSettings(capacity=50, admission_threshold=2, ttl_steps=4)
    ids = DynamicIdMap(settings)
    ids.assign(np.repeat(np.arange(20), 2), 1)
    ids.assign(np.repeat(np.arange(10), 2), 9)
    assert len(ids.state()["free"]) == 10
    state = ids.state()
    change(state)
    twin = DynamicIdMap(settings)
    with pytest.raises(ValueError, match=message):
        twin.load(state)
    assert len(twin) == 0
    assert twin.assign(array([3, 3]), 1).entries.tolist() == [-1, 0]


def test_the_state_of_another_capacity_is_refused():
    ids = DynamicIdMap(IdMapSettings(capacity=50))
    ids.assign(np.arange(30), 1)
    with pytest.raises(ValueError, match="capacity 20"):
        DynamicIdMap(IdMapSettings(capacity=20)).load(ids.state())
