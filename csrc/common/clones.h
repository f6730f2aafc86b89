// Functions compiled for several vector widths, selected at run time.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OPER_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define OPER_CLONES
#endif
// For functions that they call: only inlined code is compiled for the vector width of the caller.
#define OPER_INLINE __attribute__((always_inline)) inline
