// Operators by which the tests inject faults.
#include <torch/csrc/stable/library.h>

#include "host/faults.h"

namespace oper::host {
namespace {

void arm_fault_op(int64_t point, int64_t count, int64_t signal, int64_t sleep_us, int64_t note_fd) {
  STD_TORCH_CHECK(point >= 0 && point < kNumFaultPoints, "arm_fault: there is no point ", point);
  arm_fault({static_cast<FaultPoint>(point), count, static_cast<int32_t>(signal), sleep_us,
             static_cast<int>(note_fd)});
}

}  // namespace
}  // namespace oper::host

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("arm_fault(int point, int count, int signal, int sleep_us, int note_fd) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("arm_fault", TORCH_BOX(&oper::host::arm_fault_op));
}
