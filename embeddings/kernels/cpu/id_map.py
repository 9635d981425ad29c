"""Compiled hash map from raw 64-bit ids to entries, with the counters that decide who is let in (embeddings.growing).

Open addressing with linear probing over pairs of (id, entry + 1) of one flat array, 0 being an empty place; ids are
spread by splitmix64's finalizer, a bijection. To remove an id shifts those behind it back, so that nothing marks where
it was and a map of ids that come and go stays as fast as a new one.
"""

from __future__ import annotations

import numpy as np

from embeddings.kernels.cpu import simd
from embeddings.kernels.cpu.compiled import compiled

# Ids ahead of the one that is looked at: a place is one line of memory, and some ten can be under way at once.
_AHEAD = 12

# What `numbers` holds: entries ever used, free ones among them, ids in the map, occurrences counted since the counters
# were last emptied, ids let in by this call, occurrences refused for want of an entry.
HIGH, FREE, COUNT, COUNTED, NEW, REFUSED = range(6)
NUM_NUMBERS = 6
# Why `admit` came back before its end.
DONE, FULL_MAP, NO_ENTRY, FULL_COUNTERS = range(4)

_M0, _M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
_30, _27, _31, _6, _63 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(6), np.uint64(63)


@compiled()
def mixed(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> _30)) * _M0
    word = (word ^ (word >> _27)) * _M1
    return word ^ (word >> _31)


@compiled()
def home_of(raw, shift):  # type: ignore[no-untyped-def]
    """Where an id stands if nobody else does: the highest bits of its hash."""
    return np.int64(mixed(np.uint64(raw)) >> shift)


@compiled()
def entry_of(raw, slots, shift, mask):  # type: ignore[no-untyped-def]
    """The entry of an id, -1 for one that is not there."""
    place = home_of(raw, shift)
    while True:
        entry = slots[2 * place + 1]
        if entry == 0 or slots[2 * place] == raw:
            return entry - 1
        place = (place + 1) & mask


@compiled()
def put(raw, entry, slots, shift, mask):  # type: ignore[no-untyped-def]
    """An id that is not there."""
    place = home_of(raw, shift)
    while slots[2 * place + 1] != 0:
        place = (place + 1) & mask
    slots[2 * place], slots[2 * place + 1] = raw, entry + 1


@compiled()
def find(ids, entries, slots, shift, mask):  # type: ignore[no-untyped-def]
    """The entry of each id, -1 for those that are not there."""
    count = len(ids)
    for i in range(count):
        if i + _AHEAD < count:
            simd.prefetch_read(slots, 2 * home_of(ids[i + _AHEAD], shift), 2)
        entries[i] = entry_of(ids[i], slots, shift, mask)


@compiled()
def touch(ids, entries, slots, shift, mask, last_seen, step, misses):  # type: ignore[no-untyped-def]
    """As find, and notes the step at each entry found; positions of the others go to ``misses``: how many there are."""
    count, num_misses = len(ids), 0
    for i in range(count):
        if i + 2 * _AHEAD < count:
            simd.prefetch_read(slots, 2 * home_of(ids[i + 2 * _AHEAD], shift), 2)
        if i + _AHEAD < count:
            ahead = entry_of(ids[i + _AHEAD], slots, shift, mask)
            if ahead >= 0:
                simd.prefetch_write(last_seen, ahead, 1)
        entry = entry_of(ids[i], slots, shift, mask)
        entries[i] = entry
        if entry >= 0:
            last_seen[entry] = step
        else:
            misses[num_misses] = i
            num_misses += 1
    return num_misses


