// The lookup: check, swap, read with deferred updates, and pool, block of samples by block of samples.
#pragma once

#include "rows.h"
#include "swap.h"
#include "threads.h"

// Samples of a task: at most, as prefetching starts anew with each, and at least.
constexpr int64_t MAX_SAMPLES = 512, MIN_SAMPLES = 64;
// Tasks for each thread, to balance them.
constexpr int64_t TASKS_PER_THREAD = 4;

inline int64_t samples_per_task(int64_t num_features, int64_t batch_size, int num_threads) {
  if (num_threads == 1) return MAX_SAMPLES;
  return std::max(MIN_SAMPLES, std::min(MAX_SAMPLES, num_features * batch_size / (TASKS_PER_THREAD * num_threads)));
}

struct FoundFault { Fault fault; int64_t id; };

inline FoundFault find_fault(const Bags& bags, int64_t num_ids, int64_t num_rows, bool ignore, int64_t first_bag, int64_t end_bag) {
  const int64_t first = bags.offsets[first_bag], last = bags.offsets[end_bag];
  int64_t lowest = std::min(first, num_ids - last);
  for (int64_t bag = first_bag; bag < end_bag; ++bag)
    lowest = std::min(lowest, bags.offsets[bag + 1] - bags.offsets[bag]);
  if (lowest < 0) return {BAD_OFFSETS, 0};
  if (ignore) return {NO_FAULT, 0};
  uint64_t highest = 0;
  for (int64_t i = first; i < last; ++i) highest = std::max(highest, uint64_t(bags.ids[i]));
  if (highest >= uint64_t(num_rows))
    for (int64_t i = first; i < last; ++i)
      if (uint64_t(bags.ids[i]) >= uint64_t(num_rows)) return {BAD_ID, bags.ids[i]};
  return {NO_FAULT, 0};
}

// What is read of a row: it alone; it with its decay; with the momentum of its deferred updates, one v for each
// element or one for the row.
enum class Reading { STORED, DECAYED, MOMENTUM, MOMENTUM_ROWWISE };

template <class W, class S, int DIM, Reading READING>
struct Reader {
  using Real = typename Sums<W>::type;
  static constexpr int LENGTH = DIM;
  static constexpr bool HAS_DEFERRED = READING != Reading::STORED;
  static constexpr bool HAS_MOMENTUM = READING >= Reading::MOMENTUM;
  static constexpr bool ROWWISE = READING == Reading::MOMENTUM_ROWWISE;
  static constexpr int64_t VECTORS = ROWWISE ? 1 : 2;

  const Feature& feature;
  const DeferredUpdate* deferred;
  int64_t dim;
  const W* weights;
  const S* vectors;
  const S* row_values;
  const int32_t* last_steps;

  Reader(const Tables& tables, const Feature& feature, const DeferredUpdate* deferred)
      : feature(feature), deferred(deferred), dim(length<DIM>(feature.dim)),
        weights(static_cast<const W*>(tables.weights) + feature.weight_base),
        vectors(static_cast<const S*>(tables.vectors) + feature.vector_base),
        row_values(static_cast<const S*>(tables.row_values) + feature.step_base),
        last_steps(tables.last_steps + feature.step_base) {}

  int64_t n() const { return length<DIM>(dim); }

  int64_t block() const {
    return block_of(n() * (int64_t(sizeof(W)) + (HAS_MOMENTUM ? VECTORS * int64_t(sizeof(S)) : 0)));
  }

  // Ask for the rows of a block of ids from `start` on, and for the last steps of the block after it; return where that
  // one starts. A processor retires no prefetch before it has found the address, but a short loop of nothing else keeps it
  // looking for many at once.
  EVENKEEL_INLINE int64_t fetch(const int64_t* ids, int64_t start, int64_t end) const {
    const int64_t stop = std::min(start + block(), end);
    for (int64_t i = start; i < stop; ++i) prefetch<false>(weights + ids[i] * n(), n());
    if constexpr (HAS_MOMENTUM) {
      // Only a row touched lately reads its moments: its last step, fetched before, tells.
      for (int64_t i = start; i < stop; ++i) {
        const int64_t row = ids[i];
        if (!is_live(feature, row) || deferred->completed - last_steps[row] >= deferred->num_near) continue;
        prefetch<false>(vectors + row * VECTORS * n(), VECTORS * n());
        if constexpr (ROWWISE) prefetch<false>(row_values + row, 1);
      }
    }
    fetch_last_steps(ids, stop, end);
    return stop;
  }

  EVENKEEL_INLINE void fetch_last_steps(const int64_t* ids, int64_t start, int64_t end) const {
    if constexpr (HAS_DEFERRED)
      for (int64_t i = start; i < std::min(start + block(), end); ++i) prefetch<false>(last_steps + ids[i], 1);
  }

