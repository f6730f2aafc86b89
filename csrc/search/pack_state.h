// State of the search for owners of pushed rows: the ranks' loads, the pieces, and how to undo a move.
//
// A table's columns are divided into two parts; one part may be empty. A state gives every part a
// candidate (which rows are pushed, pulled or replicated) and divides its pushed rows into column
// pieces, each of which is striped over a few owners by integer weights. A rank's load is a vector:
// for each phase its groups of terms (only the largest counts), and memory. The work of ranks as
// readers is the same for all ranks of a class. Pulled rows are divisible: of those of all tables
// of a class together, each rank owns as large a share as its other loads allow.
#pragma once

#include "search/pack.h"
#include "search/pack_loads.h"
#include "search/pack_piece.h"
#include "search/pack_squares.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace oper::search {

class PackState {
 protected:
  explicit PackState(OperPacking& p) : p_(p), random_{p.seed * 2 + 0x9E3779B97F4A7C15ULL} {
    W = p.num_ranks, C = p.num_classes, G = p.num_loads, groups_ = int(p.num_groups);
    P = (G - 1) / groups_, T = p.num_parts,
    whole_ = p.num_tables;
    saved_mark_.assign(W, 0), place_.assign(whole_, 0);
    for (int64_t i = 0; i < whole_; ++i) place_[p.order[i]] = i;
    none_.assign(G, 0.0), scale_.assign(P, 1.0f), busiest_.assign(P, 0), peak_.assign(P, 0.0);
    for (int64_t c = 0, r = 0; c < C; ++c) {
      const int64_t begin = r;
      while (r < W && p.class_of[r] == c) ++r;
      block_.push_back({begin, r});
    }
    ranks_on_.resize(size_t(*std::max_element(p.host_of, p.host_of + W)) + 1);
    for (int64_t r = 0; r < W; ++r) ranks_on_[p.host_of[r]].push_back(r);
    reset(p.candidate, p.part_width, std::vector<float>(p.units, p.units + W));
  }

  // Starts a state without pieces.
  void reset(const int64_t* candidate, const int64_t* width, const std::vector<float>& share) {
    candidate_.assign(candidate, candidate + T), width_.assign(width, width + T);
    load_.assign(p_.base, p_.base + W * G);
    every_.assign(C * G, 0.0), fill_.assign(C * G, 0.0);
    level_.assign(p_.level, p_.level + P);
    set_shares(share);
    flat_.resize(G * W);
    for (int64_t r = 0; r < W; ++r) flatten(r);
    for (int64_t k = 0; k < T; ++k) add_stay(k, 1);
    pieces_.clear(), free_.clear();
    of_table_.assign(T, {}), on_rank_.assign(W, {}), counted_cuts_.assign(T, 0.0);
    split_again_.clear();
    squares_.assign(whole_, {}), between_.assign(whole_, 0.0), difference_.assign(W, {});
    is_changed_.assign(whole_, 0), changed_.clear();
    owns_.assign(T * W, 0);
    busy_.resize(P * W), kept_busy_.resize(P * W);
  }

  // -- loads --------------------------------------------------------------------------------------

  double* load(int64_t r) { return &load_[r * G]; }
  void flatten(int64_t r) {
    for (int64_t g = 0; g < G; ++g) flat_[g * W + r] = float(load_[r * G + g]);
  }

  // Saves a rank's load before its first change in a move, for `undo`.
  void touch(int64_t r) {
    if (saved_mark_[r] == stamp_) return;
    saved_mark_[r] = stamp_;
    saved_rank_.push_back(r);
    saved_load_.insert(saved_load_.end(), load(r), load(r) + G);
  }

  // Adds (sign 1) or removes (-1) the loads of a part's rows that are not pushed.
  void add_stay(int64_t k, double sign) {
    if (width_[k] == 0) return;
    const int64_t at = (p_.first[k] + candidate_[k]) * C * G;
    const double columns = sign * double(width_[k]);
    for (int64_t i = 0; i < C * G; ++i)
      every_[i] += columns * p_.stay[at + i] + sign * p_.stay_once[at + i];
    for (int64_t i = 0; i < C * G; ++i)
      fill_[i] += columns * p_.fill[at + i] + sign * p_.fill_once[at + i];
  }

