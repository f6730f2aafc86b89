// Header of every argument structure that Python passes: a library that was built for other
// structures refuses them, instead of reading past their end.
#pragma once

#include <cstdint>

constexpr int64_t kSearchVersion = 5;  // of all argument structures; VERSION in oper/search/native.py

struct OperArgument {
  int64_t size, version;  // size of the entire structure in bytes
};

// Whether an argument has the layout of this library. Entry points return 0 if it has, else 1.
template <class Argument>
bool is_known(const Argument& x) {
  return x.argument.size == int64_t(sizeof(Argument)) && x.argument.version == kSearchVersion;
}
