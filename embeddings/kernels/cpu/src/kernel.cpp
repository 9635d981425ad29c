// What Python calls, and which code each call takes. Built once for each level of instructions; the bits are the same.
#include <algorithm>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "dense.h"
#include "id_map.h"
#include "lookup.h"
#include "update.h"

#define EVENKEEL_API extern "C" __attribute__((visibility("default")))

namespace {

template <class T> struct Type { using type = T; };

// Calls function with the types of rows, of state and, for the usual types, with the rows' length as a constant: loops
// over a row are then unrolled.
template <class Function>
void with_types(const Tables& tables, Function&& function) {
  // Rows of double have state of double, and no others have.
  const auto with_state = [&](auto weight) {
    switch (tables.state_type) {
      case FLOAT16: return function(weight, Type<Float16>{}, std::integral_constant<int, 0>{});
      case BFLOAT16: return function(weight, Type<BFloat16>{}, std::integral_constant<int, 0>{});
      case FLOAT64: case FLOAT32: break;
    }
    if constexpr (std::is_same_v<typename decltype(weight)::type, float>) {
      int64_t dim = tables.tables[0].dim;
      for (int64_t t = 1; t < tables.num_tables; ++t)
        if (tables.tables[t].dim != dim) dim = 0;
      switch (dim) {
        case 16: return function(weight, Type<float>{}, std::integral_constant<int, 16>{});
        case 32: return function(weight, Type<float>{}, std::integral_constant<int, 32>{});
        case 64: return function(weight, Type<float>{}, std::integral_constant<int, 64>{});
        case 128: return function(weight, Type<float>{}, std::integral_constant<int, 128>{});
      }
    }
    function(weight, Type<float>{}, std::integral_constant<int, 0>{});
  };
  switch (tables.weight_type) {
    case FLOAT64: return function(Type<double>{}, Type<double>{}, std::integral_constant<int, 0>{});
    case FLOAT32: return with_state(Type<float>{});
    case FLOAT16: return with_state(Type<Float16>{});
    case BFLOAT16: return with_state(Type<BFloat16>{});
  }
}

template <class Function>
int32_t with_memory(Function&& function) {
  try {
    function();
    return OK;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

template <class W, class S, int DIM>
void look_up_as(const LookupCall& call) {
  // Without momentum no state is read, of whatever type.
  if (!call.deferred) look_up<W, float, DIM, Reading::STORED>(call);
  else if (!call.deferred->momentum) look_up<W, float, DIM, Reading::DECAYED>(call);
  else if (call.tables->row_values) look_up<W, S, DIM, Reading::MOMENTUM_ROWWISE>(call);
  else look_up<W, S, DIM, Reading::MOMENTUM>(call);
}

template <class Real>
Entries entries_of(const UpdateCall& call) { return sort_entries<Real>(call, *static_cast<Scratch*>(call.scratch)); }

}  // namespace

EVENKEEL_API void* evenkeel_scratch_new() { return new (std::nothrow) Scratch; }
EVENKEEL_API void evenkeel_scratch_free(void* scratch) { delete static_cast<Scratch*>(scratch); }

EVENKEEL_API void evenkeel_lookup(const LookupCall* call) {
  with_types(*call->tables, [&](auto weight, auto state, auto dim) {
    look_up_as<typename decltype(weight)::type, typename decltype(state)::type, dim()>(*call);
  });
}

EVENKEEL_API int32_t evenkeel_update(const UpdateCall* call) {
  return with_memory([&] {
    Scratch& scratch = *static_cast<Scratch*>(call->scratch);
    const bool is_double = call->tables->weight_type == FLOAT64;
    const Entries entries = is_double ? entries_of<double>(*call) : entries_of<float>(*call);
    with_types(*call->tables, [&](auto weight, auto state, auto dim) {
      update_as<typename decltype(weight)::type, typename decltype(state)::type, dim()>(*call, entries, scratch);
    });
  });
}

EVENKEEL_API int32_t evenkeel_squared_norm(const UpdateCall* call, double* found) {
  return with_memory([&] {
    Scratch& scratch = *static_cast<Scratch*>(call->scratch);
    if (call->tables->weight_type == FLOAT64) *found = squared_norm<double>(*call, entries_of<double>(*call), scratch);
    else *found = squared_norm<float>(*call, entries_of<float>(*call), scratch);
  });
}

EVENKEEL_API void evenkeel_swap(const SwapCall* call) {
  const Bags bags(call->batch);
  const int64_t batch_size = call->batch.batch_size, num_blocks = (batch_size + MAX_SAMPLES - 1) / MAX_SAMPLES;
  for_tasks(call->num_threads, num_blocks, [&](int64_t block, int) {
    const int64_t start = block * MAX_SAMPLES, end = std::min(start + MAX_SAMPLES, batch_size);
    swap_block(bags, call->used, 0, start, end, *call->swaps, *call->swaps->features);
  });
}

EVENKEEL_API void evenkeel_keep_mask(const KeepMaskCall* call) {
  for (int64_t place = 0; place < call->num_samples * call->num_positions; ++place) {
    const uint32_t sample = uint32_t(call->samples[place / call->num_positions]);
    const uint32_t at = uint32_t(call->site << 16 | call->positions[place]);
    uint8_t* keep = call->keep + place * 4 * call->num_quads;
    for (int64_t quad = 0; quad < call->num_quads; ++quad) {
      const Words words = philox(uint32_t(call->step), sample, at, uint32_t(quad), uint32_t(call->key0), uint32_t(call->key1));
      for (int lane = 0; lane < 4; ++lane) keep[4 * quad + lane] = words.lane[lane] >= call->threshold;
    }
  }
}

EVENKEEL_API void evenkeel_bias_relu(const DenseCall* call) { bias_relu(*call); }
EVENKEEL_API int32_t evenkeel_relu_backward(const DenseCall* call) {
  return with_memory([&] { relu_backward(*call); });
}

EVENKEEL_API void evenkeel_cross(const CrossCall* call) { cross(*call); }
EVENKEEL_API int32_t evenkeel_cross_backward(const CrossCall* call) {
  return with_memory([&] { cross_backward(*call); });
}

EVENKEEL_API int32_t evenkeel_fields(const FieldsCall* call) {
  return with_memory([&] { fields(*call); });
}
EVENKEEL_API void evenkeel_fields_backward(const FieldsCall* call) { fields_backward(*call); }

EVENKEEL_API void evenkeel_id_map_find(const IdMap* map, const int64_t* ids, int64_t count, int64_t* entries) {
  find(*map, ids, count, entries);
}

EVENKEEL_API int64_t evenkeel_id_map_touch(
    const IdMap* map, const int64_t* ids, int64_t count, int64_t* entries, int32_t step, int64_t* misses) {
  return touch(*map, ids, count, entries, step, misses);
}

EVENKEEL_API int64_t evenkeel_id_map_admit(
    const IdMap* map, const int64_t* ids, int64_t* entries, const int64_t* misses, int64_t num_misses, int64_t* place,
    int32_t is_counted, int32_t step, int64_t* new_entries, int32_t refuse) {
  return admit(*map, ids, entries, misses, num_misses, place, is_counted, step, new_entries, refuse);
}

EVENKEEL_API void evenkeel_id_map_put(const IdMap* map, const int64_t* entries, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(*map, map->ids_of[entries[i]], entries[i]);
}

EVENKEEL_API void evenkeel_id_map_remove(const IdMap* map, const int64_t* entries, int64_t count) {
  remove_all(*map, entries, count);
}
