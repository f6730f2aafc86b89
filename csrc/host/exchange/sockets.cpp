#include "host/exchange/sockets.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "host/counters/phases.h"

namespace oper::host {

namespace {
constexpr uint32_t kMark = 0x7265706f;    // begins the headers of this protocol ("oper")
constexpr int64_t kTurnBytes = 64 << 10;  // most sent to one peer before the next one's turn
// A send window is the number of bytes in flight to one peer. If several senders share a receiver's
// link with windows larger than the bytes that the link holds, TCP shares it unequally: the sender
// with the smallest share finishes last while other links idle (a quarter of the time, with four
// and eight hosts). Small equal windows share it equally. These are the bounds:
constexpr int64_t kLeastWindow = 16 << 10, kMostWindow = 4 << 20;
// At least this many TCP segments (64 KiB each on loopback), since receivers delay the ACK of a
// single one.
constexpr int64_t kLeastSegments = 4;
constexpr double kBdpMultiple = 2;  // window size as a multiple of the bandwidth-delay product
// Above this round-trip time TCP chooses the window, since wmem_max limits one that is set.
constexpr int64_t kWideUs = 1000;
constexpr int64_t kMinSampleBytes = 256 << 10;  // smaller exchanges are too short to measure a rate
constexpr double kRateDecay = 0.9;              // factor of the estimated rate after each exchange

int64_t now_ns() { return PhaseTimes::now_ns(); }

// The kernel's estimates for a connection.
struct Path {
  int64_t round_trip_us;  // the shortest so far
  int64_t least_window;   // bytes
  // Whether the window is set here and not by TCP.
  bool sets_window() const { return round_trip_us <= kWideUs; }
};

Path path_of(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {kWideUs + 1, kMostWindow};
  return {info.tcpi_min_rtt, std::max(kLeastWindow, kLeastSegments * info.tcpi_snd_mss)};
}

bool is_full(ssize_t n) { return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK); }
}  // namespace

Sockets::Sockets(const std::vector<int64_t>& connections) : peers_(connections.size()) {
  for (size_t r = 0; r < peers_.size(); ++r) {
    peers_[r].fd = static_cast<int>(connections[r]);
    if (connections[r] < 0) {
      rank_ = static_cast<int64_t>(r);
    } else if (const Path path = path_of(peers_[r].fd); path.sets_window()) {
      set_window(peers_[r], path.least_window);
    }
  }
}

bool Sockets::begin(const char* send, const int64_t* send_bytes, char* recv,
                    const int64_t* recv_bytes) {
  if (is_under_way_) return false;
  is_under_way_ = true;
  ++sequence_;
  sent_ = 0;
  begun_ns_ = now_ns();
  for (size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    if (peer.fd >= 0) {
      peer.header_out = {kMark, sequence_, send_bytes[r]};
      peer.header_sent = send_bytes[r] > 0 ? 0 : sizeof(Header);
      peer.header_got = recv_bytes[r] > 0 ? 0 : sizeof(Header);
      peer.out = send;
      peer.in = recv;
      peer.out_left = send_bytes[r];
      peer.in_left = peer.in_bytes = recv_bytes[r];
      sent_ += send_bytes[r];
    } else if (send_bytes[r] > 0) {
      std::memcpy(recv, send, static_cast<size_t>(std::min(send_bytes[r], recv_bytes[r])));
    }
    send += send_bytes[r];
    recv += recv_bytes[r];
  }
  return true;
}