  // Rows that are not pushed are divided at the same columns as pushed ones, and cost something per
  // piece. Most moves remove as many pieces as they add, so that this is only updated at the end of a
  // move, or before the candidate changes.
  void settle_cuts(int64_t k) {
    const double cuts = cuts_of(k) - counted_cuts_[k];
    if (cuts == 0) return;
    const int64_t at = (p_.first[k] + candidate_[k]) * C * G;
    for (int64_t i = 0; i < C * G; ++i) every_[i] += cuts * p_.stay_once[at + i];
    for (int64_t i = 0; i < C * G; ++i) fill_[i] += cuts * p_.fill_once[at + i];
    counted_cuts_[k] += cuts;
  }
  double cuts_of(int64_t k) const {
    return pieces_of_part(k) - 1;
  }

  void add_squares(const Squares& x) {
    touch(x.rank);
    double* to = load(x.rank);
    const int64_t at = p_.class_of[x.rank] * G;
    for (int64_t g = 0; g < G; ++g)
      to[g] += x.on_host * p_.square_link[at + g] + x.between_hosts * p_.square_cross[at + g];
  }
  bool sends_squares(int64_t k) const { return p_.squares[p_.first[k] + candidate_[k]] > 0; }
  // Replaces the loads by the sums of squares of a table by those of its present pieces, at the end of a
  // move; these functions are in pack_squares_of_state.h.
  void settle_squares(int64_t table);
  void add_differences(const std::vector<Squares>& was, const std::vector<Squares>& now);
  void settle_parts(int64_t table, double messages);
  double square_bytes(int64_t k) const;
  double messages_between_parts(int64_t table) const;
  double pieces_of_table(int64_t k) const;
  double pushed_of(int64_t k) const;
  // Number of column pieces of a part; a part that is not pushed has one.
  double pieces_of_part(int64_t k) const { return double(std::max<size_t>(of_table_[k].size(), 1)); }

  // Bytes of partial sums per column of an owner with this share of the lookups, of candidate n.
  double sums(int64_t n, double share) const {
    const double* y = p_.sums + n * (p_.num_shares + 1);
    const double at = share * double(p_.num_shares);
    const int64_t i = std::min<int64_t>(int64_t(at), p_.num_shares - 1);
    return y[i] + (at - double(i)) * (y[i + 1] - y[i]);
  }

  // Sets the owners' shares of lookups and of partial sums. Rows are assigned to owners
  // round-robin, by weight: each owner has its weight's share of the lookups, except that the
  // hottest rows count with their actual shares.
  void assign_rows(Piece& x) const {
    const int64_t n = p_.first[x.table] + candidate_[x.table];
    double mass[kMaxOwners] = {1.0};
    if (x.owners > 1) {
      const double* head = p_.head + n * p_.num_heads;
      const int64_t* at = p_.head_at + n * p_.num_heads;
      const uint32_t total = uint32_t(x.total);
      uint32_t place[kMaxHeads], last = 0;
      int64_t num_heads = 0;
      double rest = 1;
      for (const int64_t most = std::min(p_.num_heads, kMaxHeads);
           num_heads < most && head[num_heads] > 0; ++num_heads) {
        place[num_heads] = uint32_t(at[num_heads]) % total;
        last = std::max(last, place[num_heads]), rest -= head[num_heads];
      }
      for (int i = 0; i < x.owners; ++i) mass[i] = rest * double(x.weight[i]) / x.total;
      uint8_t turn[kMaxWeight];
      spread(x, last, turn);
      for (int64_t h = 0; h < num_heads; ++h) mass[turn[place[h]]] += head[h];
    }
    for (int i = 0; i < x.owners; ++i)
      x.mass[i] = float(mass[i]), x.sums[i] = float(sums(n, std::min(mass[i], 1.0)));
  }