  template <class How>
  void read(Real* out, int64_t row, Real factor) const {
    const W* w = weights + row * n();
    if constexpr (!HAS_DEFERRED) return read_scaled<DIM, How>(out, w, factor, dim);
    const Correction<Real> now = correction<Real>(*deferred, last_steps[row]);
    const Real scale = factor * now.decay;
    if constexpr (HAS_MOMENTUM) {
      if (now.pairs.move()) {
        const S* m = vectors + row * VECTORS * n();
        if constexpr (ROWWISE)
          return read_shifted<DIM, How>(out, w, m, scale, now.pairs.loss(Real(load(row_values[row])), factor), dim);
        else if (now.pairs.count > 1) return read_moved_by<How>(now.pairs, out, w, m, m + n(), scale, factor, dim);
        const Pair<Real> pair = now.pairs.pairs->times(factor);
        if (now.pairs.inside) return read_moved<true, DIM, How>(out, w, m, m + n(), scale, pair, dim);
        return read_moved<false, DIM, How>(out, w, m, m + n(), scale, pair, dim);
      }
    }
    read_scaled<DIM, How>(out, w, scale, dim);
  }
};

template <class Reader>
void look_up_block(const LookupCall& call, const Reader& reader, int64_t f, int64_t start, int64_t end) {
  using Real = typename Reader::Real;
  const Tables& tables = *call.tables;
  const Feature& feature = reader.feature;
  const Bags bags(call.batch);
  const int64_t first_feature_bag = f * call.batch.batch_size;
  const int64_t first_bag = first_feature_bag + start, end_bag = first_feature_bag + end;
  const FoundFault found = find_fault(bags, call.batch.num_ids, feature.num_rows, call.ignore_bounds, first_bag, end_bag);
  if (found.fault) {
    call.faults[2 * f] = found.fault, call.faults[2 * f + 1] = found.id;
    return;
  }
  const bool single = bags.one_each(first_bag, end_bag);
  const int64_t* ids = bags.ids;
  if (call.swaps) {
    swap_block(bags, call.used, first_feature_bag, start, end, *call.swaps, call.swaps->features[f]);
    ids = call.used;
  }
  const Real* scales = static_cast<const Real*>(call.batch.weights);
  const int64_t first_id = bags.offsets[first_bag], end_id = bags.offsets[end_bag];
  const int64_t dim = reader.dim, stride = tables.total_dim, block = reader.block();
  Real* out = static_cast<Real*>(call.output) + (tables.pooled ? start * stride + feature.column : first_id * stride);
  reader.fetch_last_steps(ids, first_id, end_id);
  int64_t fetched = reader.fetch(ids, first_id, end_id);
  if (!tables.pooled || single) {
    for (int64_t i = first_id; i < end_id; ++i, out += stride) {
      if (i + block >= fetched) fetched = reader.fetch(ids, fetched, end_id);
      const int64_t row = ids[i];
      const Real factor = scales ? scales[i] : Real(1);
      if (!is_live(feature, row) || factor == 0) clear_row<Reader::LENGTH>(out, dim);
      else reader.template read<Put>(out, row, factor);
    }
    return;
  }
  for (int64_t bag = first_bag; bag < end_bag; ++bag, out += stride) {
    const int64_t first = bags.offsets[bag], last = bags.offsets[bag + 1];
    const Real share = share_of<Real>(feature, ids, first, last);
    bool empty = true;
    for (int64_t i = first; i < last; ++i) {
      if (i + block >= fetched) fetched = reader.fetch(ids, fetched, end_id);
      const int64_t row = ids[i];
      const Real factor = scales ? share * scales[i] : share;
      if (!is_live(feature, row) || factor == 0) continue;
      if (empty) reader.template read<Put>(out, row, factor);
      else reader.template read<Add>(out, row, factor);
      empty = false;
    }
    if (empty) clear_row<Reader::LENGTH>(out, dim);
  }
}

template <class W, class S, int DIM, Reading READING>
void look_up(const LookupCall& call) {
  const Tables& tables = *call.tables;
  const int64_t batch_size = call.batch.batch_size;
  const int64_t size = samples_per_task(tables.num_features, batch_size, call.num_threads);
  const int64_t num_blocks = (batch_size + size - 1) / size;
  for_tasks(call.num_threads, tables.num_features * num_blocks, [&](int64_t task, int) {
    const int64_t f = task / num_blocks, start = task % num_blocks * size;
    const Reader<W, S, DIM, READING> reader(tables, tables.features[f], call.deferred);
    look_up_block(call, reader, f, start, std::min(start + size, batch_size));
  });
}
