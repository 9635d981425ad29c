// Stochastic Shared Embeddings: the swaps of one feature, bit for bit those of embeddings/sse/swap.py.
#pragma once

#include <algorithm>

#include "bags.h"
#include "philox.h"

constexpr uint32_t HIT_STREAM = 0, ROW_STREAM = 1, NEIGHBOUR_STREAM = 1u << 29;

struct Draw {
  uint32_t step, group, place, lane, key0, key1;

  uint64_t word(uint32_t stream) const { return philox(step, group, place, stream, key0, key1).lane[lane]; }

  // Uniform in [0, bound): embeddings.tables.philox.uniform_below.
  int64_t below(uint64_t bound, uint32_t stream) const {
    const uint64_t high = word(stream);
    if (bound <= ONE_WORD_LIMIT) return int64_t(high * bound >> 32);
    const uint64_t low = word(stream + uint32_t(LOW_WORD_STREAM));
    return int64_t((high * bound + (low * bound >> 32)) >> 32);
  }
};

// What a hit becomes.
inline int64_t new_row(int64_t row, const Draw& draw, const Swaps& swaps, const SwapWords& words) {
  const int64_t* offsets = nullptr;
  int64_t first = 0, last = 0;
  if (words.graph_start) {
    offsets = swaps.graph_offsets + words.graph_start - 1;
    first = offsets[row], last = offsets[row + 1];
  }
  if (last > first && words.stop) {
    const int64_t home_first = first, home_last = last;
    for (uint32_t stream = 0;; ++stream) {
      const int64_t here = swaps.neighbours[first + draw.below(uint64_t(last - first), ROW_STREAM + stream)];
      if (here != row && draw.word(NEIGHBOUR_STREAM + stream) < words.stop) return here;
      first = offsets[here], last = offsets[here + 1];
      if (first == last) first = home_first, last = home_last;
    }
  }
  if (last > first && draw.word(NEIGHBOUR_STREAM) < swaps.thresholds[words.threshold_start + uint64_t(last - first)])
    return swaps.neighbours[first + draw.below(uint64_t(last - first), ROW_STREAM)];
  const int64_t first_live = int64_t(words.first_live);
  for (uint32_t stream = ROW_STREAM;; ++stream) {
    const int64_t drawn = draw.below(words.num_others, stream);
    const int64_t other = first_live + drawn + (drawn >= row - first_live);
    if (!std::binary_search(swaps.neighbours + first, swaps.neighbours + last, other)) return other;
  }
}

// Swaps the bags [start, end) of one feature, whose first bag is first_bag, from bags.ids into used. `single`: each of
// them has one id. Rows outside [first live row, number of rows) stay: one unsigned comparison finds both.
inline void swap_block(
    const Bags& bags, int64_t* used, bool single, int64_t first_bag, int64_t start, int64_t end, const Swaps& swaps,
    const SwapWords& words) {
  const uint32_t step = uint32_t(swaps.step), key0 = uint32_t(words.key0), key1 = uint32_t(words.key1);
  const uint32_t place = uint32_t(words.place);
  const int64_t first_id = bags.offsets[first_bag + start], end_id = bags.offsets[first_bag + end];
  std::copy(bags.ids + first_id, bags.ids + end_id, used + first_id);
  if (words.threshold == 0) return;
  // Not above the threshold less 1: the threshold itself may be 2^32.
  const uint32_t highest = uint32_t(words.threshold - 1);
  const auto hit = [&](int64_t i, int64_t sample, uint32_t at) {
    const int64_t row = bags.ids[i];
    if (uint64_t(row - int64_t(words.first_live)) > words.num_others) return;
    const Draw draw{step, uint32_t(sample >> 2), at, uint32_t(sample & 3), key0, key1};
    used[i] = new_row(row, draw, swaps, words);
  };
  const int64_t first_sample = swaps.sample_offset + start, end_sample = swaps.sample_offset + end;
  uint32_t drawn[4][PHILOX_GROUPS];
  if (single) {
    // A draw for four samples, eight draws at a time. Only those that hit are looked at one by one.
    for (int64_t group = first_sample >> 2; group * 4 < end_sample; group += PHILOX_GROUPS) {
      philox_groups(drawn, step, uint32_t(group), place, HIT_STREAM, key0, key1);
      uint32_t any = 0;
#pragma omp simd reduction(| : any)
      for (int j = 0; j < 4 * PHILOX_GROUPS; ++j) any |= uint32_t((&drawn[0][0])[j] <= highest);
      if (!any) continue;
      for (int j = 0; j < 4 * PHILOX_GROUPS; ++j) {
        const int64_t sample = 4 * group + j;
        if (drawn[j & 3][j >> 2] <= highest && sample >= first_sample && sample < end_sample)
          hit(first_id + sample - first_sample, sample, place);
      }
    }
    return;
  }
  for (int64_t group = first_sample >> 2; group * 4 < end_sample; ++group) {
    const int64_t low = std::max(group * 4, first_sample), high = std::min(group * 4 + 4, end_sample);
    const auto bag_of = [&](int64_t sample) { return first_bag + sample - swaps.sample_offset; };
    int64_t longest = 0;
    for (int64_t sample = low; sample < high; ++sample)
      longest = std::max(longest, bags.offsets[bag_of(sample) + 1] - bags.offsets[bag_of(sample)]);
    for (int64_t position = 0; position < longest; ++position) {
      const uint32_t at = place | uint32_t(position & 0xFFFF);
      const Words four = philox(step, uint32_t(group), at, HIT_STREAM, key0, key1);
      for (int64_t sample = low; sample < high; ++sample) {
        const int64_t i = bags.offsets[bag_of(sample)] + position;
        if (i < bags.offsets[bag_of(sample) + 1] && four.lane[sample & 3] <= highest) hit(i, sample, at);
      }
    }
  }
}
