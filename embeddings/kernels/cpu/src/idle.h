// What reading an idle row corrects: embeddings/optim/deferred_update.py.
#pragma once

#include <cmath>

#include "interface.h"

template <class Real>
struct Correction {
  Real decay = 1, moved = 0, floor = 1, taken = 0, taken_floor = 1;
  bool moves() const { return moved != 0 || taken != 0; }
};

// exp(L[K] - L[s]): what the constant decay has left of a row.
__attribute__((noinline)) inline double constant_decay(const Idle& idle, int64_t last_step) {
  const int64_t end = idle.num_log_sums - 1;
  const double then = idle.log_sums[last_step < end ? last_step : end];
  return std::exp(idle.log_now - then - idle.log_slope * double(last_step > end ? last_step - end : 0));
}

// Inlined, as it is asked for each id.
template <class Real>
__attribute__((always_inline)) inline Correction<Real> correction(const Idle& idle, int64_t last_step) {
  Correction<Real> found;
  if (last_step <= 0 && !idle.from_start) return found;
  const int64_t age = idle.completed - last_step;
  found.decay = static_cast<const Real*>(idle.decay)[age < idle.num_decay ? age : idle.num_decay - 1];
  if (__builtin_expect(idle.num_log_sums > 0, 0)) found.decay *= Real(constant_decay(idle, last_step));
  if (age < idle.num_near) {
    const Real* near = static_cast<const Real*>(idle.near) + 4 * age;
    found.moved = near[0], found.floor = near[1], found.taken = near[2], found.taken_floor = near[3];
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

// What an idle row has to lose in units of m: moved / root - taken / taken_root, in one division.
template <class Real>
struct Loss {
  Real moved, taken;
  Eps<Real> eps, taken_eps;

  Loss(const Correction<Real>& now, Real factor, bool inside)
      : moved(factor * now.moved), taken(factor * now.taken), eps(now.floor, inside), taken_eps(now.taken_floor, inside) {}

  Real operator()(Real v) const { return quotient(eps.root(v), taken_eps.root(v)); }

  // The same where eps stands outside: with one root.
  Real outside(Real v) const {
    const Real root = std::sqrt(v);
    return quotient(root + eps.outside, root + taken_eps.outside);
  }

 private:
  Real quotient(Real root, Real taken_root) const { return (moved * taken_root - taken * root) / (root * taken_root); }
};
