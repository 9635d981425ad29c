// What reading a row with deferred updates corrects: embeddings/optim/deferred_update.py.
#pragma once

#include <cmath>

#include "interface.h"

template <class Real>
struct Correction {
  Real decay = 1, momentum_drift = 0, eps_term = 1, lookahead_correction = 0, correction_eps = 1;
  bool moves() const { return momentum_drift != 0 || lookahead_correction != 0; }
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
    const Real* near = static_cast<const Real*>(deferred.near) + 4 * age;
    found.momentum_drift = near[0], found.eps_term = near[1];
    found.lookahead_correction = near[2], found.correction_eps = near[3];
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

// What a row with deferred updates has to lose in units of m: drift / root - correction / correction_root, in one
// division.
template <class Real>
struct Loss {
  Real drift, correction;
  Eps<Real> eps, correction_eps;

  Loss(const Correction<Real>& now, Real factor, bool inside)
      : drift(factor * now.momentum_drift), correction(factor * now.lookahead_correction), eps(now.eps_term, inside),
        correction_eps(now.correction_eps, inside) {}

  Real operator()(Real v) const { return quotient(eps.root(v), correction_eps.root(v)); }

  // The same where eps stands outside: with one root.
  Real outside(Real v) const {
    const Real root = std::sqrt(v);
    return quotient(root + eps.outside, root + correction_eps.outside);
  }

 private:
  Real quotient(Real root, Real correction_root) const {
    return (drift * correction_root - correction * root) / (root * correction_root);
  }
};
