// Packed slots against a plain loop over their bits: every width, lengths around whole words and
// blocks, buffers of exactly the promised size. Built with sanitizers, see test_requested_slots.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "../../csrc/host/exchange/packing.cpp"

namespace {

using namespace oper;
using namespace oper::host;

void check(bool ok, int64_t n, int32_t bits, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "broken: %ld slots of %d bits: %s\n", static_cast<long>(n), bits, what);
  std::abort();
}

void round_trip(int64_t n, int32_t bits, std::mt19937_64& random) {
  const int64_t size = packed_bytes(n, bits);
  check(size % 4 == 0 && size * 8 >= n * bits && size * 8 < n * bits + 32, n, bits, "size");
  const std::unique_ptr<uint32_t[]> slots(new uint32_t[n]), back(new uint32_t[n]);
  const std::unique_ptr<char[]> message(new char[size]), wanted(new char[size]());
  const uint32_t largest = bits == 32 ? UINT32_MAX : (uint32_t{1} << bits) - 1;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t drawn = random();
    slots[i] = drawn % 4 == 0 ? largest : static_cast<uint32_t>(drawn >> 32) & largest;
    for (int32_t b = 0; b < bits; ++b)
      wanted[(i * bits + b) / 8] |= static_cast<char>((slots[i] >> b & 1) << (i * bits + b) % 8);
  }
  pack_slots(message.get(), slots.get(), n, bits);
  check(std::memcmp(message.get(), wanted.get(), static_cast<size_t>(size)) == 0, n, bits, "bits");
  unpack_slots(back.get(), message.get(), n, bits);
  check(std::memcmp(back.get(), slots.get(), static_cast<size_t>(n * 4)) == 0, n, bits, "slots");
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  for (int32_t bits = 1; bits <= 32; ++bits) {
    check(slot_bits(int64_t{1} << bits) == bits, 0, bits, "of 2^bits rows");
    check(slot_bits((int64_t{1} << bits) + 1) == std::min(bits + 1, 32), 0, bits, "of a row more");
    for (int64_t n = 0; n <= 130; ++n) round_trip(n, bits, random);
    for (int64_t n : {1023, 1024, 1025, 5000}) round_trip(n, bits, random);
  }
  check(slot_bits(1) == 1 && slot_bits(3) == 2, 0, 0, "of few rows");
  std::puts("ok");
}
