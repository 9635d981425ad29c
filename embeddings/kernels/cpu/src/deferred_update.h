// What reading a row with deferred updates corrects: embeddings/optim/deferred_update.py.
#pragma once

#include <cmath>
#include <utility>

#include "interface.h"

// Two nodes of what momentum takes from a row: drift m / (sqrt(v) + eps) each, in one division.
template <class Real>
struct Pair {
  Real drift1, eps1, drift2, eps2;

  // `root`: of v. Where eps stands inside, roots are taken here.
  template <bool INSIDE>
  Real operator()(Real v, Real root) const {
    const Real root1 = INSIDE ? std::sqrt(v + eps1) : root + eps1;
    const Real root2 = INSIDE ? std::sqrt(v + eps2) : root + eps2;
    return (drift1 * root2 + drift2 * root1) / (root1 * root2);
  }
};

// Pairs of nodes: one as a rule, more in the first steps and where beta2 is small. There is code for one, two and MOST.
constexpr int MOST = 6;

// What a row has lost by its momentum, in units of m.
template <class Real, int PAIRS>
struct Loss {
  Pair<Real> pairs[PAIRS ? PAIRS : 1];

  Loss(const Pair<Real>* from, int64_t num_pairs, Real factor) {
    for (int64_t i = 0; i < PAIRS; ++i)
      pairs[i] = i < num_pairs ? Pair<Real>{factor * from[i].drift1, from[i].eps1, factor * from[i].drift2, from[i].eps2}
                               : Pair<Real>{0, 1, 0, 1};
  }

  template <bool INSIDE>
  Real of(Real v) const { return of<INSIDE>(v, INSIDE ? v : std::sqrt(v)); }

  template <bool INSIDE>
  Real of(Real v, Real root) const { return sum<INSIDE>(v, root, std::make_index_sequence<PAIRS>()); }

 private:
  template <bool INSIDE, size_t... I>
  Real sum(Real v, Real root, std::index_sequence<I...>) const {
    return (pairs[I].template operator()<INSIDE>(v, root) + ...);
  }
};

template <class Real>
struct Correction {
  Real decay = 1;
  const Pair<Real>* pairs = nullptr;  // [num_pairs], or none
  int64_t num_pairs = 0;
  bool moves() const {
    for (int64_t i = 0; i < num_pairs; ++i)
      if (pairs[i].drift1 != 0 || pairs[i].drift2 != 0) return true;
    return false;
  }
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
  if (age < deferred.num_near) {
    found.pairs = static_cast<const Pair<Real>*>(deferred.near) + deferred.num_pairs * age;
    found.num_pairs = deferred.num_pairs;
  }
  return found;
}

// eps where it stands: inside the root of v or outside.
template <class Real>
struct Eps {
  Real inside, outside;
  Eps(Real eps, bool is_inside) : inside(is_inside ? eps : Real(0)), outside(is_inside ? Real(0) : eps) {}
  Real root(Real v) const { return std::sqrt(v + inside) + outside; }
};
