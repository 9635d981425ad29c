#pragma once

#include "bags.h"
#include "entries.h"
#include "lookup.h"

// Keys of a bucket at most, on average: both buffers of its sort stay in the second-level cache.
constexpr int64_t BUCKET = 1 << 13;
constexpr int MAX_BUCKET_BITS = 10;
// Sorting 4096 keys by 18 bits takes two passes of 9 bits. Up to INSERTION keys insertion takes less than the zeroing of
// 2^DIGIT_BITS counts; finer buckets and insertion alone take three times as long: a branch that goes wrong for every
// second key.
constexpr int DIGIT_BITS = 11;
constexpr int64_t INSERTION = 32;
// The key of an id that touches nothing.
constexpr uint64_t UNTOUCHED = ~uint64_t(0);

inline int bit_length(uint64_t number) { return number ? 64 - __builtin_clzll(number) : 0; }

// Where one record's entries and outputs start among all, and how it is cut into blocks.
struct Span { int64_t first_entry, first_output, first_block, num_blocks, block_size; };

template <class Real>
void build_keys(
    const Tables& tables, const Batch& batch, const Span& span, int64_t task, bool direct, int place_bits, int bucket_bits,
    uint64_t* keys, int64_t* places, Real* shares, Block& block, int32_t* counts) {
  const int64_t f = task / span.num_blocks, start = task % span.num_blocks * span.block_size;
  const int64_t end = std::min(start + span.block_size, batch.batch_size);
  const Feature& feature = tables.features[f];
  const Bags bags(batch);
  const Real* scales = static_cast<const Real*>(batch.weights);
  const int64_t first_bag = f * batch.batch_size + start, end_bag = f * batch.batch_size + end;
  const int64_t first_id = bags.offsets[first_bag], end_id = bags.offsets[end_bag];
  block = {feature.table, span.first_entry + first_id, span.first_entry + end_id};
  const int shift = int(std::max<int64_t>(0, feature.row_bits - bucket_bits));
  std::fill(counts, counts + (1 << bucket_bits), 0);
  const auto put = [&](int64_t i, int64_t row, int64_t low, bool touched) {
    keys[span.first_entry + i] = touched ? uint64_t(row) << place_bits | uint64_t(low) : UNTOUCHED;
    if (touched) ++counts[uint64_t(row) >> shift];
  };
  const int64_t stride = tables.total_dim;
  if (direct && (!tables.pooled || bags.one_each(first_bag, end_bag))) {
    int64_t place = (span.first_output + (tables.pooled ? start : first_id)) * stride + feature.column;
    for (int64_t i = first_id; i < end_id; ++i, place += stride) put(i, bags.ids[i], place, is_live(feature, bags.ids[i]));
    return;
  }
  for (int64_t b = start; b < end; ++b) {
    const int64_t first = bags.offsets[f * batch.batch_size + b], last = bags.offsets[f * batch.batch_size + b + 1];
    const Real share = share_of<Real>(feature, bags.ids, first, last);
    for (int64_t i = first; i < last; ++i) {
      const int64_t place = (span.first_output + (tables.pooled ? b : i)) * stride + feature.column;
      bool touched = is_live(feature, bags.ids[i]);
      if (direct) {
        put(i, bags.ids[i], place, touched);
        continue;
      }
      const Real scale = scales ? share * scales[i] : share;
      touched &= scale != 0;
      places[span.first_entry + i] = place, shares[span.first_entry + i] = scale;
      put(i, bags.ids[i], span.first_entry + i, touched);
    }
  }
}

// Stable, by the bits from `lowest`.
inline void insertion_sort(uint64_t* keys, int64_t count, int lowest) {
  for (int64_t i = 1; i < count; ++i) {
    const uint64_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] >> lowest > key >> lowest; --j) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

// Stable, by bits [lowest, lowest + num_bits); `other` is room for as many keys.
inline void radix_sort(uint64_t* keys, uint64_t* other, int64_t count, int lowest, int num_bits, int64_t* starts) {
  const int num_passes = (num_bits + DIGIT_BITS - 1) / DIGIT_BITS;
  if (num_passes == 0) return;
  const int digit_bits = (num_bits + num_passes - 1) / num_passes;
  const uint64_t mask = (uint64_t(1) << digit_bits) - 1;
  uint64_t *source = keys, *target = other;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int shift = lowest + pass * digit_bits;
    std::fill(starts, starts + mask + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++starts[source[i] >> shift & mask];
    int64_t total = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) total += std::exchange(starts[digit], total);
    for (int64_t i = 0; i < count; ++i) target[starts[source[i] >> shift & mask]++] = source[i];
    std::swap(source, target);
  }
  if (source != keys) std::copy(source, source + count, keys);
}

// Where the keys of each row of a task end, from ends[first] on; gives the number of rows. Without a branch, which would
// go wrong for every second key, here or, more expensively, where rows are updated.
inline int64_t find_rows(const uint64_t* keys, int64_t first, int64_t end, int lowest, int64_t* ends) {
  int64_t row = first;
  for (int64_t i = first; i < end - 1; ++i) {
    ends[row] = i + 1;
    row += keys[i] >> lowest != keys[i + 1] >> lowest;
  }
  ends[row] = end;
  return row + 1 - first;
}

