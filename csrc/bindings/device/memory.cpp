// torch operators for memory that other processes can map: CUDA virtual memory with POSIX file
// descriptors, on the device or, for tiers in host memory, on the NUMA node next to it.
//
// An arena has `bytes`. Its ranges [begin, end) in the flat list `host_ranges`, ascending, are in
// host memory, which kernels reach over the device's link. All are multiples of kPartBytes. The
// functions of the driver are looked up at run time, so that nothing links to libcuda.
#include <cuda.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "bindings/device/tables.h"
#include "common/operators.h"

namespace oper::device {
namespace {

constexpr int64_t kPartBytes = 2 << 20;

// The driver's function with this name.
template <class Function>
Function entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(found);
}

// Calls a driver function given by name; throws an error with that name if it fails.
#define OPER_DRIVER(function, ...)                                                          \
  do {                                                                                      \
    const CUresult result = entry<decltype(&function)>(#function)(__VA_ARGS__);             \
    if (result != CUDA_SUCCESS)                                                             \
      throw std::runtime_error(std::string(#function) + " failed with CUDA driver error " + \
                               std::to_string(static_cast<int>(result)));                   \
  } while (false)

// A range of an arena with one kind of memory.
struct Part {
  size_t begin, bytes;
  bool on_host;
};

std::vector<Part> cut(int64_t bytes, const std::vector<int64_t>& host_ranges) {
  std::vector<Part> parts;
  int64_t at = 0;
  const auto add = [&](int64_t end, bool on_host) {
    if (end == at) return;
    if (end < at || end % kPartBytes)
      throw std::runtime_error("internal: ranges of host memory are out of order");
    parts.push_back({static_cast<size_t>(at), static_cast<size_t>(end - at), on_host});
    at = end;
  };
  for (size_t k = 0; k + 1 < host_ranges.size(); k += 2) {
    add(host_ranges[k], false);
    add(host_ranges[k + 1], true);
  }
  add(bytes, false);
  return parts;
}

// The NUMA node nearest to a device, or 0 if the driver does not know it.
int host_node(int device) {
  int node = -1, maps_it = 0;
  OPER_DRIVER(cuDeviceGetAttribute, &maps_it,
              CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  if (!maps_it)
    throw std::runtime_error(
        "this device or its driver cannot map host memory by virtual memory management: keep all "
        "tiers in device memory");
  OPER_DRIVER(cuDeviceGetAttribute, &node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device);
  return node < 0 ? 0 : node;
}

CUmemAllocationProp properties(int device, bool on_host) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = on_host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = on_host ? host_node(device) : device;
  return prop;
}

// Releases the handles of allocations when it is destroyed; their memory exists as long as it is
// mapped.
struct Allocations {
  std::vector<CUmemGenericAllocationHandle> handles;
  ~Allocations() {
    for (CUmemGenericAllocationHandle handle : handles)
      entry<decltype(&cuMemRelease)>("cuMemRelease")(handle);
  }
};

// Maps one allocation per part at an address of the driver's choice.
int64_t map(const Allocations& made, const std::vector<Part>& parts, int device) {
  const size_t total = parts.back().begin + parts.back().bytes;
  CUdeviceptr address = 0;
  size_t mapped = 0;
  try {
    OPER_DRIVER(cuMemAddressReserve, &address, total, kPartBytes, 0, 0);
    for (; mapped < parts.size(); ++mapped)
      OPER_DRIVER(cuMemMap, address + parts[mapped].begin, parts[mapped].bytes, 0,
                  made.handles[mapped], 0);
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OPER_DRIVER(cuMemSetAccess, address, total, &access, 1);
  } catch (...) {
    for (size_t k = 0; k < mapped; ++k)
      entry<decltype(&cuMemUnmap)>("cuMemUnmap")(address + parts[k].begin, parts[k].bytes);
    if (address) entry<decltype(&cuMemAddressFree)>("cuMemAddressFree")(address, total);
    throw;
  }
  return static_cast<int64_t>(address);
}

// Allocates zeroed memory that other processes can attach. Returns its address, then the file
// descriptor of each of its parts, which the caller closes.
std::vector<int64_t> device_memory_create(int64_t bytes, std::vector<int64_t> host_ranges,
                                          int64_t device) {
  const OnDevice on(device);
  check(cudaFree(nullptr), "cannot use the device");  // makes its context current
  const std::vector<Part> parts = cut(bytes, host_ranges);
  Allocations allocations;
  std::vector<int64_t> made{0};
  try {
    for (const Part& part : parts) {
      const CUmemAllocationProp prop = properties(static_cast<int>(device), part.on_host);
      CUmemGenericAllocationHandle handle{};
      OPER_DRIVER(cuMemCreate, &handle, part.bytes, &prop, 0);
      allocations.handles.push_back(handle);
      int fd = -1;
      OPER_DRIVER(cuMemExportToShareableHandle, &fd, handle,
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      made.push_back(fd);
    }
    made[0] = map(allocations, parts, static_cast<int>(device));
    // Part by part, since each is of one kind of memory; before any stream or peer can write there.
    for (const Part& part : parts)
      check(cudaMemset(reinterpret_cast<char*>(made[0]) + part.begin, 0, part.bytes),
            "shared device memory cannot be written");
    check(cudaDeviceSynchronize(), "shared device memory cannot be written");
  } catch (...) {
    for (size_t k = 1; k < made.size(); ++k) close(static_cast<int>(made[k]));
    throw;
  }
  return made;
}

// Maps memory that another process has created with these `bytes` and `host_ranges`; returns its
// address.
int64_t device_memory_attach(std::vector<int64_t> fds, int64_t bytes,
                             std::vector<int64_t> host_ranges, int64_t device) {
  const OnDevice on(device);
  const std::vector<Part> parts = cut(bytes, host_ranges);
  if (fds.size() != parts.size())
    throw std::runtime_error("internal: " + std::to_string(fds.size()) +
                             " descriptors for an arena of " + std::to_string(parts.size()) +
                             " parts");
  Allocations allocations;
  for (int64_t fd : fds) {
    CUmemGenericAllocationHandle handle{};
    OPER_DRIVER(cuMemImportFromShareableHandle, &handle,
                reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    allocations.handles.push_back(handle);
  }
  return map(allocations, parts, static_cast<int>(device));
}

void device_memory_release(int64_t address, int64_t bytes, std::vector<int64_t> host_ranges) {
  // Unmapped part by part, as it was mapped.
  for (const Part& part : cut(bytes, host_ranges))
    OPER_DRIVER(cuMemUnmap, static_cast<CUdeviceptr>(address) + part.begin, part.bytes);
  OPER_DRIVER(cuMemAddressFree, static_cast<CUdeviceptr>(address), static_cast<size_t>(bytes));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(device_memory_create, "(int bytes, int[] host_ranges, int device) -> int[]");
  OPER_OPERATOR(device_memory_attach,
                "(int[] fds, int bytes, int[] host_ranges, int device) -> int");
  OPER_OPERATOR(device_memory_release, "(int address, int bytes, int[] host_ranges) -> ()");
}

}  // namespace oper::device
