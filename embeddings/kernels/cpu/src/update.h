// The update: each touched row is read, updated by its optimizer and written, by one thread.
#pragma once

#include "sort.h"

constexpr uint32_t ROUNDING_STREAM = 0x40000000;  // embeddings.optim.stochastic_rounding.STREAM

// The summed gradient of a row: in the batch's own gradients where there is one that counts as it is.
template <int DIM, class Real>
const Real* sum_gradients(
    const Entries& entries, const Real* grads, int64_t first, int64_t end, Real scale, Real* sum, int64_t dim) {
  const Real* shares = static_cast<const Real*>(entries.shares);
  const auto share_at = [&](int64_t key) { return entries.direct ? scale : shares[entries.low(key)] * scale; };
  if (end == first + 1 && share_at(first) == 1) return grads + entries.place(first);
  read_scaled<DIM, Put>(sum, grads + entries.place(first), share_at(first), dim);
  for (int64_t key = first + 1; key < end; ++key)
    read_scaled<DIM, Add>(sum, grads + entries.place(key), share_at(key), dim);
  return sum;
}

// embeddings.optim.stochastic_rounding.rounding_words of one row.
inline void draw_words(uint32_t* words, uint64_t step, uint64_t row, const Feature& table, int64_t dim) {
  row += table.whole_row;
  const int64_t first = int64_t(table.whole_column);
  for (int64_t column = first - first % 4; column < first + dim; column += 4) {
    const uint32_t quad = uint32_t(row >> 32) << 16 | uint32_t(column >> 2);
    const Words four = philox(uint32_t(step), uint32_t(row), quad, ROUNDING_STREAM, uint32_t(table.key0), uint32_t(table.key1));
    for (int64_t lane = 0; lane < 4; ++lane)
      if (column + lane >= first && column + lane < first + dim) words[column + lane - first] = four.lane[lane];
  }
}

// A row, its state and its gradient. `keep`: what its decay leaves; `deferred`: what its deferred updates took; `fade1`, `fade2`:
// what they and this step leave of its moments.
template <class W, class S, class Real>
struct Row {
  W* __restrict w;
  S* __restrict vectors;
  S* __restrict value;
  const Real* __restrict g;
  const uint32_t* __restrict words;
  Correction<Real> deferred;
  Real keep, fade1, fade2;
  int64_t dim;
};

// w = keep w - pace g
template <int DIM, class W, class S, class Real>
void descend(const Row<W, S, Real>& row, Real keep, Real pace) {
  EVENKEEL_SIMD
  for (int64_t i = 0; i < length<DIM>(row.dim); ++i)
    store_drawn(row.w[i], keep * load(row.w[i]) - pace * row.g[i], is_half<W> ? row.words[i] : 0);
}

template <class Real>
Real mean_square(const Real* g, int64_t dim) { return Real(sum_of_squares(g, dim) / double(dim)); }

// Rules by the names that embeddings.optim gives them.
enum Rule : int32_t { SGD, ADAGRAD, ROWWISE_ADAGRAD, RMSPROP, ADAM, ROWWISE_ADAM };

// Each rule is made once a step and moves rows: embeddings.optim has what they compute.
template <class Real>
struct Sgd {
  static constexpr int VECTORS = 0;
  Real rate;
  explicit Sgd(const UpdateCall& call) : rate(Real(call.step->rate)) {}

  template <int DIM, class W, class S>
  void operator()(const Row<W, S, Real>& row) const { descend<DIM>(row, row.keep * row.deferred.decay, rate); }
};

template <class Real>
struct RowwiseAdagrad {
  static constexpr int VECTORS = 0;
  Real rate, eps;
  explicit RowwiseAdagrad(const UpdateCall& call) : rate(Real(call.step->rate)), eps(Real(call.step->eps)) {}

  template <int DIM, class W, class S>
  void operator()(const Row<W, S, Real>& row) const {
    const Real sum = Real(load(*row.value)) + mean_square(row.g, row.dim);
    store(*row.value, sum);
    descend<DIM>(row, row.keep * row.deferred.decay, rate / (std::sqrt(sum) + eps));
  }
};

// sum = fade sum + gain g^2; w = keep w - rate g / root(sum): Adagrad with fade and gain 1, RMSprop.
template <class Real>
struct SquaredGradients {
  static constexpr int VECTORS = 1;
  bool averages;
  Real rate, gain;
  Eps<Real> eps;
  explicit SquaredGradients(const UpdateCall& call)
      : averages(call.step->rule == RMSPROP), rate(Real(call.step->rate)), gain(averages ? Real(1 - call.step->beta2) : Real(1)),
        eps(Real(call.step->eps), call.step->eps_inside_root) {}

