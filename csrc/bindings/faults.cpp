// torch operator by which tests inject faults, see host/faults.h.
#include "common/operators.h"
#include "host/faults.h"

namespace oper::host {
namespace {

void arm_fault(int64_t point, int64_t count, int64_t signal, int64_t sleep_us, int64_t note_fd) {
  STD_TORCH_CHECK(point >= 0 && point < kNumFaultPoints, "arm_fault: there is no point ", point);
  arm({static_cast<FaultPoint>(point), count, static_cast<int32_t>(signal), sleep_us,
       static_cast<int>(note_fd)});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(arm_fault, "(int point, int count, int signal, int sleep_us, int note_fd) -> ()");
}

}  // namespace oper::host