template <class Real>
Entries sort_entries(const UpdateCall& call, Scratch& scratch) {
  const Tables& tables = *call.tables;
  const int threads = call.num_threads;
  int64_t num_entries = 0, num_outputs = 0, num_blocks = 0, most_row_bits = 0;
  bool direct = !tables.any_mean;
  const int64_t wanted_blocks = threads == 1 ? 1 : (TASKS_PER_THREAD * threads + tables.num_features - 1) / tables.num_features;
  std::vector<Span> spans;
  for (int64_t r = 0; r < call.num_records; ++r) {
    const Batch& batch = call.records[r].batch;
    const int64_t size = std::max(MIN_SAMPLES, (batch.batch_size + wanted_blocks - 1) / wanted_blocks);
    spans.push_back({num_entries, num_outputs, num_blocks, (batch.batch_size + size - 1) / size, size});
    num_entries += batch.num_ids;
    num_outputs += tables.pooled ? batch.batch_size : batch.num_ids;
    num_blocks += tables.num_features * spans.back().num_blocks;
    direct &= batch.weights == nullptr;
  }
  std::vector<int64_t> first_feature(size_t(tables.num_tables) + 1, tables.num_features);
  for (int64_t f = tables.num_features; f-- > 0;) first_feature[size_t(tables.features[f].table)] = f;
  for (int64_t t = 0; t < tables.num_tables; ++t) most_row_bits = std::max(most_row_bits, tables.tables[t].row_bits);
  const int64_t wanted_tasks = threads == 1 ? 1 : TASKS_PER_THREAD * threads;
  const int64_t per_table = (num_entries + tables.num_tables - 1) / tables.num_tables;
  const int wanted_bits = bit_length(uint64_t(std::max((per_table - 1) / BUCKET, (wanted_tasks - 1) / tables.num_tables)));
  const int bucket_bits = int(std::min<int64_t>({MAX_BUCKET_BITS, most_row_bits, wanted_bits}));
  const int place_bits = bit_length(uint64_t(std::max(num_outputs * tables.total_dim, num_entries)));
  const int64_t num_buckets = int64_t(1) << bucket_bits, keys_per_task = std::max<int64_t>(1, (num_entries + wanted_tasks - 1) / wanted_tasks);

  uint64_t* keys = scratch.keys.at_least(num_entries);
  uint64_t* ordered = scratch.ordered.at_least(num_entries);
  int64_t* places = scratch.places.at_least(direct ? 0 : num_entries);
  Real* shares = reinterpret_cast<Real*>(scratch.shares.at_least(direct ? 0 : num_entries * int64_t(sizeof(Real))));
  int64_t* row_ends = scratch.row_ends.at_least(num_entries);
  Block* blocks = scratch.blocks.at_least(num_blocks);
  int32_t* counts = scratch.counts.at_least(num_blocks * num_buckets);
  int64_t* bucket_ends = scratch.starts.at_least(tables.num_tables * num_buckets);
  int64_t* digits = scratch.digits.at_least(threads * (int64_t(1) << DIGIT_BITS));
  Task* tasks = scratch.tasks.at_least(tables.num_tables + num_entries / keys_per_task);

  for (int64_t r = 0; r < call.num_records; ++r) {
    const Batch& batch = call.records[r].batch;
    for_tasks(threads, tables.num_features * spans[size_t(r)].num_blocks, [&](int64_t task, int) {
      const int64_t block = spans[size_t(r)].first_block + task;
      build_keys(
          tables, batch, spans[size_t(r)], task, direct, place_bits, bucket_bits, keys, places, shares, blocks[block],
          counts + block * num_buckets);
    });
  }
  // Counts become where each block's keys of a bucket go; buckets become tasks.
  int64_t total = 0, num_tasks = 0;
  for (int64_t t = 0; t < tables.num_tables; ++t) {
    const int64_t num_here = int64_t(1) << std::min<int64_t>(bucket_bits, tables.tables[t].row_bits);
    int64_t first = total, first_bucket = 0;
    for (int64_t bucket = 0; bucket < num_here; ++bucket) {
      for (const Span& span : spans)
        for (int64_t block = span.first_block + first_feature[size_t(t)] * span.num_blocks;
             block < span.first_block + first_feature[size_t(t) + 1] * span.num_blocks; ++block)
          total += std::exchange(counts[block * num_buckets + bucket], int32_t(total));
      bucket_ends[t * num_buckets + bucket] = total;
      if (total > first && (total - first >= keys_per_task || bucket == num_here - 1)) {
        tasks[num_tasks++] = {t, first, total, first_bucket, bucket + 1, 0};
        first = total, first_bucket = bucket + 1;
      }
    }
  }
  for_tasks(threads, num_blocks, [&](int64_t block, int) {
    const int64_t row_bits = tables.tables[blocks[block].table].row_bits;
    const int shift = place_bits + int(std::max<int64_t>(0, row_bits - bucket_bits));
    int32_t* next = counts + block * num_buckets;
    for (int64_t i = blocks[block].first; i < blocks[block].end; ++i)
      if (keys[i] != UNTOUCHED) ordered[next[keys[i] >> shift]++] = keys[i];
  });
  for_tasks(threads, num_tasks, [&](int64_t number, int worker) {
    Task& task = tasks[number];
    const int num_bits = int(std::max<int64_t>(0, tables.tables[task.table].row_bits - bucket_bits));
    int64_t first = task.first;
    for (int64_t bucket = task.first_bucket; bucket < task.end_bucket; ++bucket) {
      const int64_t end = bucket_ends[task.table * num_buckets + bucket];
      if (end - first > INSERTION)
        radix_sort(ordered + first, keys + first, end - first, place_bits, num_bits, digits + (int64_t(worker) << DIGIT_BITS));
      else
        insertion_sort(ordered + first, end - first, place_bits);
      first = end;
    }
    task.num_rows = find_rows(ordered, task.first, task.end, place_bits, row_ends);
  });
  return {ordered, row_ends, places, shares, tasks, num_tasks, total, place_bits, direct};
}
