// Stochastic Shared Embeddings: the swaps of one feature, bit for bit those of embeddings/sse/swap.py.
#pragma once

#include <algorithm>

#include "bags.h"
#include "philox.h"

constexpr uint32_t ROW_STREAM = 1, NEIGHBOUR_STREAM = 1u << 29, DISTANCE_STREAM = 1u << 30;
constexpr int64_t LONGEST_BLOCK = 256;

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

// How many samples that stay are before the next hit: thresholds [LONGEST_BLOCK] not above the word, by bisection
// without a branch.
inline int64_t samples_before_hit(const uint64_t* thresholds, uint32_t word) {
  int64_t count = 0;
#pragma GCC unroll 8
  for (int64_t half = LONGEST_BLOCK / 2; half; half /= 2) count += thresholds[count + half - 1] <= word ? half : 0;
  return count + (thresholds[count] <= word);
}

// Swaps the bags [start, end) of one feature, whose first bag is first_bag, from bags.ids into used. Rows outside [first
// live row, number of rows) stay: one unsigned comparison finds both.
inline void swap_block(
    const Bags& bags, int64_t* used, int64_t first_bag, int64_t start, int64_t end, const Swaps& swaps,
    const SwapWords& words) {
  const uint32_t step = uint32_t(swaps.step), key0 = uint32_t(words.key0), key1 = uint32_t(words.key1);
  const int64_t first_id = bags.offsets[first_bag + start], end_id = bags.offsets[first_bag + end];
  std::copy(bags.ids + first_id, bags.ids + end_id, used + first_id);
  if (words.distances == 0) return;
  const uint64_t* distances = swaps.thresholds + words.distances - 1;
  const int64_t first_sample = swaps.sample_offset + start, end_sample = swaps.sample_offset + end;
  const int64_t shift = int64_t(words.block_shift), length = int64_t(1) << shift;
  const auto offset_of = [&](int64_t sample) { return bags.offsets[first_bag + sample - swaps.sample_offset]; };
  for (int64_t block = first_sample >> shift; block << shift < end_sample; ++block) {
    const int64_t block_start = block << shift;
    const int64_t low = std::max(block_start, first_sample), high = std::min(block_start + length, end_sample);
    int64_t longest = 0;
    for (int64_t sample = low; sample < high; ++sample)
      longest = std::max(longest, offset_of(sample + 1) - offset_of(sample));
    for (int64_t position = 0; position < longest; ++position) {
      const uint32_t place = uint32_t(words.place) | uint32_t(position & 0xFFFF);
      Words four{};
      int64_t sample = block_start - 1;
      for (uint32_t n = 0;; ++n) {
        if (n % 4 == 0) four = philox(step, uint32_t(block), place, DISTANCE_STREAM + n / 4, key0, key1);
        sample += 1 + samples_before_hit(distances, four.lane[n % 4]);
        if (sample >= high) break;
        if (sample < low) continue;
        const int64_t i = offset_of(sample) + position;
        if (i >= offset_of(sample + 1)) continue;
        const int64_t row = bags.ids[i];
        if (uint64_t(row - int64_t(words.first_live)) > words.num_others) continue;
        used[i] = new_row(row, {step, uint32_t(sample >> 2), place, uint32_t(sample & 3), key0, key1}, swaps, words);
      }
    }
  }
}
