// All-to-all exchanges of bytes over TCP, with one connection for each pair of ranks.
//
// The calling thread sends and receives: no other thread must be woken. Both sides know the sizes
// in advance, so that there is no handshake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oper::host {

class Sockets {
 public:
  enum class Result : int64_t {
    kDone,
    kWaits,       // not finished in time: call run() again
    kLost,        // a connection has ended
    kUnexpected,  // a peer is in a different exchange, or sends a different number of bytes
  };

  // Connections by rank, non-blocking and with TCP_NODELAY; -1 for this rank. The caller owns them.
  explicit Sockets(const std::vector<int64_t>& connections);

  // Begins an exchange: segment r of `send` goes to rank r, segment r of `recv` comes from it.
  // Segments are contiguous and in rank order; their sizes [W] are in bytes. Both buffers must be
  // valid until run() returns kDone. Returns false, and does nothing, if the previous exchange is
  // unfinished.
  bool begin(const char* send, const int64_t* send_bytes, char* recv, const int64_t* recv_bytes);
  // Sends and receives until the exchange is complete (kDone), for at most about `timeout_ms`.
  Result run(int timeout_ms);
  // The peer that caused the last kLost or kUnexpected.
  int64_t culprit() const { return culprit_; }

 private:
  // Precedes every segment that is not empty.
  struct Header {
    uint32_t mark, sequence;
    int64_t bytes;
  };
  struct Peer {
    int fd = -1;
    Header header_out{}, header_in{};
    size_t header_sent = 0, header_got = 0;  // bytes of the headers
    const char* out = nullptr;               // what remains of the segments
    char* in = nullptr;
    int64_t out_left = 0, in_left = 0;  // bytes of that
    int64_t in_bytes = 0;               // size of the whole received segment
    int64_t window = 0;                 // send window, bytes; 0 = TCP chooses it
    bool sends() const { return header_sent < sizeof(Header) || out_left > 0; }
    bool receives() const { return header_got < sizeof(Header) || in_left > 0; }
  };

  Result push(Peer& peer);
  Result pull(Peer& peer);
  void fit_windows();
  static void set_window(Peer& peer, int64_t bytes);

  std::vector<Peer> peers_;
  int64_t rank_ = 0, culprit_ = -1;
  uint32_t sequence_ = 0;
  bool is_under_way_ = false;
  int64_t begun_ns_ = 0, sent_ = 0;
  double bytes_per_ns_ = 0;  // recent rate of sending to all peers
};

}  // namespace oper::host