// Sends as much as the connection accepts, at most a turn and the header. A turn is no longer than
// the window: the kernel accepts a whole message while less than the window is in flight, so longer
// turns would put several windows in flight.
Sockets::Result Sockets::push(Peer& peer) {
  const int64_t turn = peer.window > 0 ? std::min(peer.window, kTurnBytes) : kTurnBytes;
  while (peer.sends()) {
    const size_t header = sizeof(Header) - peer.header_sent;
    iovec parts[2] = {
        {reinterpret_cast<char*>(&peer.header_out) + peer.header_sent, header},
        {const_cast<char*>(peer.out), static_cast<size_t>(std::min(peer.out_left, turn))}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(peer.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (is_full(n)) return Result::kWaits;
    if (n < 0) return Result::kLost;
    const size_t of_header = std::min(header, static_cast<size_t>(n));
    peer.header_sent += of_header;
    peer.out += n - static_cast<ssize_t>(of_header);
    peer.out_left -= n - static_cast<ssize_t>(of_header);
    return peer.sends() ? Result::kWaits : Result::kDone;
  }
  return Result::kDone;
}

Sockets::Result Sockets::pull(Peer& peer) {
  while (peer.receives()) {
    const bool is_header = peer.header_got < sizeof(Header);
    char* to = is_header ? reinterpret_cast<char*>(&peer.header_in) + peer.header_got : peer.in;
    const size_t most =
        is_header ? sizeof(Header) - peer.header_got : static_cast<size_t>(peer.in_left);
    const ssize_t n = recv(peer.fd, to, most, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (is_full(n)) return Result::kWaits;
    if (n <= 0) return Result::kLost;
    if (is_header) {
      peer.header_got += static_cast<size_t>(n);
      const Header& header = peer.header_in;
      if (peer.header_got == sizeof(Header) &&
          (header.mark != kMark || header.sequence != sequence_ || header.bytes != peer.in_bytes))
        return Result::kUnexpected;
    } else {
      peer.in += n;
      peer.in_left -= n;
    }
  }
  return Result::kDone;
}

Sockets::Result Sockets::run(int timeout_ms) {
  const int64_t deadline = now_ns() + int64_t{1'000'000} * timeout_ms;
  const size_t W = peers_.size();
  std::vector<pollfd> waits;
  std::vector<size_t> whose;
  // Tries all peers once, then those that the kernel reports as ready. Each rank begins with the
  // rank after it, so that not all send to the same one first.
  for (bool is_first = true;; is_first = false) {
    waits.clear();
    whose.clear();
    for (size_t k = 1; k < W; ++k) {
      const size_t r = (static_cast<size_t>(rank_) + k) % W;
      const Peer& peer = peers_[r];
      const int events = (peer.receives() ? POLLIN : 0) | (peer.sends() ? POLLOUT : 0);
      if (events == 0) continue;
      waits.push_back({peer.fd, static_cast<short>(events), static_cast<short>(events)});
      whose.push_back(r);
    }
    if (waits.empty()) {
      is_under_way_ = false;
      fit_windows();
      return Result::kDone;
    }
    if (!is_first) {
      const int64_t left = (deadline - now_ns()) / 1'000'000;
      const int n = poll(waits.data(), waits.size(), static_cast<int>(std::max<int64_t>(0, left)));
      if (now_ns() >= deadline) return Result::kWaits;  // also if data keeps arriving
      if (n <= 0) continue;                             // interrupted by a signal
    }
    for (size_t k = 0; k < waits.size(); ++k) {
      if (waits[k].revents == 0) continue;
      Peer& peer = peers_[whose[k]];
      // Receives first: a wrong header says more about an error than a failed send does.
      for (const Result found : {pull(peer), push(peer)})
        if (found == Result::kLost || found == Result::kUnexpected) {
          culprit_ = static_cast<int64_t>(whose[k]);
          return found;
        }
    }
  }
}

// Sets each window to kBdpMultiple times the bandwidth-delay product (the recent rate of sending
// times the shortest round trip), divided by the number of peers.
void Sockets::fit_windows() {
  bytes_per_ns_ *= kRateDecay;
  if (sent_ < kMinSampleBytes || peers_.size() < 2) return;
  bytes_per_ns_ = std::max(bytes_per_ns_, static_cast<double>(sent_) /
                                              static_cast<double>(now_ns() - begun_ns_ + 1));
  for (Peer& peer : peers_) {
    if (peer.fd < 0) continue;
    const Path path = path_of(peer.fd);
    if (!path.sets_window()) continue;
    const double held = bytes_per_ns_ * 1e3 * static_cast<double>(path.round_trip_us);
    const int64_t window =
        std::clamp(static_cast<int64_t>(kBdpMultiple * held / static_cast<double>(peers_.size() - 1)),
                   path.least_window, std::max(path.least_window, kMostWindow));
    if (2 * window > 3 * peer.window || 2 * peer.window > 3 * window) set_window(peer, window);
  }
}

void Sockets::set_window(Peer& peer, int64_t bytes) {
  const int value = static_cast<int>(bytes);
  if (setsockopt(peer.fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof(value)) == 0) peer.window = bytes;
}

}  // namespace oper::host
