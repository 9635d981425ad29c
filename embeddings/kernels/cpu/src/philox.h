// Philox4x32-10 (Salmon et al., SC 2011): embeddings/tables/philox.py.
#pragma once

#include <cstdint>

constexpr uint64_t PHILOX_M0 = 0xD2511F53, PHILOX_M1 = 0xCD9E8D57;
constexpr uint32_t PHILOX_W0 = 0x9E3779B9, PHILOX_W1 = 0xBB67AE85;
constexpr uint64_t LOW_WORD_STREAM = 1ull << 31, ONE_WORD_LIMIT = 1ull << 22;

struct Words { uint32_t lane[4]; };

inline Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round, k0 += PHILOX_W0, k1 += PHILOX_W1) {
    const uint64_t p0 = PHILOX_M0 * c0, p1 = PHILOX_M1 * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
  }
  return {{c0, c1, c2, c3}};
}
