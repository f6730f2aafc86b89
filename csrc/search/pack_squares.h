// Sums of squares that the owners of a table's column pieces send each other, see `expected_squares` in
// oper/search/cost/columns.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "search/pack_piece.h"

namespace oper::search {

// Bytes that an owner sends, and gets, on its host (other memory domains) and between hosts.
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
    ith_ = all_;
    for (int64_t r = 0; r < W; ++r)
      for (int64_t q = 0; q < W; ++q) {
        const bool far = p.host_of[r] != p.host_of[q];
        between_hosts += double(far) / double(W * W);
        on_host += double(!far && p.domain_of[r] != p.domain_of[q]) / double(W * W);
      }
  }

  // Of `OperPacking::squares`, what the owner of a piece, one of `pieces`, sends to and gets from the
  // owner of another one: several hosts have one owner add up a row's sums, a single host has all do.
  double of_pair(double pieces) const { return between_hosts > 0 ? 1 / pieces : 0.5; }

  // Adds to `out` what the owners of the pieces `family` send and get, `bytes` per pair of pieces with
  // one owner each. Pieces with the same weights have the i-th owners of the same rows; those of others
  // are independent: each has its share of the others' rows.
  void add(const std::vector<Piece>& pieces, const std::vector<int>& family, double bytes,
           std::vector<Squares>& out) {
    const double others = double(family.size()) - 1;
    const auto every = [&](Shares& shares, const std::vector<int>& ids, double sign) {
      for (const int id : ids)
        for (int i = 0; i < pieces[id].owners; ++i)
          shares.add(p_, pieces[id].rank[i], sign * share(pieces[id], i));
    };
    every(all_, family, 1);
    left_ = family;
    while (!left_.empty()) {
      const Piece& first = pieces[left_.front()];
      const auto end = std::stable_partition(left_.begin(), left_.end(), [&](int id) {
        return !has_weights_of(pieces[id], first);
      });
      alike_.assign(end, left_.end());
      left_.erase(end, left_.end());
      every(all_, alike_, -1);
      for (int i = 0; i < first.owners; ++i) {
        for (const int id : alike_) ith_.add(p_, pieces[id].rank[i], 1);
        for (const int id : alike_) {
          const int64_t r = pieces[id].rank[i], host = p_.host_of[r], domain = p_.domain_of[r];
          const double near = all_.domain[domain] + ith_.domain[domain] - 1;
          const double on_its_host = all_.host[host] + ith_.host[host] - 1;
          const double sent = bytes * share(first, i);
          out.push_back({r, sent * std::max(0.0, on_its_host - near),
                         sent * std::max(0.0, others - on_its_host)});
        }
        for (const int id : alike_) ith_.clear(p_, pieces[id].rank[i]);
      }
      every(all_, alike_, 1);
    }
    for (const int id : family)
      for (int i = 0; i < pieces[id].owners; ++i) all_.clear(p_, pieces[id].rank[i]);
  }

  double on_host = 0, between_hosts = 0;  // shares of pairs of ranks: of one host, of two hosts

 private:
  // Shares of pieces' rows by host and by memory domain.
  struct Shares {
    std::vector<double> host, domain;
    void add(const OperPacking& p, int64_t r, double share) {
      host[p.host_of[r]] += share, domain[p.domain_of[r]] += share;
    }
    void clear(const OperPacking& p, int64_t r) { host[p.host_of[r]] = 0, domain[p.domain_of[r]] = 0; }
  };
  static double share(const Piece& x, int i) { return double(x.weight[i]) / x.total; }
  static bool has_weights_of(const Piece& x, const Piece& y) {
    return x.owners == y.owners && (x.total == x.owners ? y.total == y.owners
                                                        : std::equal(x.weight, x.weight + x.owners, y.weight));
  }

  const OperPacking& p_;
  Shares all_, ith_;  // 0 outside `add`
  std::vector<int> left_, alike_;
};

}  // namespace oper::search
