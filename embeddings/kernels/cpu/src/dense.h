// The passes of dense layers that are no matrix product, over float matrices [num_rows, num_columns]. Each thread takes
// blocks of rows; sums over rows are added block by block: the same bits for any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "interface.h"
#include "rows.h"
#include "threads.h"

constexpr int64_t DENSE_BLOCK = 64;  // rows

template <class Function>
void for_row_blocks(int64_t num_rows, int num_threads, Function&& function) {
  for_tasks(num_threads, (num_rows + DENSE_BLOCK - 1) / DENSE_BLOCK, [&](int64_t block, int worker) {
    function(block, block * DENSE_BLOCK, std::min((block + 1) * DENSE_BLOCK, num_rows), worker);
  });
}

// Calls function(start, end, sum) for blocks of rows, each with zeros to add its rows up in; sums: of all blocks.
template <class Function>
void for_summed_blocks(int64_t num_rows, int64_t num_columns, float* sums, int num_threads, Function&& function) {
  const int64_t num_blocks = (num_rows + DENSE_BLOCK - 1) / DENSE_BLOCK;
  std::vector<float> parts(size_t(num_blocks * num_columns));
  for_row_blocks(num_rows, num_threads, [&](int64_t block, int64_t start, int64_t end, int) {
    function(start, end, parts.data() + block * num_columns);
  });
  std::memset(sums, 0, size_t(num_columns) * sizeof(float));
  for (int64_t block = 0; block < num_blocks; ++block)
    for (int64_t column = 0; column < num_columns; ++column) sums[column] += parts[size_t(block * num_columns + column)];
}

// outputs = max(outputs + bias, 0); NaN stays NaN.
inline void bias_relu(const DenseCall& call) {
  const int64_t num_columns = call.num_columns;
  const float* __restrict bias = static_cast<const float*>(call.bias);
  for_row_blocks(call.num_rows, call.num_threads, [&](int64_t, int64_t start, int64_t end, int) {
    for (int64_t row = start; row < end; ++row) {
      float* __restrict output = static_cast<float*>(call.output) + row * num_columns;
      EVENKEEL_SIMD
      for (int64_t column = 0; column < num_columns; ++column) {
        const float value = output[column] + bias[column];
        output[column] = value < 0 ? 0 : value;
      }
    }
  });
}

// gradient = gradient where outputs > 0, else 0; sums: its sums over rows.
inline void relu_backward(const DenseCall& call) {
  const int64_t num_columns = call.num_columns;
  for_summed_blocks(
      call.num_rows, num_columns, static_cast<float*>(call.sums), call.num_threads,
      [&](int64_t start, int64_t end, float* __restrict sum) {
        for (int64_t row = start; row < end; ++row) {
          float* __restrict gradient = static_cast<float*>(call.gradient) + row * num_columns;
          const float* __restrict output = static_cast<const float*>(call.output) + row * num_columns;
          EVENKEEL_SIMD
          for (int64_t column = 0; column < num_columns; ++column) {
            const float value = output[column] <= 0 ? 0 : gradient[column];
            gradient[column] = value;
            sum[column] += value;
          }
        }
      });
}

inline void cross(const CrossCall& call) {
  const int64_t num_columns = call.num_columns;
  const float* __restrict bias = static_cast<const float*>(call.bias);
  for_row_blocks(call.num_rows, call.num_threads, [&](int64_t, int64_t start, int64_t end, int) {
    for (int64_t row = start; row < end; ++row) {
      const int64_t at = row * num_columns;
      const float* first = static_cast<const float*>(call.first) + at;
      const float* input = static_cast<const float*>(call.input) + at;
      const float* __restrict mapped = static_cast<const float*>(call.mapped) + at;
      float* __restrict output = static_cast<float*>(call.output) + at;
      EVENKEEL_SIMD
      for (int64_t column = 0; column < num_columns; ++column)
        output[column] = first[column] * (mapped[column] + bias[column]) + input[column];
    }
  });
}

