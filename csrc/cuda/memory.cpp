// Device memory that other processes map: CUDA virtual memory with POSIX descriptors.
//
// The driver's entry points are looked up at run time, so that nothing links to libcuda.
#include "cuda/memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace oper::device {
namespace {

template <class Function>
Function entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000,
                                                              cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(found);
}

// Calls a driver function by name and throws with that name when it fails.
#define OPER_DRIVER(function, ...)                                                        \
  do {                                                                                    \
    const CUresult result = entry<decltype(&function)>(#function)(__VA_ARGS__);           \
    if (result != CUDA_SUCCESS)                                                           \
      throw std::runtime_error(std::string(#function) + " failed with CUDA driver error " + \
                               std::to_string(static_cast<int>(result)));                 \
  } while (false)

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

// Maps an allocation at an address of the driver's choice; the handle is given up in any case, and
// the memory lives as long as a mapping does.
int64_t map(CUmemGenericAllocationHandle handle, size_t bytes, int device) {
  CUdeviceptr address = 0;
  try {
    OPER_DRIVER(cuMemAddressReserve, &address, bytes, 0, 0, 0);
    OPER_DRIVER(cuMemMap, address, bytes, 0, handle, 0);
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OPER_DRIVER(cuMemSetAccess, address, bytes, &access, 1);
  } catch (...) {
    entry<decltype(&cuMemRelease)>("cuMemRelease")(handle);
    if (address) entry<decltype(&cuMemAddressFree)>("cuMemAddressFree")(address, bytes);
    throw;
  }
  OPER_DRIVER(cuMemRelease, handle);
  return static_cast<int64_t>(address);
}

}  // namespace

SharedMemory create_shared(int64_t bytes, int device) {
  cudaFree(nullptr);  // makes the context current
  const CUmemAllocationProp prop = properties(device);
  size_t unit = 0;
  OPER_DRIVER(cuMemGetAllocationGranularity, &unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  const size_t size = (static_cast<size_t>(bytes) + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle{};
  OPER_DRIVER(cuMemCreate, &handle, size, &prop, 0);
  int fd = -1;
  try {
    OPER_DRIVER(cuMemExportToShareableHandle, &fd, handle,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  } catch (...) {
    entry<decltype(&cuMemRelease)>("cuMemRelease")(handle);
    throw;
  }
  const int64_t address = map(handle, size, device);
  if (cudaMemset(reinterpret_cast<void*>(address), 0, size) != cudaSuccess)
    throw std::runtime_error("shared device memory cannot be written");
  return {fd, address, static_cast<int64_t>(size)};
}

int64_t attach_shared(int fd, int64_t bytes, int device) {
  CUmemGenericAllocationHandle handle{};
  OPER_DRIVER(cuMemImportFromShareableHandle, &handle,
              reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return map(handle, static_cast<size_t>(bytes), device);
}

void release_shared(int64_t address, int64_t bytes) {
  OPER_DRIVER(cuMemUnmap, static_cast<CUdeviceptr>(address), static_cast<size_t>(bytes));
  OPER_DRIVER(cuMemAddressFree, static_cast<CUdeviceptr>(address), static_cast<size_t>(bytes));
}

}  // namespace oper::device
