// The threads of an emulated device, and what tests ask the emulation.
#include <csetjmp>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <ucontext.h>

#include <utility>

#include "common/handles.h"
#include "emulation.h"

namespace oper::emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;

// Runs one thread of a block, then one of the next block, and so on, because starting a fiber takes
// two system calls.
struct Fiber {
  jmp_buf here;
  char* stack = nullptr;
  bool ended = true;
};

struct Machine {
  Fiber fibers[kMaxThreads];
  // Operations that each thread has done: with lanes of its warp, by log2 of the number of lanes
  // that take part, and with its block.
  int64_t done[6][kMaxThreads], block_done[kMaxThreads];
  uint64_t slots[6][2][kMaxThreads];  // the values of the last two operations with lanes
  jmp_buf scheduler;
  int current = 0, num_threads = 0;
  const std::function<void()>* body = nullptr;
  std::mt19937_64 random{std::strtoull(
      std::getenv("OPER_EMULATION_SEED") ? std::getenv("OPER_EMULATION_SEED") : "1", nullptr, 10)};

  ~Machine() {
    for (Fiber& fiber : fibers) std::free(fiber.stack);
  }
};

Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

void fiber_main() {
  for (Machine& m = machine();;) {
    (*m.body)();
    m.fibers[m.current].ended = true;
    give_way();
  }
}

int level_of(unsigned mask) { return __builtin_ctz(__builtin_popcount(mask)); }

void run_block(const std::function<void()>& body) {
  Machine& m = machine();
  m.body = &body;
  std::vector<int> order(static_cast<size_t>(m.num_threads));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), m.random);
  std::memset(m.done, 0, sizeof(m.done));
  std::memset(m.block_done, 0, sizeof(m.block_done));
  for (int t = 0; t < m.num_threads; ++t) m.fibers[t].ended = false;
  volatile size_t at = 0;
  volatile int left = m.num_threads;
  while (left > 0) {
    const int t = order[at];
    at = at + 1 == order.size() ? 0 : at + 1;
    Fiber& fiber = m.fibers[t];
    if (fiber.ended) continue;
    m.current = t;
    thread_index.x = static_cast<uint32_t>(t);
    if (_setjmp(m.scheduler) == 0) {
      if (fiber.stack != nullptr) _longjmp(fiber.here, 1);
      fiber.stack = static_cast<char*>(std::malloc(kStackBytes));
      ucontext_t start;
      getcontext(&start);
      start.uc_stack.ss_sp = fiber.stack;
      start.uc_stack.ss_size = kStackBytes;
      start.uc_link = nullptr;
      makecontext(&start, fiber_main, 0);
      setcontext(&start);
    }
    if (m.fibers[m.current].ended) left = left - 1;
  }
}

// Called before each access to memory.
void check_access(const void* at) {
  if (!is_device_memory(at) || side == Side::kDriver) return;
  const uint64_t region =
      static_cast<uint64_t>(static_cast<const char*>(at) - memory_begin) / kRegionBytes;
  const int owner = static_cast<int>(region / 2);
  const bool is_arena = region % 2 != 0;
  if (side == Side::kKernel &&
      (owner == running.rank || (is_arena && (running.near >> owner & 1) != 0)))
    return;
  const char* const what = is_arena ? "the arena" : "memory";
  if (side == Side::kKernel)
    std::fprintf(stderr, "emulation: a kernel of device %d accesses %s of device %d\n", running.rank,
                 what, owner);
  else
    std::fprintf(stderr, "emulation: host code accesses %s of device %d\n", what, owner);
  std::abort();
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s (block %u, thread %u)\n", what, block_index.x,
               thread_index.x);
  std::abort();
}

void give_way() {
  Machine& m = machine();
  if (_setjmp(m.fibers[m.current].here) == 0) _longjmp(m.scheduler, 1);
}