  template <int DIM, class W, class S>
  void operator()(const Row<W, S, Real>& row) const {
    const Real keep = row.keep * row.deferred.decay, fade = averages ? row.fade2 : Real(1);
    EVENKEEL_SIMD
    for (int64_t i = 0; i < length<DIM>(row.dim); ++i) {
      const Real g = row.g[i], sum = fade * Real(load(row.vectors[i])) + gain * g * g;
      store(row.vectors[i], sum);
      store_drawn(row.w[i], keep * load(row.w[i]) - rate * g / eps.root(sum), is_half<W> ? row.words[i] : 0);
    }
  }
};

// What Adam and RowwiseAdam share: bias-corrected paces, and how far rows are stored ahead of their momentum.
template <class Real>
struct AdamPace {
  Real gain1, gain2, rate, root;
  Eps<Real> eps;
  Pairs<Real> ahead;
  bool inside;

  explicit AdamPace(const UpdateCall& call)
      : gain1(Real(1 - call.step->beta1)), gain2(Real(1 - call.step->beta2)),
        rate(Real(call.step->rate / unbiased(call.step->beta1, call))),
        root(Real(1 / std::sqrt(unbiased(call.step->beta2, call)))),
        eps(Real(call.step->eps_inside_root ? call.step->eps * unbiased(call.step->beta2, call) : call.step->eps),
            call.step->eps_inside_root),
        inside(call.step->eps_inside_root) {
    if (call.deferred && call.deferred->momentum)
      ahead = {static_cast<const Pair<Real>*>(call.deferred->lookahead), call.deferred->num_pairs, inside};
  }

  static double unbiased(double beta, const UpdateCall& call) { return 1 - std::pow(beta, double(call.step->step)); }

  // What m is multiplied by and subtracted from the row, by this step alone; `bare`: the root of v and what of eps is inside.
  Real now(Real bare) const { return rate / (root * bare + eps.outside); }
};

template <class Real>
struct Adam {
  static constexpr int VECTORS = 2;
  AdamPace<Real> pace;
  explicit Adam(const UpdateCall& call) : pace(call) {}

  template <int DIM, class W, class S>
  void operator()(const Row<W, S, Real>& row) const {
    if (pace.inside || pace.ahead.count > 1) move_by_pairs(row);
    else if (pace.ahead.count == 0) move<DIM, false, false>(row);
    else if (!row.deferred.pairs.move()) move<DIM, true, false>(row);
    else move<DIM, true, true>(row);
  }

 private:
  template <int DIM, bool IS_AHEAD, bool HAS_DRIFT, class W, class S>
  void move(const Row<W, S, Real>& row) const {
    const int64_t n = length<DIM>(row.dim);
    const Real factor = row.keep * row.deferred.decay, fade1 = row.fade1, fade2 = row.fade2;
    const Real gain1 = pace.gain1, gain2 = pace.gain2;
    const Pair<Real> none{0, 1, 0, 1}, ahead = IS_AHEAD ? *pace.ahead.pairs : none;
    const Pair<Real> drift = HAS_DRIFT ? row.deferred.pairs.pairs->times(row.keep) : none;
    W* __restrict w = row.w;
    S* __restrict ms = row.vectors;
    S* __restrict vs = row.vectors + n;
    const Real* __restrict gs = row.g;
    EVENKEEL_SIMD
    for (int64_t i = 0; i < n; ++i) {
      const Real g = gs[i], m = Real(load(ms[i])), v = Real(load(vs[i]));
      Real theta = factor * load(w[i]);
      if constexpr (HAS_DRIFT) theta -= drift.outside(std::sqrt(v)) * m;
      const Real first = fade1 * m + gain1 * g, second = fade2 * v + gain2 * g * g;
      store(ms[i], first);
      store(vs[i], second);
      const Real bare = std::sqrt(second);
      theta -= (IS_AHEAD ? pace.now(bare) + ahead.outside(bare) : pace.now(bare)) * first;
      store_drawn(w[i], theta, is_half<W> ? row.words[i] : 0);
    }
  }

