#include "host/faults.h"

#include <unistd.h>

#include <csignal>

#include "host/counters/phases.h"

namespace oper::host {
namespace {

Fault armed{};
std::atomic<int64_t> left{0};

}  // namespace

std::atomic<int32_t> armed_point{0};

void arm(const Fault& fault) {
  armed_point.store(0);
  armed = fault;
  left.store(fault.count);
  armed_point.store(static_cast<int32_t>(fault.point));
}

void meet_fault() {
  if (left.fetch_sub(1) != 1) return;
  armed_point.store(0);
  const int64_t ns = PhaseTimes::now_ns();
  // If the time cannot be written, the fault does not happen, which its test notices.
  if (armed.note_fd >= 0 && write(armed.note_fd, &ns, sizeof ns) != sizeof ns) return;
  if (armed.signal != 0) kill(getpid(), armed.signal);
  if (armed.sleep_us > 0) usleep(static_cast<useconds_t>(armed.sleep_us));
}

}  // namespace oper::host
