// Functions compiled for several vector widths, selected at run time.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OPER_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define OPER_CLONES
#endif
