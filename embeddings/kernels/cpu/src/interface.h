// What Python hands over: one struct for each call. embeddings/kernels/cpu/library.py reads them from here, so each member
// is written as `type name, name;`.
#pragma once

#include <cstdint>

enum ElementType : int32_t;  // elements.h
enum Rule : int32_t;         // update.h
enum Status : int32_t { OK, NO_MEMORY };
enum Fault : int64_t { NO_FAULT, BAD_ID, BAD_OFFSETS };

// A feature and the table it reads. Row numbers in [first_row, first_row + num_live) add something to a sum; padding
// and ids outside the table do not.
struct Feature {
  int64_t table, column, dim, mean, num_rows, first_row, num_live;
  int64_t weight_base, vector_base, step_base, row_bits;
  // The table's key of stochastic rounding, and where its rows and columns start in the whole table.
  uint64_t key0, key1, whole_row, whole_column;
};

struct Tables {
  void* weights;
  void* vectors;
  void* row_values;
  int32_t* last_steps;
  const Feature* features;  // by table
  const Feature* tables;    // the first feature of each table
  int64_t num_features, num_tables, total_dim;
  ElementType weight_type, state_type;
  int32_t pooled, any_mean;
};

// Ids feature by feature, sample by sample.
struct Batch {
  const int64_t* ids;
  const int64_t* offsets;  // [num_features * batch_size + 1]
  const void* weights;     // [num_ids], of the type of sums, or null
  int64_t num_ids, batch_size;
};

// embeddings.optim.deferred_update.DeferredUpdateCoefficients in the type of sums; null where reading a row corrects nothing.
struct DeferredUpdate {
  const void* decay;      // [num_decay], its last entry holds for every later age
  const void* near;       // [num_near, num_pairs, 4]: by age, drift and eps of two nodes each
  const void* lookahead;  // [num_pairs, 4], as near: what the next step's update stores its rows ahead by
  const double* log_sums; // [num_log_sums], or none
  int64_t completed, num_decay, num_near, num_pairs, num_log_sums;
  double log_now, log_slope;
  int32_t from_start, eps_inside_root, momentum;
};

// Swaps of Stochastic Shared Embeddings: embeddings.sse.SwapDraws.
struct SwapWords {
  uint64_t distances, place, key0, key1, num_others, first_live, graph_start, threshold_start, stop, block_shift;
};

struct Swaps {
  const SwapWords* features;
  const int64_t* graph_offsets;
  const int32_t* neighbours;
  const uint64_t* thresholds;
  int64_t sample_offset;
  uint64_t step;
};

struct LookupCall {
  const Tables* tables;
  const DeferredUpdate* deferred;
  const Swaps* swaps;
  Batch batch;
  void* output;     // [batch_size, total_dim], without pooling [num_ids, dim]
  int64_t* used;    // the ids after swaps; null without swaps
  int64_t* faults;  // [num_features, 2], zeroed: (Fault, id)
  int32_t ignore_bounds, num_threads;
};

struct Record {
  Batch batch;  // ids after swaps
  const void* grad;
};

// An optimizer at one step, in numbers.
struct Step {
  double rate, beta1, beta2, eps, alpha, decay_factor, clip, scale;
  const void* beta_powers;  // [num_powers, 2]: beta1^n and beta2^n
  int64_t num_powers, step;
  Rule rule;
  int32_t dense_moments, eps_inside_root, from_start, moments_decay;
};

struct UpdateCall {
  const Tables* tables;
  const DeferredUpdate* deferred;
  const Step* step;
  const Record* records;
  int64_t num_records;
  void* scratch;
  int32_t num_threads;
};

// Masks of dropout: trainer/models/layers/dropout.py.
struct KeepMaskCall {
  uint8_t* keep;             // [num_samples, num_positions, 4 num_quads]
  const int64_t* positions;  // [num_samples, num_positions]
  const int64_t* samples;    // [num_samples]
  int64_t num_samples, num_positions, num_quads, step, site;
  uint64_t threshold, key0, key1;
};

// Passes over float matrices [num_rows, num_columns] of dense layers: embeddings/kernels/cpu/dense.py.
struct DenseCall {
  void* output;  // of the layer; bias_relu writes it
  const void* bias;  // [num_columns]
  void* gradient;  // of the output; relu_backward masks it
  void* sums;  // [num_columns]
  int64_t num_rows, num_columns;
  int32_t num_threads;
};

// A cross layer: output = first (mapped + bias) + input, mapped = W input.
struct CrossCall {
  const void* first;
  const void* input;
  const void* mapped;
  const void* bias;
  void* output;
  const void* gradient;  // of the output
  void* mapped_gradient;
  void* first_gradient;
  void* sums;  // [num_columns], of mapped_gradient
  int64_t num_rows, num_columns;
  int32_t adds;            // to first_gradient, which is written otherwise
  int32_t input_is_first;  // the gradient of the input as a term is part of first_gradient
  int32_t num_threads;
};

// Fields' rows [v | w] of a sample, v of dim columns: their vectors, the sum of w, and the products of pairs of vectors.
struct FieldsCall {
  const void* rows;  // [num_samples, num_fields, dim + 1]
  void* vectors;  // [num_samples, num_fields, dim]
  void* first_order;  // [num_samples]
  void* pairs;  // [num_samples]
  void* sums;  // [num_samples, dim], of vectors
  const void* vector_gradient;  // null: zeros, as below
  const void* first_order_gradient;
  const void* pair_gradient;
  void* row_gradient;
  int64_t num_samples, num_fields, dim;
  int32_t num_threads;
};

struct SwapCall {
  Batch batch;  // of one feature
  const Swaps* swaps;
  int64_t* used;
  int32_t num_threads;
};
