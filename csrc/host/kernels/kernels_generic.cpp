// Kernels for one instruction set; see kernels.h.
#include "host/kernels/kernels.h"

#define OPER_KERNELS kgeneric
#define OPER_KERNELS_TABLE kKernelsGeneric
#define OPER_KERNELS_NAME "generic"
#include "host/kernels/kernels.inl"