  // More than one pair, or eps inside the root: one code for all lengths of rows.
  template <class W, class S>
  __attribute__((noinline)) void move_by_pairs(const Row<W, S, Real>& row) const {
    const Real factor = row.keep * row.deferred.decay;
    Real drift[CHUNK], ahead[CHUNK], second[CHUNK];
    for (int64_t start = 0; start < row.dim; start += CHUNK) {
      const int64_t n = std::min(CHUNK, row.dim - start);
      W* __restrict w = row.w + start;
      S* __restrict ms = row.vectors + start;
      S* __restrict vs = row.vectors + row.dim + start;
      const Real* __restrict gs = row.g + start;
      for (int64_t i = 0; i < n; ++i) second[i] = Real(load(vs[i]));
      row.deferred.pairs.losses(drift, second, n, row.keep);
      EVENKEEL_SIMD
      for (int64_t i = 0; i < n; ++i) {
        second[i] = row.fade2 * second[i] + pace.gain2 * gs[i] * gs[i];
        store(vs[i], second[i]);
      }
      pace.ahead.losses(ahead, second, n, 1);
      EVENKEEL_SIMD
      for (int64_t i = 0; i < n; ++i) {
        const Real m = Real(load(ms[i])), first = row.fade1 * m + pace.gain1 * gs[i];
        store(ms[i], first);
        const Real theta = factor * load(w[i]) - drift[i] * m - (pace.now(std::sqrt(second[i] + pace.eps.inside)) + ahead[i]) * first;
        store_drawn(w[i], theta, is_half<W> ? row.words[start + i] : 0);
      }
    }
  }
};

template <class Real>
struct RowwiseAdam {
  static constexpr int VECTORS = 1;
  AdamPace<Real> pace;
  explicit RowwiseAdam(const UpdateCall& call) : pace(call) {}

  template <int DIM, class W, class S>
  void operator()(const Row<W, S, Real>& row) const {
    const Real before = Real(load(*row.value));
    const Real after = row.fade2 * before + pace.gain2 * mean_square(row.g, row.dim);
    store(*row.value, after);
    const Real factor = row.keep * row.deferred.decay, share = row.deferred.pairs.loss(before, row.keep);
    const Real step = pace.ahead.count ? pace.now(std::sqrt(after + pace.eps.inside)) + pace.ahead.loss(after, 1) : extended_pace(after);
    EVENKEEL_SIMD
    for (int64_t i = 0; i < length<DIM>(row.dim); ++i) {
      const Real m = Real(load(row.vectors[i])), first = row.fade1 * m + pace.gain1 * row.g[i];
      store(row.vectors[i], first);
      store_drawn(row.w[i], factor * load(row.w[i]) - share * m - step * first, is_half<W> ? row.words[i] : 0);
    }
  }

 private:
  // AdamPace's without momentum, both parts of its quotient times another root: its last bit is that of runs so far.
  Real extended_pace(Real v) const {
    const Real now = pace.root * std::sqrt(v + pace.eps.inside) + pace.eps.outside;
    const Real other = pace.inside ? std::sqrt(v + 1) : std::sqrt(v) + 1;
    return pace.rate * other / (now * other);
  }
};