template <bool ADDS, bool INPUT_IS_FIRST>
void cross_backward_as(const CrossCall& call) {
  const int64_t num_columns = call.num_columns;
  const float* __restrict bias = static_cast<const float*>(call.bias);
  for_summed_blocks(
      call.num_rows, num_columns, static_cast<float*>(call.sums), call.num_threads,
      [&](int64_t start, int64_t end, float* __restrict sum) {
        for (int64_t row = start; row < end; ++row) {
          const int64_t at = row * num_columns;
          const float* __restrict gradient = static_cast<const float*>(call.gradient) + at;
          const float* __restrict first = static_cast<const float*>(call.first) + at;
          const float* __restrict mapped = static_cast<const float*>(call.mapped) + at;
          float* __restrict of_mapped = static_cast<float*>(call.mapped_gradient) + at;
          float* __restrict of_first = static_cast<float*>(call.first_gradient) + at;
          EVENKEEL_SIMD
          for (int64_t column = 0; column < num_columns; ++column) {
            const float value = gradient[column] * first[column];
            of_mapped[column] = value;
            sum[column] += value;
            float more = gradient[column] * (mapped[column] + bias[column]);
            if (INPUT_IS_FIRST) more += gradient[column];
            of_first[column] = ADDS ? of_first[column] + more : more;
          }
        }
      });
}

inline void cross_backward(const CrossCall& call) {
  if (call.adds && call.input_is_first) cross_backward_as<true, true>(call);
  else if (call.adds) cross_backward_as<true, false>(call);
  else if (call.input_is_first) cross_backward_as<false, true>(call);
  else cross_backward_as<false, false>(call);
}

// Calls function with the length of vectors, for usual ones as a constant.
template <class Function>
void with_dim(int64_t dim, Function&& function) {
  switch (dim) {
    case 8: return function(std::integral_constant<int64_t, 8>{});
    case 16: return function(std::integral_constant<int64_t, 16>{});
    case 32: return function(std::integral_constant<int64_t, 32>{});
    case 64: return function(std::integral_constant<int64_t, 64>{});
    default: return function(dim);
  }
}

// pairs = sum over pairs f < g of <v_f, v_g>, as (|sum_f v_f|^2 - sum_f |v_f|^2) / 2.
inline void fields(const FieldsCall& call) {
  std::vector<float> scratch(size_t(call.num_threads * call.dim));
  with_dim(call.dim, [&](auto dim) {
    for_row_blocks(call.num_samples, call.num_threads, [&](int64_t, int64_t start, int64_t end, int worker) {
      float* __restrict squares = scratch.data() + worker * dim;
      for (int64_t sample = start; sample < end; ++sample) {
        const float* __restrict row = static_cast<const float*>(call.rows) + sample * call.num_fields * (dim + 1);
        float* __restrict vector = static_cast<float*>(call.vectors) + sample * call.num_fields * dim;
        float* __restrict sum = static_cast<float*>(call.sums) + sample * dim;
        float first_order = 0, pairs = 0;
        for (int64_t i = 0; i < dim; ++i) sum[i] = squares[i] = 0;
        for (int64_t field = 0; field < call.num_fields; ++field, row += dim + 1, vector += dim) {
          EVENKEEL_SIMD
          for (int64_t i = 0; i < dim; ++i) {
            vector[i] = row[i];
            sum[i] += row[i];
            squares[i] += row[i] * row[i];
          }
          first_order += row[dim];
        }
        for (int64_t i = 0; i < dim; ++i) pairs += sum[i] * sum[i] - squares[i];
        static_cast<float*>(call.first_order)[sample] = first_order;
        static_cast<float*>(call.pairs)[sample] = pairs / 2;
      }
    });
  });
}

inline void fields_backward(const FieldsCall& call) {
  const auto at = [](const void* gradient, int64_t i) { return gradient ? static_cast<const float*>(gradient)[i] : 0; };
  with_dim(call.dim, [&](auto dim) {
    for_row_blocks(call.num_samples, call.num_threads, [&](int64_t, int64_t start, int64_t end, int) {
      for (int64_t sample = start; sample < end; ++sample) {
        const int64_t first = sample * call.num_fields * dim;
        const float* __restrict vector = static_cast<const float*>(call.vectors) + first;
        const float* __restrict gradient = static_cast<const float*>(call.vector_gradient);
        const float* __restrict sum = static_cast<const float*>(call.sums) + sample * dim;
        float* __restrict row = static_cast<float*>(call.row_gradient) + sample * call.num_fields * (dim + 1);
        const float of_first_order = at(call.first_order_gradient, sample), of_pairs = at(call.pair_gradient, sample);
        if (gradient) gradient += first;
        for (int64_t field = 0; field < call.num_fields; ++field, row += dim + 1, vector += dim) {
          if (gradient) {
            EVENKEEL_SIMD
            for (int64_t i = 0; i < dim; ++i) row[i] = gradient[i] + of_pairs * (sum[i] - vector[i]);
            gradient += dim;
          } else {
            EVENKEEL_SIMD
            for (int64_t i = 0; i < dim; ++i) row[i] = of_pairs * (sum[i] - vector[i]);
          }
          row[dim] = of_first_order;
        }
      }
    });
  });
}
