// Which gradients a step sums for which row: the looked-up ids of all tables, sorted by table and row.
//
// An entry is one looked-up id. Its key has the row in the upper bits and in the lower ones where its gradient starts
// (`direct`), or, where entries have weights, the number of the entry. Where tables are large, or threads many, keys go
// to buckets by the leading bits of their row first, each of which is sorted by one thread, and so is the whole in the
// order of rows. Sorting is stable: the keys of a row stay in the order of the batch.
#pragma once

#include <memory>
#include <vector>

#include "interface.h"

// A buffer that grows and is kept; what it holds at first is whatever was left in it.
template <class T>
class Buffer {
 public:
  T* at_least(int64_t count) {
    if (count > size_) {
      // Batches differ in length: a quarter more than the longest so far is soon enough for all.
      const int64_t wanted = size_ ? count + count / 4 : count;
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<T*>(::operator new(size_t(wanted) * sizeof(T), std::align_val_t(64))));
      size_ = wanted;
    }
    return data_.get();
  }

 private:
  struct Free { void operator()(T* data) const { ::operator delete(data, std::align_val_t(64)); } };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

// A run of sorted keys of one table, which one thread updates. The keys of a row are in one task.
struct Task { int64_t table, first, end, first_bucket, end_bucket, num_rows; };

// Of one feature of one record, the samples that one thread turns into keys.
struct Block { int64_t table, first, end; };

// Memory to work with, kept from step to step.
struct Scratch {
  Buffer<uint64_t> keys, ordered;
  Buffer<int64_t> places, starts, digits, row_ends;
  Buffer<double> squares;
  Buffer<char> shares, sums, words;
  Buffer<int32_t> counts;
  Buffer<Block> blocks;
  Buffer<Task> tasks;
};

// What the update reads: `ends` of each task from its first key on, where the keys of each of its rows end.
struct Entries {
  const uint64_t* keys;
  const int64_t* ends;
  const int64_t* places;  // where not direct: where the gradient of an entry starts, and what it weighs
  const void* shares;
  const Task* tasks;
  int64_t num_tasks, num_keys;
  int place_bits;
  bool direct;

  int64_t row(int64_t key) const { return int64_t(keys[key] >> place_bits); }
  int64_t low(int64_t key) const { return int64_t(keys[key] & ((uint64_t(1) << place_bits) - 1)); }
  int64_t place(int64_t key) const { return direct ? low(key) : places[low(key)]; }
};

template <class Real>
Entries sort_entries(const UpdateCall& call, Scratch& scratch);
