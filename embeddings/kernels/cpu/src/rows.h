// Arithmetic of one row. Loops are plain; DIM is the row's length where code is made for it, else 0.
#pragma once

#include "elements.h"
#include "deferred_update.h"

template <int DIM>
inline int64_t length(int64_t dim) { return DIM ? DIM : dim; }

constexpr int64_t LINE = 64;

// Ids ahead of the current one whose place is prefetched one by one.
constexpr int64_t AHEAD = 12;
// Rows that are prefetched at a time: so many that a block has at most so many bytes.
constexpr int64_t MIN_BLOCK = 8, MAX_BLOCK = 32, BLOCK_BYTES = 8192;

inline int64_t block_of(int64_t row_bytes) { return std::max(MIN_BLOCK, std::min(MAX_BLOCK, BLOCK_BYTES / row_bytes)); }

// Inlined always: GCC takes a function that only prefetches for one without effect and drops its calls.
template <bool WRITE, class T>
EVENKEEL_INLINE void prefetch(const T* place, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE / int64_t(sizeof(T))) __builtin_prefetch(place + i, WRITE, 3);
}

// How a row goes into an output: as the first of its bag, or beside others.
struct Put { template <class Real> static Real with(Real, Real value) { return value; } };
struct Add { template <class Real> static Real with(Real before, Real value) { return before + value; } };

template <int DIM, class Real>
void clear_row(Real* __restrict out, int64_t dim) {
  for (int64_t i = 0; i < length<DIM>(dim); ++i) out[i] = 0;
}

// out = factor w
template <int DIM, class How, class Real, class W>
EVENKEEL_INLINE void read_scaled(Real* __restrict out, const W* __restrict w, Real factor, int64_t dim) {
  EVENKEEL_SIMD
  for (int64_t i = 0; i < length<DIM>(dim); ++i) out[i] = How::with(out[i], factor * load(w[i]));
}

// out = factor w - share m
template <int DIM, class How, class Real, class W, class S>
EVENKEEL_INLINE void read_shifted(Real* __restrict out, const W* __restrict w, const S* __restrict m, Real factor, Real share, int64_t dim) {
  EVENKEEL_SIMD
  for (int64_t i = 0; i < length<DIM>(dim); ++i)
    out[i] = How::with(out[i], factor * load(w[i]) - share * Real(load(m[i])));
}

// out = factor w - pair(v) m
template <bool EPS_INSIDE, int DIM, class How, class Real, class W, class S>
EVENKEEL_INLINE void read_moved(
    Real* __restrict out, const W* __restrict w, const S* __restrict m, const S* __restrict vs, Real factor, Pair<Real> pair, int64_t dim) {
  EVENKEEL_SIMD
  for (int64_t i = 0; i < length<DIM>(dim); ++i) {
    const Real v = Real(load(vs[i])), loss = EPS_INSIDE ? pair.inside(v) : pair.outside(std::sqrt(v));
    out[i] = How::with(out[i], factor * load(w[i]) - loss * Real(load(m[i])));
  }
}

// The same with more pairs.
template <class How, class Real, class W, class S>
__attribute__((noinline)) void read_moved_by(
    const Pairs<Real>& pairs, Real* __restrict out, const W* __restrict w, const S* __restrict m, const S* __restrict vs, Real factor,
    Real share, int64_t dim) {
  Real v[CHUNK], loss[CHUNK];
  for (int64_t first = 0; first < dim; first += CHUNK) {
    const int64_t n = std::min(CHUNK, dim - first);
    for (int64_t i = 0; i < n; ++i) v[i] = Real(load(vs[first + i]));
    pairs.losses(loss, v, n, share);
    EVENKEEL_SIMD
    for (int64_t i = 0; i < n; ++i)
      out[first + i] = How::with(out[first + i], factor * load(w[first + i]) - loss[i] * Real(load(m[first + i])));
  }
}

// |row|^2 in double, in eight sums that are added up pairwise: the same on every machine.
template <class Real>
double sum_of_squares(const Real* row, int64_t dim) {
  double sums[8] = {};
  const int64_t whole = dim / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += double(row[i + lane]) * double(row[i + lane]);
  double rest = 0;
  for (int64_t i = whole; i < dim; ++i) rest += double(row[i]) * double(row[i]);
  for (int width = 4; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0] + rest;
}