  // The quantities to which the load of a piece's owner is proportional.
  struct Carried {
    double columns = 0;  // its share of the rows, times the columns of the piece
    double ids = 0;      // its share of the lookups
    double sent = 0;     // partial sums, times the columns
    double uneven = 0;   // its share of lookups less its share of rows, times the columns
    double asked = 0;    // share of the lookups that it requests from itself
    Carried operator-(const Carried& x) const {
      return {columns - x.columns, ids - x.ids, sent - x.sent, uneven - x.uneven, asked - x.asked};
    }
  };
  Carried carried(const Piece& x, int i, int64_t n) const {
    const double share = double(x.weight[i]) / x.total, ids = x.mass[i];
    Carried y{share * x.width, ids, double(x.sums[i]) * x.width};
    if (x.owners > 1 || !p_.whole[n]) y.uneven = (ids - share) * x.width, y.asked = ids;
    return y;
  }
  void add_load(int64_t n, int64_t c, const Carried& y, double* to) const {
    const int64_t at = (n * C + c) * G;
    const double *column = p_.column + at, *stream = p_.stream + at, *partial = p_.partial + at;
    if (y.uneven == 0 && y.asked == 0)
      accumulate(to, column, stream, partial, y.columns, y.ids, y.sent, G);
    else
      accumulate(to, column, stream, partial, p_.column_ids + at, p_.asked + n * G, y.columns, y.ids,
                 y.sent, y.uneven, y.asked, G);
  }
  // Load of owner `i` of a piece on a rank of class `c`; written to `to`, which is returned.
  const double* owned(const Piece& x, int i, int64_t c, double* to) const {
    const int64_t n = p_.first[x.table] + candidate_[x.table];
    std::fill(to, to + G, 0.0);
    add_load(n, c, carried(x, i, n), to);
    return to;
  }
  // Adds the load of an owner to its rank and to the ranks that share its links.
  void charge(int64_t r, int64_t n, const Carried& y) {
    touch(r);
    const int64_t c = p_.class_of[r];
    add_load(n, c, y, load(r));
    for (int64_t i = p_.mate_first[r]; i < p_.mate_first[r + 1]; ++i) {
      const int64_t level = p_.mate_level[i], to = ((n * kLevels + level) * C + c) * G;
      touch(p_.mates[i]);
      accumulate(load(p_.mates[i]), p_.column_mate + to, p_.stream_mate + to,
                 p_.partial_mate + to, y.columns, y.ids, y.sent, G);
    }
  }

  // Replaces the loads of a table's piece `from` by those of `to`; either may have no owners.
  void carry(const Piece& from, const Piece& to) {
    const int64_t n = p_.first[to.table] + candidate_[to.table];
    int64_t c = -1;
    double a = 0, b = 0, d = 0;  // amounts of the owners of one class, for the loads of readers
    const auto pass_on = [&] {
      if (a != 0 || b != 0 || d != 0) {
        const int64_t at = (n * C + c) * G * C;
        accumulate(every_.data(), p_.column_read + at, p_.stream_read + at,
                   p_.partial_read + at, a, b, d, C * G);
      }
      a = b = d = 0;
    };
    const auto add = [&](int64_t r, const Carried& y) {
      if (y.columns == 0 && y.ids == 0 && y.sent == 0) return;
      if (p_.class_of[r] != c) pass_on(), c = p_.class_of[r];
      a += y.columns, b += y.ids, d += y.sent;
      charge(r, n, y);
    };
    for (int i = 0; i < std::max(from.owners, to.owners); ++i) {
      const bool had = i < from.owners, has = i < to.owners;
      if (had && has && from.rank[i] == to.rank[i]) {
        add(to.rank[i], carried(to, i, n) - carried(from, i, n));
        continue;
      }
      if (had) add(from.rank[i], Carried{} - carried(from, i, n));
      if (has) add(to.rank[i], carried(to, i, n));
    }
    pass_on();
  }

  // Largest load of each rank in a phase, with pulled rows if `fills`; returns the maximum and the sum of
  // powers.
  std::pair<float, float> look_at_phase(int64_t ph, float* busy, bool fills = true) const {
    float peak = 0, power = 0;
    for (int64_t c = 0; c < C; ++c) {
      float every[kMostGroups], fill[kMostGroups];
      for (int g = 0; g < groups_; ++g) {
        every[g] = float(every_[c * G + ph * groups_ + g]);
        fill[g] = fills ? float(fill_[c * G + ph * groups_ + g] / share_sum_[c]) : 0.0f;
      }
      const auto [a, b] = block_[c];
      peak = std::max(peak, phase_busy(&flat_[ph * groups_ * W], W, share_.data(), every, fill,
                                       groups_, a, b, scale_[ph], busy, &power));
    }
    return {peak, power};
  }