const uint64_t* sync_warp(unsigned mask, uint64_t value) {
  Machine& m = machine();
  const int me = m.current, level = level_of(mask), warp = me / 32 * 32;
  if (!(mask >> (me % 32) & 1)) fail("a lane uses a mask that leaves it out");
  const int64_t turn = m.done[level][me]++;
  m.slots[level][turn % 2][me] = value;
  for (unsigned missing = mask;;) {
    for (unsigned lanes = missing; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (m.done[level][warp + lane] > turn)
        missing &= ~(1u << lane);
      else if (m.fibers[warp + lane].ended)
        fail("a lane has ended that others wait for");
    }
    if (missing == 0) return m.slots[level][turn % 2] + warp;
    give_way();
  }
}

int lane_of_warp() { return machine().current % 32; }

void sync_block() {
  Machine& m = machine();
  const int64_t turn = m.block_done[m.current]++;
  for (int t = 0; t < m.num_threads; ++t)
    while (m.block_done[t] <= turn && !m.fibers[t].ended) give_way();
}

void run_grid(const std::function<void()>& body, int64_t grid, int block) {
  Machine& m = machine();
  m.num_threads = block;
  block_size.x = static_cast<uint32_t>(block);
  grid_size.x = static_cast<uint32_t>(grid);
  std::vector<uint32_t> order(static_cast<size_t>(grid));
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), m.random);
  for (uint32_t b : order) {
    block_index.x = b;
    run_block(body);
  }
}

}  // namespace oper::emulation

// The compiler calls these by the option -fsanitize=kernel-address, whose run-time library this is.
// Accesses of 16 bytes may be pairs of 8 bytes each.
#define OPER_CHECKED(name, alignment, ...)                                                     \
  void __asan_##name##_noabort(__VA_ARGS__) {                                                  \
    oper::emulation::check_access(at);                                                         \
    if (oper::emulation::side == oper::emulation::Side::kKernel)                               \
      oper::emulation::check_aligned(at, alignment);                                           \
  }
