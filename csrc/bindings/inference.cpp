// torch operators for read-only tables that many processes share; see host/publication.h.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "common/operators.h"
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

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(segment_bytes, "(int address, int bytes) -> Tensor");
  OPER_OPERATOR(publication_control_bytes, "() -> int");
  OPER_OPERATOR(publication_slots, "() -> int");
  OPER_OPERATOR(publication_init, "(int control) -> ()");
  OPER_OPERATOR(publication_epoch, "(int control) -> int");
  OPER_OPERATOR(publication_set_epoch, "(int control, int epoch) -> ()");
  OPER_OPERATOR(publication_pin, "(int control, int slot) -> int");
  OPER_OPERATOR(publication_unpin, "(int control, int slot, int epoch) -> ()");
  OPER_OPERATOR(publication_busy, "(int control, int buffer) -> int[]");
  OPER_OPERATOR(publication_clear, "(int control, int slot) -> ()");
}

}  // namespace oper::host