  // Energy of the present state; sets busy_, peak_ and step_.
  double evaluate() {
    double step = 0, power_mean = 0;
    for (int64_t ph = 0; ph < P; ++ph) {
      const auto [peak, power] = look_at_phase(ph, &busy_[ph * W]);
      peak_[ph] = peak;
      step += peak_[ph];
      double mean = double(power) / double(W);
      for (int i = 0; i < kSquarings; ++i) mean = std::sqrt(mean);
      power_mean += mean / scale_[ph];
    }
    double over = 0;
    for (int64_t c = 0; c < C; ++c) {
      const auto [a, b] = block_[c];
      const int64_t memory = c * G + G - 1;
      over = std::max<double>(over, largest(&flat_[(G - 1) * W], share_.data(),
                                    float(every_[memory]), float(fill_[memory] / share_sum_[c]), a, b) -
                                    1.0);
    }
    step_ = step * (1 + kOverflow * std::max(over, 0.0));
    return (kMaxShare * step + (1 - kMaxShare) * power_mean) * (1 + kOverflow * std::max(over, 0.0));
  }

  // -- pieces -------------------------------------------------------------------------------------

  // Add a piece, remove it, or change its width and owners. `undo` undoes it.
  void insert(const Piece& x) {
    if (free_.empty()) {
      free_.push_back(int(pieces_.size()));
      pieces_.emplace_back();
    }
    replace(free_.back(), x);
  }
  void erase(int id) {
    Piece nothing;
    nothing.table = pieces_[id].table;
    replace(id, nothing);
  }
  void replace(int id, Piece x) {
    if (x.owners > 0) assign_rows(x);
    carry(pieces_[id], x);
    log_.push_back({id, pieces_[id]});
    link(id, x);
  }
  // Sets piece `id` to `x`. A piece without owners is not part of the state, and is in `free_`.
  void link(int id, const Piece& x) {
    Piece& was = pieces_[id];
    const auto differs = [&](int i) {
      return i >= was.owners || i >= x.owners || was.rank[i] != x.rank[i];
    };
    for (int i = 0; i < was.owners; ++i)
      if (differs(i)) drop(on_rank_[was.rank[i]], id), --owns_[was.table * W + was.rank[i]];
    for (int i = 0; i < x.owners; ++i)
      if (differs(i)) on_rank_[x.rank[i]].push_back(id), ++owns_[x.table * W + x.rank[i]];
    if (was.owners == 0)
      of_table_[x.table].push_back(id), free_.pop_back(), split_again_.push_back(x.table);
    if (x.owners == 0)
      drop(of_table_[was.table], id), free_.push_back(id), split_again_.push_back(was.table);
    was = x;
  }
  static void drop(std::vector<int>& list, int id) {
    const auto at = std::find(list.rbegin(), list.rend(), id);  // often the last one
    *at = list.back();
    list.pop_back();
  }

  void begin_move() {
    ++stamp_;
    saved_rank_.clear(), saved_load_.clear();
    log_.clear(), numbers_log_.clear(), squares_log_.clear(), between_log_.clear();
    saved_every_ = every_, saved_fill_ = fill_, saved_share_ = share_, saved_share_sum_ = share_sum_;
    saved_level_ = level_;
  }
  void finish_move() {
    for (const int k : split_again_) settle_cuts(k);
    split_again_.clear();
    for (const auto& [id, was] : log_) note_change(was.table), note_change(pieces_[id].table);
    for (const int64_t k : changed_) settle_squares(k), is_changed_[k] = 0;
    changed_.clear();
    for (const int64_t r : saved_rank_) flatten(r), refill(r);
  }
  // Notes that a part has changed, if that may change its table's sums of squares.
  void note_change(int64_t k) {
    k %= whole_;
    if (p_.all_squares[k] == 0 || is_changed_[k]) return;
    is_changed_[k] = 1;
    changed_.push_back(k);
  }
  void undo() {
    for (auto it = log_.rbegin(); it != log_.rend(); ++it) link(it->first, it->second);
    for (auto it = numbers_log_.rbegin(); it != numbers_log_.rend(); ++it) *it->first = it->second;
    for (auto& [k, was] : squares_log_) squares_[k].swap(was);
    for (const auto& [k, was] : between_log_) between_[k] = was;
    for (size_t i = 0; i < saved_rank_.size(); ++i) {
      std::memcpy(load(saved_rank_[i]), &saved_load_[i * G], G * sizeof(double));
      flatten(saved_rank_[i]);
    }
    every_ = saved_every_, fill_ = saved_fill_, share_ = saved_share_, share_sum_ = saved_share_sum_;
    level_ = saved_level_;
    for (const int k : split_again_) counted_cuts_[k] = cuts_of(k);
    split_again_.clear();
  }