#define OPER_CHECKED_SIZE(size)                           \
  OPER_CHECKED(load##size, size < 8 ? size : 8, void* at) \
  OPER_CHECKED(store##size, size < 8 ? size : 8, void* at)
extern "C" {
OPER_CHECKED_SIZE(1)
OPER_CHECKED_SIZE(2)
OPER_CHECKED_SIZE(4)
OPER_CHECKED_SIZE(8)
OPER_CHECKED_SIZE(16)
OPER_CHECKED(loadN, 1, void* at, long)
OPER_CHECKED(storeN, 1, void* at, long)
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(void*) {}
void __asan_after_dynamic_init() {}
}

namespace {

using oper::emulation::Event;
using oper::emulation::Stream;
using torch::stable::Tensor;

// Kernels that this thread has launched since it last asked; those of CUB as CUDA's 13.0 has them.
int64_t take_launches() {
  const int64_t count = oper::emulation::num_launches;
  oper::emulation::num_launches = 0;
  return count;
}

// How often it has waited for a stream since it last asked.
int64_t take_waits() {
  const int64_t count = oper::emulation::num_waits;
  oper::emulation::num_waits = 0;
  return count;
}

// Names of the ranges that it has begun since it last asked, with a line each, as uint8.
Tensor take_ranges() {
  std::string names;
  for (const char* name : oper::emulation::ranges) names.append(name).append("\n");
  oper::emulation::ranges.clear();
  char* const copy = static_cast<char*>(std::malloc(names.size() + 1));
  std::memcpy(copy, names.data(), names.size());
  return oper::tensor_at(copy, {static_cast<int64_t>(names.size())},
                         torch::headeronly::ScalarType::Byte, oper::kHostMemory, std::free);
}

// Streams are known by their addresses, 0 being the null stream; an event by its stream and how much of
// its work comes before.
Stream* stream_at(int64_t address) { return reinterpret_cast<Stream*>(address); }

int64_t stream_create() { return reinterpret_cast<int64_t>(new Stream); }
int64_t stream_current() { return reinterpret_cast<int64_t>(oper::emulation::current_stream); }
void stream_use(int64_t stream) { oper::emulation::current_stream = stream_at(stream); }
int64_t stream_given(int64_t stream) { return oper::emulation::record(stream_at(stream)).given; }
void stream_wait(int64_t stream, int64_t other, int64_t given) {
  oper::emulation::wait(stream_at(stream), Event{stream_at(other), given});
}
void stream_finish(int64_t stream) { cudaStreamSynchronize(stream_at(stream)); }
void stream_copy(int64_t stream, Tensor to, Tensor from) {
  oper::emulation::enqueue_copy(stream_at(stream), [=] {
    std::memcpy(to.data_ptr(), from.data_ptr(),
                static_cast<size_t>(to.numel() * to.element_size()));
  });
}
// Begins to capture a stream's work, or ends it. Returns how many calls have failed since the last
// time, because CUDA does not allow them during a capture.
int64_t stream_capture(int64_t stream, bool begins) {
  Stream* const captured = stream_at(stream);
  if (begins) captured->graph.clear();
  captured->is_captured = begins;
  oper::emulation::num_captured += begins ? 1 : -1;
  return std::exchange(oper::emulation::num_forbidden, 0);
}
bool stream_is_captured(int64_t stream) { return stream != 0 && stream_at(stream)->is_captured; }
void stream_replay(int64_t stream) {
  for (const auto& work : stream_at(stream)->graph) oper::emulation::enqueue(stream_at(stream), work);
}
void fail_allocations(int64_t count) { oper::emulation::num_failing = static_cast<int>(count); }
// Memory of a device, in its arena or not, uint8 [bytes].
Tensor memory(int64_t rank, bool in_arena, int64_t bytes) {
  char* const memory =
      oper::emulation::allocate(static_cast<int>(rank), in_arena, static_cast<size_t>(bytes));
  return oper::tensor_at(memory, {bytes}, torch::headeronly::ScalarType::Byte, oper::kHostMemory,
                         oper::emulation::release);
}
void ignore_waits(bool ignored) { oper::emulation::ignores_waits = ignored; }
// Once nothing is under way. Streams stay, as torch's do: batches that are forgotten later name them.
void stream_release_memory() { oper::emulation::kept.clear(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def("take_launches() -> int");
  m.def("take_waits() -> int");
  m.def("take_ranges() -> Tensor");
  m.def("stream_create() -> int");
  m.def("stream_current() -> int");
  m.def("stream_use(int stream) -> ()");
  m.def("stream_given(int stream) -> int");
  m.def("stream_wait(int stream, int other, int given) -> ()");
  m.def("stream_finish(int stream) -> ()");
  m.def("stream_copy(int stream, Tensor(a!) to, Tensor source) -> ()");
  m.def("stream_capture(int stream, bool begins) -> int");
  m.def("stream_is_captured(int stream) -> bool");
  m.def("stream_replay(int stream) -> ()");
  m.def("fail_allocations(int count) -> ()");
  m.def("memory(int rank, bool in_arena, int bytes) -> Tensor");
  m.def("ignore_waits(bool ignored) -> ()");
  m.def("stream_release_memory() -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(oper_emulated, CompositeExplicitAutograd, m) {
  m.impl("take_launches", TORCH_BOX(&take_launches));
  m.impl("take_waits", TORCH_BOX(&take_waits));
  m.impl("take_ranges", TORCH_BOX(&take_ranges));
  m.impl("stream_create", TORCH_BOX(&stream_create));
  m.impl("stream_current", TORCH_BOX(&stream_current));
  m.impl("stream_use", TORCH_BOX(&stream_use));
  m.impl("stream_given", TORCH_BOX(&stream_given));
  m.impl("stream_wait", TORCH_BOX(&stream_wait));
  m.impl("stream_finish", TORCH_BOX(&stream_finish));
  m.impl("stream_copy", TORCH_BOX(&stream_copy));
  m.impl("stream_capture", TORCH_BOX(&stream_capture));
  m.impl("stream_is_captured", TORCH_BOX(&stream_is_captured));
  m.impl("stream_replay", TORCH_BOX(&stream_replay));
  m.impl("fail_allocations", TORCH_BOX(&fail_allocations));
  m.impl("memory", TORCH_BOX(&memory));
  m.impl("ignore_waits", TORCH_BOX(&ignore_waits));
  m.impl("stream_release_memory", TORCH_BOX(&stream_release_memory));
}
