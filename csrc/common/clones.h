// Functions that the compiler compiles once per instruction set; the dynamic linker selects one of
// the versions when the library is loaded (target_clones). Not with sanitizers, whose runtime is
// not yet initialised at that time.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OPER_CLONES_FOR(...) __attribute__((target_clones(__VA_ARGS__)))
#else
#define OPER_CLONES_FOR(...)
#endif
#define OPER_CLONES OPER_CLONES_FOR("avx2", "default")
// For the functions that they call: only inlined code is compiled for the caller's instruction set.
#define OPER_INLINE inline __attribute__((always_inline))