  // -- pulled rows ----------------------------------------------------------------------------------

  // The largest share of its class's pulled rows that rank r can own, after the loads `more` are
  // added and `less` removed, such that no phase exceeds its level and no memory overflows; the
  // present share if pulled rows cost nothing.
  // `*slope`: derivative of the share by a common factor of all levels.
  double share_up_to_levels(int64_t r, const double* more, const double* less, double* slope) const {
    const double *own = &load_[r * G], *all = &every_[p_.class_of[r] * G], *fill = &fill_[p_.class_of[r] * G];
    double least = std::numeric_limits<double>::infinity();
    *slope = 0;
    for (int64_t g = 0; g < G; ++g) {
      if (fill[g] <= 0) continue;
      // Rounding to units may add half a unit to the used memory.
      const double memory = 1.0 - 0.5 * fill[g] / double(units_in_all());
      const double level = g < G - 1 ? level_[g / groups_] : memory;
      const double share = (level - (own[g] + all[g] + (more[g] - less[g]))) / fill[g];
      if (share < least) least = share, *slope = g < G - 1 ? level / fill[g] : 0.0;
    }
    if (least > 1) least = std::isinf(least) ? double(share_[r]) : 1.0, *slope = 0;
    if (least < kLeastShare) least = kLeastShare, *slope = 0;
    return least;
  }
  // Units into which the pulled rows of a class are divided. Rounding adds at most half a unit per rank.
  int64_t units_in_all() const { return kUnits - W / 2; }
  // Whether ranks of a class own different shares of its pulled rows. Not if ranks share links, since a
  // rank's pulled rows then also load its mates.
  bool refills() const { return p_.mate_first[W] == 0 && W < kUnits; }
  void refill(int64_t r) {
    if (!refills()) return;
    double slope;
    const float share = float(share_up_to_levels(r, none_.data(), none_.data(), &slope));
    share_sum_[p_.class_of[r]] += double(share) - double(share_[r]);
    share_[r] = share;
  }
  // Scales all levels so that the shares of a class add up to 1, on average over the classes.
  void scale_levels() {
    for (int i = 0; i < kLevelSteps && refills(); ++i) {  // Newton's method
      double sum = 0, slope = 0;
      for (int64_t r = 0; r < W; ++r) {
        double of;
        sum += share_up_to_levels(r, none_.data(), none_.data(), &of), slope += of;
      }
      if (slope <= 0) break;
      const double factor = std::clamp(1 + (double(C) - sum) / slope, 0.5, 2.0);
      for (double& x : level_) x *= factor;
    }
  }
  void refill_all() {
    scale_levels();
    for (int64_t r = 0; r < W; ++r) refill(r);
  }
  std::vector<double> sums_by_class(const std::vector<float>& share) const {
    std::vector<double> sum(C, 0.0);
    for (int64_t r = 0; r < W; ++r) sum[p_.class_of[r]] += double(share[r]);
    return sum;
  }
  void set_shares(const std::vector<float>& share) {  // in proportion to `share`
    const std::vector<double> sum = sums_by_class(share);
    share_.resize(W), share_sum_.assign(C, 0.0);
    for (int64_t r = 0; r < W; ++r) {
      share_[r] = float(double(share[r]) / sum[p_.class_of[r]]);
      share_sum_[p_.class_of[r]] += double(share_[r]);
    }
  }

  void set_candidate(int64_t k, int64_t candidate) {  // of a part without pieces
    settle_cuts(k);
    set_number(k, candidate_[k], candidate);
  }

