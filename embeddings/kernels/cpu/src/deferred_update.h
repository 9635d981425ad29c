// What reading a row with deferred updates corrects: embeddings/optim/deferred_update.py.
#pragma once

#include <cmath>

#include "elements.h"
#include "interface.h"

// Two nodes of what momentum takes from a row: drift m / (sqrt(v) + eps) each, in one division.
template <class Real>
struct Pair {
  Real drift1, eps1, drift2, eps2;

  Pair times(Real factor) const { return {factor * drift1, eps1, factor * drift2, eps2}; }

  // Of v where eps stands inside the root, and of v's root where it stands outside.
  Real inside(Real v) const { return quotient(std::sqrt(v + eps1), std::sqrt(v + eps2)); }
  Real outside(Real root) const { return quotient(root + eps1, root + eps2); }

 private:
  Real quotient(Real root1, Real root2) const { return (drift1 * root2 + drift2 * root1) / (root1 * root2); }
};

// What momentum takes from a row, in units of m: pairs of nodes, one as a rule, more in the first steps and where beta2
// is small.
template <class Real>
struct Pairs {
  const Pair<Real>* pairs = nullptr;
  int64_t count = 0;
  bool inside = false;  // where eps stands

  bool move() const {
    for (int64_t i = 0; i < count; ++i)
      if (pairs[i].drift1 != 0 || pairs[i].drift2 != 0) return true;
    return false;
  }

  // Both add up from the last pair to the first.
  Real loss(Real v, Real factor) const {
    Real found = 0;
    for (int64_t number = count - 1; number >= 0; --number) {
      const Pair<Real> pair = pairs[number].times(factor);
      found += inside ? pair.inside(v) : pair.outside(std::sqrt(v));
    }
    return found;
  }

  // The elements of a block stay in registers while the pairs are added up.
  template <bool INSIDE, int N>
  EVENKEEL_INLINE void losses_of(Real* __restrict out, const Real* __restrict v, int64_t rest, Real factor) const {
    const int64_t n = N ? N : rest;
    Real roots[16], sums[16];
    EVENKEEL_SIMD
    for (int64_t i = 0; i < n; ++i) roots[i] = INSIDE ? v[i] : std::sqrt(v[i]), sums[i] = 0;
    for (int64_t number = count - 1; number >= 0; --number) {
      const Pair<Real> pair = pairs[number].times(factor);
      EVENKEEL_SIMD
      for (int64_t i = 0; i < n; ++i) sums[i] += INSIDE ? pair.inside(roots[i]) : pair.outside(roots[i]);
    }
    EVENKEEL_SIMD
    for (int64_t i = 0; i < n; ++i) out[i] = sums[i];
  }

  template <bool INSIDE>
  __attribute__((noinline)) void losses_at(Real* __restrict out, const Real* __restrict v, int64_t n, Real factor) const {
    int64_t start = 0;
    for (; start + 16 <= n; start += 16) losses_of<INSIDE, 16>(out + start, v + start, 16, factor);
    if (start < n) losses_of<INSIDE, 0>(out + start, v + start, n - start, factor);
  }

  void losses(Real* __restrict out, const Real* __restrict v, int64_t n, Real factor) const {
    if (inside) losses_at<true>(out, v, n, factor);
    else losses_at<false>(out, v, n, factor);
  }
};

// Elements of a row at a time where losses are summed pair by pair.
constexpr int64_t CHUNK = 128;

template <class Real>
struct Correction {
  Real decay = 1;
  Pairs<Real> pairs;
};

// exp(L[K] - L[s]): what the constant decay has left of a row.
__attribute__((noinline)) inline double constant_decay(const DeferredUpdate& deferred, int64_t last_step) {
  const int64_t end = deferred.num_log_sums - 1;
  const double then = deferred.log_sums[last_step < end ? last_step : end];
  return std::exp(deferred.log_now - then - deferred.log_slope * double(last_step > end ? last_step - end : 0));
}

// Inlined, as it is asked for each id.
template <class Real>
__attribute__((always_inline)) inline Correction<Real> correction(const DeferredUpdate& deferred, int64_t last_step) {
  Correction<Real> found;
  if (last_step <= 0 && !deferred.from_start) return found;
  const int64_t age = deferred.completed - last_step;
  found.decay = static_cast<const Real*>(deferred.decay)[age < deferred.num_decay ? age : deferred.num_decay - 1];
  if (__builtin_expect(deferred.num_log_sums > 0, 0)) found.decay *= Real(constant_decay(deferred, last_step));
  if (age < deferred.num_near)
    found.pairs = {static_cast<const Pair<Real>*>(deferred.near) + deferred.num_pairs * age, deferred.num_pairs, bool(deferred.eps_inside_root)};
  return found;
}

// eps where it stands: inside the root of v or outside.
template <class Real>
struct Eps {
  Real inside, outside;
  Eps(Real eps, bool is_inside) : inside(is_inside ? eps : Real(0)), outside(is_inside ? Real(0) : eps) {}
  Real root(Real v) const { return std::sqrt(v + inside) + outside; }
};
