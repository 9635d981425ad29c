// A hash map from raw 64-bit ids to entries, with the counters that decide who is let in: embeddings/dynamic.
//
// Open addressing with linear probing over pairs of (id, entry + 1) of one flat array, 0 being an empty place; ids are
// spread by splitmix64's finalizer, a bijection. To remove an id shifts those behind it back, so that nothing marks where
// it was and a map of ids that come and go stays as fast as a new one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lookup.h"

// What `numbers` holds: entries ever used, free ones among them, ids in the map, occurrences counted since the counters
// were last emptied, ids let in by this call, occurrences refused for want of an entry.
enum Number { HIGH, FREE, COUNT, COUNTED, NEW, REFUSED };
// Why `admit` came back: at its end; the id at that place was counted and there is no room in the map or no entry; or it
// was not counted, as the counters have had their limit.
enum Reason : int64_t { DONE, FULL_MAP, NO_ENTRY, FULL_COUNTERS };

struct IdMap {
  int64_t* slots;  // [2 * (mask + 1)]
  int64_t* ids_of;
  int32_t* last_seen;
  int32_t* free;
  int64_t* numbers;
  uint8_t* current;  // [64 * blocks]
  uint8_t* previous;
  int64_t mask, shift, capacity, admission_threshold, block_shift, count_limit;
};

inline uint64_t mixed(uint64_t word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
  word = (word ^ word >> 27) * 0x94D049BB133111EBu;
  return word ^ word >> 31;
}

// Where an id stands if no other does: the highest bits of its hash.
inline int64_t home_of(const IdMap& map, int64_t raw) { return int64_t(mixed(uint64_t(raw)) >> map.shift); }

// The entry of an id, -1 for one that is not there.
inline int64_t entry_of(const IdMap& map, int64_t raw) {
  for (int64_t place = home_of(map, raw);; place = (place + 1) & map.mask) {
    const int64_t entry = map.slots[2 * place + 1];
    if (entry == 0 || map.slots[2 * place] == raw) return entry - 1;
  }
}

// An id that is not there.
inline void put(const IdMap& map, int64_t raw, int64_t entry) {
  int64_t place = home_of(map, raw);
  while (map.slots[2 * place + 1] != 0) place = (place + 1) & map.mask;
  map.slots[2 * place] = raw, map.slots[2 * place + 1] = entry + 1;
}

EVENKEEL_INLINE void fetch_home(const IdMap& map, const int64_t* ids, int64_t i, int64_t count) {
  if (i < count) prefetch<false>(map.slots + 2 * home_of(map, ids[i]), 2);
}

inline void find(const IdMap& map, const int64_t* ids, int64_t count, int64_t* entries) {
  for (int64_t i = 0; i < count; ++i) {
    fetch_home(map, ids, i + AHEAD, count);
    entries[i] = entry_of(map, ids[i]);
  }
}

// As find, and notes the step at each entry found; positions of the others go to `misses`: how many there are.
inline int64_t touch(const IdMap& map, const int64_t* ids, int64_t count, int64_t* entries, int32_t step, int64_t* misses) {
  int64_t num_misses = 0;
  for (int64_t i = 0; i < count; ++i) {
    fetch_home(map, ids, i + 2 * AHEAD, count);
    if (i + AHEAD < count) {
      const int64_t ahead = entry_of(map, ids[i + AHEAD]);
      if (ahead >= 0) prefetch<true>(map.last_seen + ahead, 1);
    }
    entries[i] = entry_of(map, ids[i]);
    if (entries[i] >= 0) map.last_seen[entries[i]] = step;
    else misses[num_misses++] = i;
  }
  return num_misses;
}

// Counts an id in four of the 64 counters of its block; the least of them, with those of the time before: a count-min
// sketch (Cormode and Muthukrishnan 2005) with conservative update (Estan and Varghese 2002), never less than the truth.
inline int64_t count_occurrence(const IdMap& map, int64_t raw) {
  const uint64_t word = mixed(mixed(uint64_t(raw)) + 0x9E3779B97F4A7C15u);
  const int64_t block = int64_t(word >> map.block_shift) << 6;
  int64_t places[4];
  uint8_t least = 255;
  for (int j = 0; j < 4; ++j) {
    places[j] = block + int64_t(word >> 6 * j & 63);
    least = std::min(least, map.current[places[j]]);
  }
  int64_t found = 2 * 255;
  for (int64_t place : places) {
    if (least < 255 && map.current[place] == least) map.current[place] = uint8_t(least + 1);
  }
  for (int64_t place : places) found = std::min<int64_t>(found, map.current[place] + map.previous[place]);
  return found;
}

// Counts the missing ids from misses[start] on, and lets those in that occurred `admission_threshold` times. Gives the place in
// `misses` where it stopped, and why. With `refuse` ids without an entry stay without. `is_counted`: the first was
// counted by an earlier call.
inline Reason admit(
    const IdMap& map, const int64_t* ids, int64_t* entries, const int64_t* misses, int64_t num_misses, int64_t* place,
    bool is_counted, int32_t step, int64_t* new_entries, bool refuse) {
  for (const int64_t start = *place; *place < num_misses; ++*place) {
    const int64_t i = misses[*place], raw = ids[i];
    // An earlier occurrence of this call may have let it in.
    int64_t entry = entry_of(map, raw);
    if (entry >= 0) {
      entries[i] = entry;
      continue;
    }
    if (map.admission_threshold > 1 && !(is_counted && *place == start)) {
      if (map.numbers[COUNTED] >= map.count_limit) return FULL_COUNTERS;
      ++map.numbers[COUNTED];
      if (count_occurrence(map, raw) < map.admission_threshold) continue;
    }
    if (map.numbers[FREE] == 0 && map.numbers[HIGH] == map.capacity) {
      if (!refuse) return NO_ENTRY;
      ++map.numbers[REFUSED];
      continue;
    }
    if (2 * (map.numbers[COUNT] + 1) > map.mask) return FULL_MAP;
    entry = map.numbers[FREE] > 0 ? map.free[--map.numbers[FREE]] : map.numbers[HIGH]++;
    put(map, raw, entry);
    map.ids_of[entry] = raw;
    map.last_seen[entry] = step;
    entries[i] = new_entries[map.numbers[NEW]++] = entry;
    ++map.numbers[COUNT];
  }
  return DONE;
}

// Takes the ids of these entries out.
inline void remove_all(const IdMap& map, const int64_t* entries, int64_t count) {
  int64_t* slots = map.slots;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t raw = map.ids_of[entries[i]];
    int64_t hole = home_of(map, raw);
    while (slots[2 * hole] != raw || slots[2 * hole + 1] == 0) hole = (hole + 1) & map.mask;
    for (int64_t place = (hole + 1) & map.mask; slots[2 * place + 1] != 0; place = (place + 1) & map.mask) {
      // What is at home behind the hole would not be found in it.
      if (((place - home_of(map, slots[2 * place])) & map.mask) < ((place - hole) & map.mask)) continue;
      slots[2 * hole] = slots[2 * place], slots[2 * hole + 1] = slots[2 * place + 1];
      hole = place;
    }
    slots[2 * hole] = slots[2 * hole + 1] = 0;
  }
}