  void set_width(int64_t k, int64_t width) {  // of a part whose pieces are, or will be, changed as well
    set_number(k, width_[k], width);
  }

  void set_number(int64_t k, int64_t& number, int64_t value) {  // of part k; updates unpushed rows' loads
    note_change(k);
    numbers_log_.push_back({&number, number});
    add_stay(k, -1);
    number = value;
    add_stay(k, 1);
  }

  // A random part with columns, with a preference for large tables, which matter more.
  int64_t pick_part() {
    const double u = random_.unit();
    const int64_t k = p_.order[int64_t(double(whole_) * (random_.unit() < kLarge ? u * u * u : u))];
    if (T == whole_ || width_[k + whole_] == 0) return k;
    return width_[k] == 0 || random_.unit() < 0.5 ? k + whole_ : k;
  }
  int64_t partner(int64_t k) const { return k < whole_ ? k + whole_ : k - whole_; }

  bool pushes(int64_t k) const { return width_[k] > 0 && p_.pushes[p_.first[k] + candidate_[k]]; }
  bool may(int64_t k, int64_t r) const { return p_.may[k * W + r]; }
  bool free_for(int64_t k, int64_t r) const { return may(k, r) && !owns_[k * W + r]; }

  // -- best state ---------------------------------------------------------------------------------

  // A state that can be restored.
  struct State {
    double step = std::numeric_limits<double>::infinity();
    std::vector<int64_t> candidate, width;
    std::vector<float> share;
    std::vector<Piece> pieces;
  };

  void keep_best() {
    best_.step = step_, best_.candidate = candidate_, best_.width = width_, best_.share = share_;
    best_.pieces.clear();
    for (int64_t k = 0; k < T; ++k)
      for (const int id : of_table_[k]) best_.pieces.push_back(pieces_[id]);
  }
  void restore(const State& state) {
    best_ = state;
    reset(best_.candidate.data(), best_.width.data(), best_.share);
    begin_move();
    for (const Piece& x : best_.pieces) insert(x);
    finish_move();
    set_shares(best_.share);
  }

  OperPacking& p_;
  Random random_;
  int groups_;
  int64_t W, C, G, P, T, whole_, moves_ = 0;
  std::vector<int64_t> place_;  // index of each table in `order`
  std::vector<int64_t> candidate_, width_, busiest_;
  std::vector<double> load_, every_, saved_every_, fill_, saved_fill_, saved_load_, peak_;
  std::vector<double> level_, saved_level_;  // times of phases up to which ranks are refilled
  std::vector<double> none_;                 // loads of 0
  std::vector<double> share_sum_, saved_share_sum_;  // sums of share_ by class, by which shares are divided
  std::vector<float> flat_, busy_, kept_busy_, scale_, share_, saved_share_;
  std::vector<Piece> pieces_;
  std::vector<int> free_, split_again_, family_;
  std::vector<int64_t> changed_;  // tables whose sums of squares may have changed in this move
  std::vector<uint8_t> is_changed_;
  std::vector<double> counted_cuts_;
  std::vector<std::vector<int>> of_table_, on_rank_;
  std::vector<std::vector<int64_t>> ranks_on_;  // by host
  std::vector<std::vector<Squares>> squares_;   // squares that the loads contain, by table
  std::vector<Squares> difference_;             // by rank; 0 outside `add_differences`
  std::vector<double> between_;                 // messages per row between parts that they contain
  std::vector<std::pair<int64_t, std::vector<Squares>>> squares_log_;  // before the move's changes
  std::vector<std::pair<int64_t, double>> between_log_;
  SquaresBetweenPieces between_pieces_{p_};
  std::vector<uint8_t> owns_;
  std::vector<std::pair<int64_t, int64_t>> block_;
  std::vector<int64_t> saved_rank_, saved_mark_;
  std::vector<std::pair<int, Piece>> log_;  // pieces before the move's changes
  std::vector<std::pair<int64_t*, int64_t>> numbers_log_;  // candidates and widths before them
  int64_t stamp_ = 0;
  double energy_ = 0, step_ = 0;
  State best_;
};

}  // namespace oper::search

#include "search/pack_squares_of_state.h"
