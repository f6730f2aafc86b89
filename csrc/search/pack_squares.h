// Sums of squares that the owners of a table's column pieces send each other, see `expected_squares` in
// oper/search/cost/columns.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "search/pack_piece.h"

namespace oper::search {

// Bytes of sums of squares that a rank sends to other memory domains of its host and to other hosts. It
// receives as many.
struct Squares {
  int64_t rank = 0;
  double on_host = 0, between_hosts = 0;
};

class SquaresBetweenPieces {
 public:
  explicit SquaresBetweenPieces(const OperPacking& p) : p_(p) {
    const int64_t W = p.num_ranks;
    const auto number = [&](const int64_t* of) { return size_t(*std::max_element(of, of + W) + 1); };
    other_.host.resize(number(p.host_of)), other_.domain.resize(number(p.domain_of));
    same_ = other_;
    for (int64_t r = 0; r < W; ++r)
      for (int64_t q = 0; q < W; ++q) {
        const bool far = p.host_of[r] != p.host_of[q];
        between_hosts += double(far) / double(W * W);
        on_host += double(!far && p.domain_of[r] != p.domain_of[q]) / double(W * W);
      }
  }

  // Share of `OperPacking::squares` (the bytes of a sum and a total per row) that the owners of two of
  // `pieces` pieces send each other, in each direction. On several hosts a row's sums go to one of its
  // owners, chosen by a hash, and the totals back. On one host all owners read all sums.
  double share_of_pair(double pieces) const { return between_hosts > 0 ? 1 / pieces : 0.5; }

  // Adds to `out` what the owners of the pieces `family` send; `bytes`: from a piece with a single owner to
  // another such piece. The i-th owners of pieces with equal weights have the same rows. Pieces with other
  // weights are taken as independent: each of their owners has a row with the probability of its share of
  // the rows.
  void add(const std::vector<Piece>& pieces, const std::vector<int>& family, double bytes,
           std::vector<Squares>& out) {
    const double others = double(family.size()) - 1;
    add_owners(pieces, family, 1);
    left_ = family;
    while (!left_.empty()) {
      const Piece& first = pieces[left_.front()];
      const auto end = std::stable_partition(left_.begin(), left_.end(), [&](int id) {
        return !has_weights_of(pieces[id], first);
      });
      alike_.assign(end, left_.end());
      left_.erase(end, left_.end());
      add_owners(pieces, alike_, -1);
      for (int i = 0; i < first.owners; ++i) {
        for (const int id : alike_) same_.add(p_, pieces[id].rank[i], 1);
        for (const int id : alike_) {
          const int64_t r = pieces[id].rank[i], host = p_.host_of[r], domain = p_.domain_of[r];
          // Other pieces of a row of rank r that its domain, and its host, own on average.
          const double in_domain = other_.domain[domain] + same_.domain[domain] - 1;
          const double in_host = other_.host[host] + same_.host[host] - 1;
          const double sent = bytes * share(first, i);
          out.push_back({r, sent * std::max(0.0, in_host - in_domain),
                         sent * std::max(0.0, others - in_host)});
        }
        for (const int id : alike_) same_.clear(p_, pieces[id].rank[i]);
      }
      add_owners(pieces, alike_, 1);
    }
    clear_owners(pieces, family);
  }

  // The same for the owners of the pieces `family` and those of the pieces `others` of a part with
  // another candidate, which pushes the share `pushed` of the rows; all ranks own the rest alike. All
  // owners are independent.
  void add_apart(const std::vector<Piece>& pieces, const std::vector<int>& family, const std::vector<int>& others,
                 double pushed, double bytes, std::vector<Squares>& out) {
    const double number = std::max<double>(1, double(others.size())), rest = number * (1 - pushed);
    add_owners(pieces, others, pushed);
    for (const int id : family)
      for (int i = 0; i < pieces[id].owners; ++i) {
        const int64_t r = pieces[id].rank[i];
        const double host = other_.host[p_.host_of[r]], near = other_.domain[p_.domain_of[r]];
        const double sent = bytes * share(pieces[id], i);
        out.push_back({r, sent * (host - near + rest * on_host),
                       sent * (number - rest - host + rest * between_hosts)});
      }
    clear_owners(pieces, others);
  }

  double on_host = 0, between_hosts = 0;  // shares of pairs of ranks: of one host, of two hosts

 private:
  // Numbers of pieces of a row by the owner's host and memory domain.
  struct Owned {
    std::vector<double> host, domain;
    void add(const OperPacking& p, int64_t r, double number) {
      host[p.host_of[r]] += number, domain[p.domain_of[r]] += number;
    }
    void clear(const OperPacking& p, int64_t r) { host[p.host_of[r]] = 0, domain[p.domain_of[r]] = 0; }
  };
  void add_owners(const std::vector<Piece>& pieces, const std::vector<int>& ids, double factor) {
    for (const int id : ids)
      for (int i = 0; i < pieces[id].owners; ++i)
        other_.add(p_, pieces[id].rank[i], factor * share(pieces[id], i));
  }
  // Sets the owners' numbers to exactly 0: subtracting what was added would leave rounding errors.
  void clear_owners(const std::vector<Piece>& pieces, const std::vector<int>& ids) {
    for (const int id : ids)
      for (int i = 0; i < pieces[id].owners; ++i) other_.clear(p_, pieces[id].rank[i]);
  }
  static double share(const Piece& x, int i) { return double(x.weight[i]) / x.total; }
  static bool has_weights_of(const Piece& x, const Piece& y) {
    return x.owners == y.owners && std::equal(x.weight, x.weight + x.owners, y.weight);
  }

  const OperPacking& p_;
  Owned other_, same_;  // pieces with other weights, on average, and with the same; 0 outside `add`
  std::vector<int> left_, alike_;  // pieces of `family` not yet added; those with the weights of one
};

}  // namespace oper::search
