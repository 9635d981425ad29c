// Elements as they are stored, and as they are computed with. Conversions are branch-free, so that loops vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define EVENKEEL_SIMD _Pragma("omp simd")
#define EVENKEEL_INLINE __attribute__((always_inline)) inline

// How an element is stored, by torch's names. Sums and outputs are float, and double where rows are double.
enum ElementType : int32_t { FLOAT64, FLOAT32, FLOAT16, BFLOAT16 };

struct Float16 { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline double load(double value) { return value; }
inline float load(float value) { return value; }
inline float load(BFloat16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }

inline float load(Float16 value) {
  const uint32_t size = (value.bits & 0x7FFFu) << 13, sign = (value.bits & 0x8000u) << 16;
  const uint32_t exponent = size & 0x0F800000u;
  const float normal = bits_as<float>(size + (112u << 23));
  const float infinite = bits_as<float>(size + (224u << 23));
  const float subnormal = bits_as<float>(size + (113u << 23)) - bits_as<float>(113u << 23);
  const float found = exponent == 0 ? subnormal : exponent == 0x0F800000u ? infinite : normal;
  return bits_as<float>(bits_as<uint32_t>(found) | sign);
}

inline void store(double& place, double value) { place = value; }
inline void store(double& place, float value) { place = value; }
inline void store(float& place, float value) { place = value; }
inline void store(float& place, double value) { place = float(value); }

inline void store(BFloat16& place, float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  place.bits = uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline void store(Float16& place, float value) {
  const uint32_t bits = bits_as<uint32_t>(value), sign = bits & 0x80000000u, size = bits ^ sign;
  // To the nearest, ties to even: of normal halves by carrying, of subnormal ones by adding what shifts them into place.
  const uint32_t normal = (size + 0xC8000FFFu + (size >> 13 & 1u)) >> 13;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - bits_as<uint32_t>(0.5f);
  const uint32_t special = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t half = size >= 0x47800000u ? special : size < 0x38800000u ? subnormal : normal;
  place.bits = uint16_t(half | sign >> 16);
}

inline void store(BFloat16& place, double value) { store(place, float(value)); }
inline void store(Float16& place, double value) { store(place, float(value)); }

// Rows of halves are rounded by a drawn word: embeddings.optim.stochastic_rounding.
inline void store_drawn(double& place, double value, uint32_t) { place = value; }
inline void store_drawn(float& place, float value, uint32_t) { place = value; }

inline void store_drawn(BFloat16& place, float value, uint32_t word) {
  place.bits = uint16_t((bits_as<uint32_t>(value) + (word & 0xFFFFu)) >> 16);
}

inline void store_drawn(Float16& place, float value, uint32_t word) {
  const uint32_t bits = bits_as<uint32_t>(value), sign = bits & 0x80000000u, size = bits ^ sign;
  const uint32_t exponent = size >> 23 < 113u ? 113u : size >> 23;
  // The distance of halves at this value. Dividing by it is exact.
  const float unit = bits_as<float>((exponent - 10u) << 23);
  const float units = bits_as<float>(size) / unit, below = std::floor(units);
  const float up = uint32_t((units - below) * 4294967296.0f) > word ? 1.0f : 0.0f;
  const float rounded = bits_as<float>(bits_as<uint32_t>((below + up) * unit) | sign);
  store(place, size < 0x7F800000u ? rounded : value);
}

// The type of sums over rows of W.
template <class W> struct Sums { using type = float; };
template <> struct Sums<double> { using type = double; };

template <class T> constexpr bool is_half = sizeof(T) == 2;
