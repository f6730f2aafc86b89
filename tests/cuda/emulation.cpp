// What tests ask the emulation.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "emulation.h"

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
  oper::emulation::enqueue(stream_at(stream), [=] {
    std::memcpy(to.data_ptr(), from.data_ptr(),
                static_cast<size_t>(to.numel() * to.element_size()));
  });
}
void ignore_waits(bool ignored) { oper::emulation::ignores_waits = ignored; }
// Once nothing is under way. Streams stay, as torch's do: batches that are forgotten later name them.
void stream_release_memory() { oper::emulation::kept.clear(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def("take_launches() -> int");
  m.def("take_waits() -> int");
  m.def("stream_create() -> int");
  m.def("stream_current() -> int");
  m.def("stream_use(int stream) -> ()");
  m.def("stream_given(int stream) -> int");
  m.def("stream_wait(int stream, int other, int given) -> ()");
  m.def("stream_finish(int stream) -> ()");
  m.def("stream_copy(int stream, Tensor(a!) to, Tensor source) -> ()");
  m.def("ignore_waits(bool ignored) -> ()");
  m.def("stream_release_memory() -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(oper_emulated, CompositeExplicitAutograd, m) {
  m.impl("take_launches", TORCH_BOX(&take_launches));
  m.impl("take_waits", TORCH_BOX(&take_waits));
  m.impl("stream_create", TORCH_BOX(&stream_create));
  m.impl("stream_current", TORCH_BOX(&stream_current));
  m.impl("stream_use", TORCH_BOX(&stream_use));
  m.impl("stream_given", TORCH_BOX(&stream_given));
  m.impl("stream_wait", TORCH_BOX(&stream_wait));
  m.impl("stream_finish", TORCH_BOX(&stream_finish));
  m.impl("stream_copy", TORCH_BOX(&stream_copy));
  m.impl("ignore_waits", TORCH_BOX(&ignore_waits));
  m.impl("stream_release_memory", TORCH_BOX(&stream_release_memory));
}
