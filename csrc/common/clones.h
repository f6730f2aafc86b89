// Functions compiled for several vector widths, one of which the dynamic linker selects.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OPER_CLONES_FOR(...) __attribute__((target_clones(__VA_ARGS__)))
#else
#define OPER_CLONES_FOR(...)
#endif
#define OPER_CLONES OPER_CLONES_FOR("avx2", "default")
// For functions that they call: only inlined code is compiled for the vector width of the caller.
#define OPER_INLINE inline __attribute__((always_inline))
