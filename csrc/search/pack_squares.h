// Sums of squares that the owners of a table's column pieces send each other, see `expected_squares` in
// oper/search/cost/columns.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "search/pack_piece.h"

namespace oper::search {

// Bytes that an owner sends, and receives, on its host (other memory domains) and between hosts.
struct Squares {
  int64_t rank;
  double on_host, between_hosts;
};

class SquaresBetweenPieces {
 public:
  explicit SquaresBetweenPieces(const OperPacking& p) : p_(p) {
    const int64_t W = p.num_ranks;
    const auto number = [&](const int64_t* of) { return size_t(*std::max_element(of, of + W) + 1); };
    all_.host.resize(number(p.host_of)), all_.domain.resize(number(p.domain_of));
    own_ = all_;
    for (int64_t r = 0; r < W; ++r)
      for (int64_t q = 0; q < W; ++q) {
        const bool far = p.host_of[r] != p.host_of[q];
        between_hosts += double(far) / double(W * W);
        on_host += double(!far && p.domain_of[r] != p.domain_of[q]) / double(W * W);
      }
  }

  // Adds to `out` what the owners of the pieces `family` send, `bytes` from a piece with one owner
  // to one other. Owners of different pieces are independent: each has its share of the others' rows.
  void add(const std::vector<Piece>& pieces, const std::vector<int>& family, double bytes,
           std::vector<Squares>& out) {
    const double others = double(family.size()) - 1;
    for (const int id : family) all_.add(p_, pieces[id]);
    for (const int id : family) {
      const Piece& x = pieces[id];
      own_.add(p_, x);
      for (int i = 0; i < x.owners; ++i) {
        const int64_t r = x.rank[i], host = p_.host_of[r], domain = p_.domain_of[r];
        const double near = all_.domain[domain] - own_.domain[domain];
        const double on_its_host = all_.host[host] - own_.host[host];
        const double sent = bytes * double(x.weight[i]) / x.total;
        out.push_back({r, sent * std::max(0.0, on_its_host - near),
                       sent * std::max(0.0, others - on_its_host)});
      }
      own_.clear(p_, x);
    }
    for (const int id : family) all_.clear(p_, pieces[id]);
  }

  double on_host = 0, between_hosts = 0;  // shares of pairs of ranks: of one host, of two hosts

 private:
  // Shares of pieces' rows by host and by memory domain.
  struct Shares {
    std::vector<double> host, domain;
    void add(const OperPacking& p, const Piece& x) {
      for (int i = 0; i < x.owners; ++i) {
        const double share = double(x.weight[i]) / x.total;
        host[p.host_of[x.rank[i]]] += share, domain[p.domain_of[x.rank[i]]] += share;
      }
    }
    void clear(const OperPacking& p, const Piece& x) {
      for (int i = 0; i < x.owners; ++i)
        host[p.host_of[x.rank[i]]] = 0, domain[p.domain_of[x.rank[i]]] = 0;
    }
  };

  const OperPacking& p_;
  Shares all_, own_;  // 0 outside `add`
};

}  // namespace oper::search
