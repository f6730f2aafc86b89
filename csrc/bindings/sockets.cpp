// torch operators of exchanges over TCP connections, see host/exchange/sockets.h.
#include <tuple>
#include <vector>

#include "common/handles.h"
#include "common/operators.h"
#include "host/exchange/sockets.h"

namespace oper::host {
namespace {

Handles<Sockets>& all_sockets() { return all_handles<Sockets>(); }

// `connections`: file descriptors by rank, -1 for this one.
int64_t sockets_open(std::vector<int64_t> connections) {
  return all_sockets().add(std::make_shared<Sockets>(connections));
}

// See Sockets::begin.
bool sockets_begin(int64_t handle, Tensor send, std::vector<int64_t> send_bytes, Tensor recv,
                   std::vector<int64_t> recv_bytes) {
  return all_sockets().share(handle)->begin(
      static_cast<const char*>(send.data_ptr()), send_bytes.data(),
      static_cast<char*>(recv.mutable_data_ptr()), recv_bytes.data());
}

// Returns a Sockets::Result and Sockets::culprit.
std::tuple<int64_t, int64_t> sockets_run(int64_t handle, int64_t timeout_ms) {
  const auto sockets = all_sockets().share(handle);
  const auto result = sockets->run(static_cast<int>(timeout_ms));
  return {static_cast<int64_t>(result), sockets->culprit()};
}

void sockets_close(int64_t handle) { all_sockets().close(handle); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(sockets_open, "(int[] connections) -> int");
  OPER_OPERATOR(sockets_begin,
                "(int handle, Tensor send, int[] send_bytes, Tensor(a!) recv, int[] recv_bytes) "
                "-> bool");
  OPER_OPERATOR(sockets_run, "(int handle, int timeout_ms) -> (int, int)");
  OPER_OPERATOR(sockets_close, "(int handle) -> ()");
}

}  // namespace oper::host
