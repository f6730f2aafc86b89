// Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). Shared by host and device.
//
// A draw depends only on its key, counter and purpose: there is no state, so that neither the order
// of draws nor the number of threads matters. Any run, plan or machine draws the same number for
// the same row, column and step.
#pragma once

#include "common/platform.h"

namespace oper {

struct Philox4 {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u,
                   kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;

OPER_HD Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{kPhiloxFactor0} * a, q = uint64_t{kPhiloxFactor1} * c;
    const uint32_t high_p = static_cast<uint32_t>(p >> 32), high_q = static_cast<uint32_t>(q >> 32);
    a = high_q ^ b ^ key0;
    c = high_p ^ d ^ key1;
    b = static_cast<uint32_t>(q);
    d = static_cast<uint32_t>(p);
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return {{a, b, c, d}};
}

// Purposes of draws, which are part of the counter, so that different uses draw different numbers.
constexpr uint32_t kRoundingRows = 0x4f504552u;
constexpr uint32_t kRoundingMessages = 0x80000000u;  // lower 31 bits: sender, receiver and contents
constexpr uint32_t kRoundingGroups = 0x47000000u;    // lower 24 bits: the replica group that sends

// The source of random numbers for rounding one table's rows in one step.
struct RoundingKey {
  uint32_t key0 = 0, key1 = 0;            // from the seed and the table's name
  uint32_t step_low = 0, step_high = 0;   // number of the optimizer's step
};

// Random numbers of 16 bits for the columns 8 * block .. 8 * block + 7 of a row: the halves of the
// words in order, the low one first. `row`: its id in the whole table, whatever the plan.
OPER_HD Philox4 rounding_bits(const RoundingKey& key, uint32_t row, uint32_t block,
                              uint32_t purpose = kRoundingRows) {
  // A row has at most 2^20 columns, and steps stay below 2^44.
  return philox4x32({{row, block | (key.step_high << 20), key.step_low, purpose}}, key.key0,
                    key.key1);
}

// 128 random bits that depend on the arguments only, e.g. on a key (`of`) and the number of an
// update.
OPER_HD Philox4 draw_bits(uint64_t seed, uint64_t of, uint32_t number, uint32_t purpose) {
  return philox4x32({{static_cast<uint32_t>(of), static_cast<uint32_t>(of >> 32), number, purpose}},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace oper
