// What every argument that Python passes begins with, so that a library which was built for other
// arguments refuses them instead of reading past their end.
#pragma once

#include <cstdint>

constexpr int64_t kSearchVersion = 1;  // of all arguments: VERSION in oper/search/native.py

struct OperArgument {
  int64_t size, version;  // bytes of the whole argument
};

// Whether an argument is what this library was built for. Functions return 0 then, else 1.
template <class Argument>
bool is_known(const Argument& x) {
  return x.argument.size == int64_t(sizeof(Argument)) && x.argument.version == kSearchVersion;
}
