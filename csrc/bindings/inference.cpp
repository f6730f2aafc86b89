// torch operators for read-only tables that many processes share; see host/publication.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "host/publication.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace oper::host {
namespace {

Control& control_at(int64_t address) { return *reinterpret_cast<Control*>(address); }

// Bytes [bytes] of mapped memory; the caller keeps the mapping alive.
Tensor segment_bytes(int64_t address, int64_t bytes) {
  const int64_t sizes[] = {bytes}, strides[] = {1};
  return torch::stable::from_blob(
      reinterpret_cast<void*>(address), {sizes, 1}, {strides, 1},
      torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte);
}

int64_t publication_control_bytes() { return static_cast<int64_t>(sizeof(Control)); }

int64_t publication_slots() { return kReaderSlots; }

void publication_init(int64_t control) { init_control(control_at(control)); }

int64_t publication_epoch(int64_t control) { return control_at(control).epoch.load(); }

void publication_set_epoch(int64_t control, int64_t epoch) {
  control_at(control).epoch.store(epoch);
}

int64_t publication_pin(int64_t control, int64_t slot) { return pin(control_at(control), slot); }

void publication_unpin(int64_t control, int64_t slot, int64_t epoch) {
  unpin(control_at(control), slot, epoch);
}

std::vector<int64_t> publication_busy(int64_t control, int64_t buffer) {
  return busy_slots(control_at(control), buffer);
}

void publication_clear(int64_t control, int64_t slot) { clear_slot(control_at(control), slot); }

}  // namespace
}  // namespace oper::host

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("segment_bytes(int address, int bytes) -> Tensor");
  m.def("publication_control_bytes() -> int");
  m.def("publication_slots() -> int");
  m.def("publication_init(int control) -> ()");
  m.def("publication_epoch(int control) -> int");
  m.def("publication_set_epoch(int control, int epoch) -> ()");
  m.def("publication_pin(int control, int slot) -> int");
  m.def("publication_unpin(int control, int slot, int epoch) -> ()");
  m.def("publication_busy(int control, int buffer) -> int[]");
  m.def("publication_clear(int control, int slot) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("segment_bytes", TORCH_BOX(&oper::host::segment_bytes));
  m.impl("publication_control_bytes", TORCH_BOX(&oper::host::publication_control_bytes));
  m.impl("publication_slots", TORCH_BOX(&oper::host::publication_slots));
  m.impl("publication_init", TORCH_BOX(&oper::host::publication_init));
  m.impl("publication_epoch", TORCH_BOX(&oper::host::publication_epoch));
  m.impl("publication_set_epoch", TORCH_BOX(&oper::host::publication_set_epoch));
  m.impl("publication_pin", TORCH_BOX(&oper::host::publication_pin));
  m.impl("publication_unpin", TORCH_BOX(&oper::host::publication_unpin));
  m.impl("publication_busy", TORCH_BOX(&oper::host::publication_busy));
  m.impl("publication_clear", TORCH_BOX(&oper::host::publication_clear));
}
