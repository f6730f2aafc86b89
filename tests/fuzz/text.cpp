// Fuzzing of the parser of delimited text (csrc/data/text.cpp): `text RUNS SEED`, or linked with a
// coverage-guided fuzzer through LLVMFuzzerTestOneInput. Built with the address and undefined
// behaviour sanitizers, which end the program at the first access outside of its input.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/data/text.cpp"

namespace {

using namespace oper::data;

constexpr int64_t kMaxColumns = 8, kMaxLines = 64;

void check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// Lines one by one give the same rows as blocks of them do.
void check_lines(const char* text, int64_t size, std::vector<Column> columns,
                 std::vector<std::vector<int64_t>>& wanted,
                 const std::vector<std::vector<int64_t>>& outs,
                 const std::vector<int64_t>& numbers) {
  std::vector<std::vector<uint8_t>> there(columns.size());
  std::vector<const uint8_t*> found;
  for (size_t k = 0; k < columns.size(); ++k) {
    there[k].resize(wanted[k].size());
    found.push_back(columns[k].is_there);
    columns[k].out = wanted[k].data();
    if (columns[k].is_there) columns[k].is_there = there[k].data();
  }
  int64_t row = 0, line = 0;
  for (const char* p = text; p != text + size; ++line) {
    auto feed = static_cast<const char*>(std::memchr(p, '\n', text + size - p));
    const char* end = feed - (feed != p && feed[-1] == '\r');
    if (read_line(columns.data(), static_cast<int64_t>(columns.size()), {p, end, '\t'}, row))
      check(numbers[row++] == line, "the same lines are regular");
    p = feed + 1;
  }
  for (size_t k = 0; k < columns.size(); ++k) {
    const int32_t parse = columns[k].parse;
    const size_t bytes = parse == kBit ? 1 : parse == kNumber || parse == kHex32 ? 4 : 8;
    check(!std::memcmp(wanted[k].data(), outs[k].data(), bytes * row), "the same numbers");
    check(!found[k] || !std::memcmp(there[k].data(), found[k], row), "the same are missing");
  }
}

// The first bytes choose the columns, the others are the text.
void parse_one(const uint8_t* input, size_t size) {
  if (size < 10) return;
  const int64_t num_columns = 1 + input[0] % kMaxColumns;
  const int64_t capacity = 1 + input[1] % kMaxLines;
  // Of exactly the size that is promised, so that any byte beyond is noticed.
  const size_t num_text = size - 10;
  std::unique_ptr<char[]> text(new char[num_text]);
  std::memcpy(text.get(), input + 10, num_text);
  using Outs = std::vector<std::vector<int64_t>>;
  Outs outs(num_columns, std::vector<int64_t>(capacity)), wanted = outs;
  std::vector<std::vector<uint8_t>> there(num_columns, std::vector<uint8_t>(capacity));
  std::vector<Column> columns(num_columns);
  for (int64_t k = 0; k < num_columns; ++k) {
    const uint8_t kind = input[2 + k];
    const bool has_token = kind & 64;
    columns[k] = {kind % 7,
                  (kind >> 3) & 1,
                  kind & 128 ? 0 : -1000000000000000000,
                  1000000000000000000,
                  outs[k].data(),
                  kind & 16 ? there[k].data() : nullptr,
                  has_token ? "NULL" : nullptr,
                  has_token ? 4 : 0};
  }
  std::vector<int64_t> numbers(capacity), irregular(3 * capacity);
  int64_t rows = 0, lines = 0, num_irregular = 0;
  const int64_t taken =
      oper_data_parse(text.get(), static_cast<int64_t>(num_text), '\t', columns.data(), num_columns,
                      capacity, numbers.data(), irregular.data(), &rows, &lines, &num_irregular);
  check(taken >= 0 && taken <= static_cast<int64_t>(num_text), "takes what is there");
  check(rows + num_irregular == lines && lines <= capacity, "every line is one or the other");
  check(!taken || text[taken - 1] == '\n', "takes whole lines");
  int64_t feeds = 0;
  for (int64_t k = 0; k < taken; ++k) feeds += text[k] == '\n';
  check(feeds == lines, "counts the lines");
  check(lines == capacity || !std::memchr(text.get() + taken, '\n', num_text - taken),
        "leaves no whole line");
  int64_t last = -1;
  for (int64_t k = 0; k < rows; ++k) {
    check(numbers[k] > last && numbers[k] < lines, "rows are lines, in order");
    last = numbers[k];
  }
  check_lines(text.get(), taken, columns, wanted, outs, numbers);
  for (int64_t k = 0; k < num_irregular; ++k)
    check(0 <= irregular[3 * k + 1] && irregular[3 * k + 1] < irregular[3 * k + 2] &&
              irregular[3 * k + 2] <= taken,
          "places of the other lines");
  for (int64_t k = 0; k < num_columns; ++k)
    for (int64_t row = 0; row < rows; ++row)
      if (columns[k].parse == kBit)
        check((reinterpret_cast<int8_t*>(outs[k].data())[row] & ~1) == 0, "a bit is a bit");
      else if (columns[k].parse == kInteger || columns[k].parse == kWhole)
        check(outs[k][row] <= columns[k].high && (outs[k][row] >= columns[k].low || !outs[k][row]),
              "within the bounds");
}

// xorshift64* (Vigna, 2016).
uint64_t state;
uint64_t random_number() {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1du;
}

const char* const kSeeds[] = {
    "1\t12345678\t-7\tdeadbeef\n0\t\t99999999\t00ff17aa\n1\t0\t-12345678\t\r\n",
    "0123abcd\n\ndeadbeef\r\n-1234567\n",
    "1\t17\tdeadbeef\t0\t-4\t3.25\n\t\t\t\t\t\n0\t999999999\t0123abcd\t1\t7.0\t1e5\r\n",
    "NULL\t-1\tNULL\t18446744073709551615\t999999999999999999\t00000000\n1\t2\n",
    "5\t-0\t-0.0\t.5\t5.\t1.7976931348623157e308\nxyz\tABCDEF01\t0xff\t--1\t+1\t\n",
};
const char kBytes[] = "\t\n\r\0000123456789abcdefg.-+eNUL \xff";

std::vector<uint8_t> make_one() {
  std::vector<uint8_t> data(10);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random_number());
  const char* seed = kSeeds[random_number() % 5];
  // Once or many times: blocks take whole lines, and what follows them must be there.
  for (uint64_t times = 1 + (random_number() % 2) * (random_number() % 12); times-- > 0;)
    data.insert(data.end(), seed, seed + std::strlen(seed));
  for (uint64_t edits = random_number() % 8; edits-- > 0;) {
    const size_t at = 10 + random_number() % (data.size() - 9);
    const size_t length = 1 + random_number() % 12;
    switch (random_number() % 4) {
      case 0:
        if (at < data.size()) data[at] = static_cast<uint8_t>(random_number());
        break;
      case 1:
        data.erase(data.begin() + at, data.begin() + std::min(data.size(), at + length));
        break;
      case 2: {
        const std::vector<uint8_t> part(data.begin() + at,
                                        data.begin() + std::min(data.size(), at + length));
        data.insert(data.begin() + at, part.begin(), part.end());
        break;
      }
      default:
        data.insert(data.begin() + at,
                    static_cast<uint8_t>(kBytes[random_number() % (sizeof kBytes - 1)]));
    }
  }
  return data;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parse_one(data, size);
  return 0;
}

#ifndef OPER_WITH_LIBFUZZER
int main(int argc, char** argv) {
  const int64_t runs = argc > 1 ? std::atoll(argv[1]) : 1000000;
  state = 0x9e3779b97f4a7c15u ^ (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  for (int64_t k = 0; k < runs; ++k) {
    const std::vector<uint8_t> data = make_one();
    parse_one(data.data(), data.size());
  }
  std::printf("%lld executions\n", static_cast<long long>(runs));
  return 0;
}
#endif