@compiled()
def count_occurrence(raw, current, previous, block_shift):  # type: ignore[no-untyped-def]
    """Counts an id in four of the 64 counters of its block; the least of them, with those of the time before.

    A count-min sketch (Cormode and Muthukrishnan 2005) with conservative update (Estan and Varghese 2002): never less
    than the true count.
    """
    word = mixed(mixed(np.uint64(raw)) + _M2)
    block = np.int64(word >> block_shift) << 6
    a, b = block + np.int64(word & _63), block + np.int64((word >> _6) & _63)
    word >>= np.uint64(12)
    c, d = block + np.int64(word & _63), block + np.int64((word >> _6) & _63)
    least = min(current[a], current[b], current[c], current[d])
    if least < 255:
        for place in (a, b, c, d):
            if current[place] == least:
                current[place] = least + 1
    low = min(np.int64(current[a]) + np.int64(previous[a]), np.int64(current[b]) + np.int64(previous[b]))
    high = min(np.int64(current[c]) + np.int64(previous[c]), np.int64(current[d]) + np.int64(previous[d]))
    return min(low, high)


@compiled()
def admit(  # type: ignore[no-untyped-def]
    ids, entries, misses, start, is_counted, slots, shift, mask, ids_of, last_seen, step, free, capacity, numbers,
    new_entries, admit_after, current, previous, block_shift, count_limit, refuse,
):  # fmt: skip
    """Counts the missing ids from ``misses[start]`` on, and lets those in that occurred ``admit_after`` times.

    Comes back with (place in ``misses``, why): DONE; FULL_MAP, NO_ENTRY: the id at that place was counted and there is
    no room; FULL_COUNTERS: it was not counted, as the counters have had ``count_limit``. With ``refuse`` ids without an
    entry stay without. ``is_counted``: whether the first was counted by an earlier call.
    """
    for place in range(start, len(misses)):
        i = misses[place]
        raw = ids[i]
        # An earlier occurrence of this call may have let it in.
        entry = entry_of(raw, slots, shift, mask)
        if entry >= 0:
            entries[i] = entry
            continue
        if admit_after > 1 and not (is_counted and place == start):
            if numbers[COUNTED] >= count_limit:
                return place, FULL_COUNTERS
            numbers[COUNTED] += 1
            if count_occurrence(raw, current, previous, block_shift) < admit_after:
                continue
        if numbers[FREE] == 0 and numbers[HIGH] == capacity:
            if not refuse:
                return place, NO_ENTRY
            numbers[REFUSED] += 1
            continue
        if 2 * (numbers[COUNT] + 1) > mask:
            return place, FULL_MAP
        if numbers[FREE] > 0:
            numbers[FREE] -= 1
            entry = np.int64(free[numbers[FREE]])
        else:
            entry = numbers[HIGH]
            numbers[HIGH] += 1
        put(raw, entry, slots, shift, mask)
        ids_of[entry] = raw
        last_seen[entry] = step
        entries[i] = entry
        new_entries[numbers[NEW]] = entry
        numbers[NEW] += 1
        numbers[COUNT] += 1
    return len(misses), DONE


@compiled()
def put_all(entries, ids_of, slots, shift, mask):  # type: ignore[no-untyped-def]
    """The ids of these entries, into an empty map."""
    for i in range(len(entries)):
        put(ids_of[entries[i]], entries[i], slots, shift, mask)


@compiled()
def remove_all(entries, ids_of, slots, shift, mask):  # type: ignore[no-untyped-def]
    """Takes the ids of these entries out."""
    for i in range(len(entries)):
        hole = home_of(ids_of[entries[i]], shift)
        while slots[2 * hole] != ids_of[entries[i]] or slots[2 * hole + 1] == 0:
            hole = (hole + 1) & mask
        place = hole
        while True:
            place = (place + 1) & mask
            if slots[2 * place + 1] == 0:
                break
            # What is at home behind the hole would not be found in it.
            if ((place - home_of(slots[2 * place], shift)) & mask) >= ((place - hole) & mask):
                slots[2 * hole], slots[2 * hole + 1] = slots[2 * place], slots[2 * place + 1]
                hole = place
        slots[2 * hole], slots[2 * hole + 1] = 0, 0
