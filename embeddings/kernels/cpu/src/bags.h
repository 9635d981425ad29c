// Ids of one feature, bag by bag.
#pragma once

#include "interface.h"

struct Bags {
  const int64_t* ids;
  const int64_t* offsets;

  explicit Bags(const Batch& batch) : ids(batch.ids), offsets(batch.offsets) {}

  // Whether each of the bags [first, end) has exactly one id.
  bool one_each(int64_t first, int64_t end) const {
    const int64_t start = offsets[first] - first;
    int64_t off = 0;
    for (int64_t bag = first + 1; bag <= end; ++bag) off |= offsets[bag] - bag - start;
    return off == 0;
  }
};

// Whether a row adds something: one comparison leaves out padding and ids outside the table.
inline bool is_live(const Feature& feature, int64_t row) {
  return uint64_t(row - feature.first_row) < uint64_t(feature.num_live);
}

// What each id of a bag weighs: 1, or for the mean 1 over the number of ids that add something.
template <class Real>
Real share_of(const Feature& feature, const int64_t* ids, int64_t first, int64_t end) {
  if (!feature.mean) return 1;
  int64_t count = 0;
  for (int64_t i = first; i < end; ++i) count += is_live(feature, ids[i]);
  return Real(1.0 / double(count > 1 ? count : 1));
}