template <class W, class S, int DIM, class Rule>
void update_rows(const UpdateCall& call, const Entries& entries, Scratch& scratch) {
  using Real = typename Sums<W>::type;
  const Tables& tables = *call.tables;
  const Step& step = *call.step;
  const Rule rule(call);
  const Real* grads = static_cast<const Real*>(call.records[0].grad);
  const Real* beta_powers = static_cast<const Real*>(step.beta_powers);
  int64_t widest = 0;
  for (int64_t t = 0; t < tables.num_tables; ++t) widest = std::max(widest, tables.tables[t].dim);
  widest = (widest + 15) / 16 * 16;
  Real* sums = reinterpret_cast<Real*>(scratch.sums.at_least(call.num_threads * widest * int64_t(sizeof(Real))));
  uint32_t* drawn = reinterpret_cast<uint32_t*>(scratch.words.at_least(is_half<W> ? call.num_threads * widest * 4 : 0));
  for_tasks(call.num_threads, entries.num_tasks, [&](int64_t number, int worker) {
    const Task& task = entries.tasks[number];
    const Feature& table = tables.tables[task.table];
    const int64_t dim = length<DIM>(table.dim), width = Rule::VECTORS * dim;
    W* weights = static_cast<W*>(tables.weights) + table.weight_base;
    S* vectors = static_cast<S*>(tables.vectors) + table.vector_base;
    S* values = static_cast<S*>(tables.row_values) + table.step_base;
    int32_t* last_steps = tables.last_steps + table.step_base;
    Real* sum = sums + worker * widest;
    uint32_t* words = drawn + worker * widest;
    // Wide rows one by one: a block of them has more cache lines than a core can wait for.
    const bool in_blocks = block_of(dim * int64_t(sizeof(W) + Rule::VECTORS * sizeof(S) + sizeof(Real))) == MAX_BLOCK;
    int64_t fetched = task.first, fetched_row = -1, first = task.first;
    for (int64_t number_of_row = 0; number_of_row < task.num_rows; ++number_of_row) {
      const int64_t end = entries.ends[task.first + number_of_row], r = entries.row(first);
      int64_t stop = end + AHEAD;
      if (in_blocks) stop = fetched < end + MAX_BLOCK ? end + 2 * MAX_BLOCK : fetched;
      for (stop = std::min(stop, task.end); fetched < stop; ++fetched) {
        const int64_t ahead = entries.row(fetched);
        if (ahead != fetched_row) {
          prefetch<true>(weights + ahead * dim, dim);
          if constexpr (Rule::VECTORS > 0) prefetch<true>(vectors + ahead * width, width);
          prefetch<true>(last_steps + ahead, 1);
          if (tables.row_values) prefetch<true>(values + ahead, 1);
          fetched_row = ahead;
        }
        prefetch<false>(grads + entries.place(fetched), dim);
      }
      const Real* g = sum_gradients<DIM>(entries, grads, first, end, Real(step.scale), sum, dim);
      first = end;
      if (step.clip > 0) {
        const double norm = std::sqrt(sum_of_squares(g, dim));
        if (norm > step.clip) {
          const Real shrink = Real(step.clip / norm);
          for (int64_t i = 0; i < dim; ++i) sum[i] = g[i] * shrink;
          g = sum;
        }
      }
      const int64_t last = last_steps[r];
      last_steps[r] = int32_t(step.step);
      const int64_t num_skipped = last > 0 || step.from_start ? step.step - 1 - last : 0;
      Row<W, S, Real> row{weights + r * dim, vectors + r * width, values + r, g, words, {}, 0, 1, 1, dim};
      if (call.deferred) row.deferred = correction<Real>(*call.deferred, last);
      row.keep = Real((1 - std::min(1.0, step.alpha * double(num_skipped))) * step.decay_factor);
      const int64_t passed = step.dense_moments ? num_skipped + 1 : 1;
      if (passed < step.num_powers) row.fade1 = beta_powers[2 * passed], row.fade2 = beta_powers[2 * passed + 1];
      else row.fade1 = Real(std::pow(step.beta1, double(passed))), row.fade2 = Real(std::pow(step.beta2, double(passed)));
      if (step.moments_decay) row.fade1 *= row.deferred.decay, row.fade2 *= row.deferred.decay * row.deferred.decay;
      if constexpr (is_half<W>) draw_words(words, uint64_t(step.step), uint64_t(r), table, dim);
      rule.template operator()<DIM>(row);
    }
  });
}

template <class W, class S, int DIM>
void update_as(const UpdateCall& call, const Entries& entries, Scratch& scratch) {
  using Real = typename Sums<W>::type;
  switch (call.step->rule) {
    // It has no state, of whatever type.
    case SGD: return update_rows<W, float, DIM, Sgd<Real>>(call, entries, scratch);
    case ADAGRAD: case RMSPROP: return update_rows<W, S, DIM, SquaredGradients<Real>>(call, entries, scratch);
    case ROWWISE_ADAGRAD: return update_rows<W, S, DIM, RowwiseAdagrad<Real>>(call, entries, scratch);
    case ADAM: return update_rows<W, S, DIM, Adam<Real>>(call, entries, scratch);
    case ROWWISE_ADAM: return update_rows<W, S, DIM, RowwiseAdam<Real>>(call, entries, scratch);
  }
}

// The squared norm of each touched row's summed gradient, added up row by row in one order: not task by task, as how
// rows are cut into tasks depends on the number of threads.
template <class Real>
double squared_norm(const UpdateCall& call, const Entries& entries, Scratch& scratch) {
  const Tables& tables = *call.tables;
  const Real* grads = static_cast<const Real*>(call.records[0].grad);
  int64_t widest = 0;
  for (int64_t t = 0; t < tables.num_tables; ++t) widest = std::max(widest, tables.tables[t].dim);
  Real* sums = reinterpret_cast<Real*>(scratch.sums.at_least(call.num_threads * widest * int64_t(sizeof(Real))));
  double* squares = scratch.squares.at_least(entries.num_keys);
  for_tasks(call.num_threads, entries.num_tasks, [&](int64_t number, int worker) {
    const Task& task = entries.tasks[number];
    const int64_t dim = tables.tables[task.table].dim;
    int64_t first = task.first;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      const int64_t end = entries.ends[task.first + row];
      if (end - 1 + AHEAD < task.end) prefetch<false>(grads + entries.place(end - 1 + AHEAD), dim);
      squares[task.first + row] = sum_of_squares(sum_gradients<0>(entries, grads, first, end, Real(1), sums + worker * widest, dim), dim);
      first = end;
    }
  });
  double total = 0;
  for (int64_t number = 0; number < entries.num_tasks; ++number)
    for (int64_t row = 0; row < entries.tasks[number].num_rows; ++row) total += squares[entries.tasks[number].first + row];
  return total;
}
