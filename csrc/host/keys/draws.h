// What is drawn for a key depends on the key and on what for, and on nothing else.
#pragma once

#include "common/philox.h"

namespace oper::host {

inline Philox4 draw_bits(uint64_t seed, uint64_t of, uint32_t number, uint32_t purpose) {
  return philox4x32({{static_cast<uint32_t>(of), static_cast<uint32_t>(of >> 32), number, purpose}},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace oper::host
