// The pricing problem of each table, see OperPricing: its cheapest configuration at given prices of
// the resources, or a proof that none is cheaper than the known one.
//
// A block is a range of rows of equal hotness. It either stays (its rows are pulled or replicated),
// or is pushed to one of the options, which are classes of owners. A table cut by columns into
// `streams` pieces pays for one id stream per piece. Owners of a piece type can have at most `mass`
// of the lookups each, which determines the bytes of partial sums.
#include "search/price.h"
#include "search/price_loops.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace oper::search;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9;   // relative tolerance within which an owner is full
constexpr double kWhole = 1 - 1e-9;  // least mass of an owner that has an entire piece
// Shares of a table's lookups between which a class's partial sums are replaced by their chord.
constexpr double kRanges[] = {0, 1.0 / 64, 1.0 / 16, 1.0 / 4, 1.0 / 2, 1};
constexpr int64_t kAlone = 30;       // tables x options for which a second thread does not pay off

enum Mode : int64_t { kOneTier, kTiers, kAllPushed, kTiersPushed };  // OperPricing::mode
enum Pushes : uint8_t { kFree, kStill, kPushes };                    // OperPricing::pushes

class Pricing {
 public:
  explicit Pricing(OperPricing& p) : p_(p) {}

  // Solve the pricing problem of table `k`.
  void table(int64_t k) {
    begin_ = p_.starts[k], n_ = p_.starts[k + 1] - begin_, k_ = k;
    const int64_t M = p_.num_options;
    all_still_ = all_more_ = mass_all_ = 0;
    must_ = false;  // some block can only be pushed; then all can, because options are per table
    for (int64_t b = 0; b < n_; ++b) {
      all_still_ += p_.stay[begin_ + b], all_more_ += p_.stay_more[begin_ + b];
      mass_all_ += p_.ids[begin_ + b];
      must_ |= !std::isfinite(p_.stay[begin_ + b]);
    }
    int64_t num_types = 0;
    for (int64_t m = 0; m < M && p_.pushes[k] != kStill; ++m)
      num_types = std::max(num_types, p_.first[k * M + m + 1] - p_.first[k * M + m]);
    kinds_.assign(2 * num_types, Kind{});
    gain_.resize(n_);
    const double still = p_.pushes[k] > kStill ? kInfinity : still_cost(1.0);
    // Only configurations cheaper than the known one are searched for; for most prices there is none.
    const double known = p_.known[k];
    best_ = std::min(known, still), best_kind_ = -1, least_ = kInfinity;
    for (const Mode mode : {kAllPushed, kTiersPushed})
      if (num_types > 0 && (mode == kAllPushed || !must_)) types(num_types, mode);
    double value = std::min(best_, least_);
    int64_t at = 0;
    if (p_.columns[k] > 0 && num_types > 0 && std::isfinite(value)) {
      // Pieces must add up to the columns. A table that must push may also have pieces that do not. If
      // the path uses a kind whose cheapest set was not searched for, that is done now.
      double whole = whole_widths(&Kind::least);
      for (int64_t i; whole < known && (i = passed_over()) >= 0; whole = whole_widths(&Kind::least)) look_at(i);
      // The sets found may cost more than their bounds, and other pieces then be cheaper.
      if (whole < known && whole_widths(&Kind::cost) < known) at = path_parts();
      value = std::min(known, whole);
    } else if (best_ < known) {
      at = part(0, 1.0, best_kind_, 1.0);
    }
    p_.value[k] = value;
    p_.num_parts[k] = at;
  }

 private:
  // Pieces of type j with all rows pushed (kind 2 j) or some (kind 2 j + 1).
  struct Kind {
    double least = kInfinity;     // lower bound of the cost of the table in such pieces
    double cost = kInfinity;      // cost with the cheapest set of pushed blocks found
    bool is_exact = false;        // whether `cost` is within tolerance of `least`, or was searched for
    std::vector<int64_t> chosen;  // the set of blocks: 0, or 1 + the option of each block
  };
  static int64_t kind_of(int64_t j, Mode mode) { return 2 * j + (mode == kTiersPushed); }

  // The last piece of the shortest path to a column.
  struct Step {
    double cost = kInfinity;
    int64_t width = 0, kind = -1, lane = 0;
    void take(double other, int64_t w, int64_t i, int64_t l) {
      if (other < cost) *this = {other, w, i, l};
    }
  };

  // Cost of the table in `streams` pieces that push nothing.
  double still_cost(double streams) const {
    if (must_) return kInfinity;
    return std::min(p_.one[k_], all_still_ + streams * p_.tiers[k_]) + (streams - 1.0) * (p_.piece + all_more_);
  }

  // Write part `at` of the configuration: pieces of kind i (-1: nothing is pushed); returns at + 1.
  int64_t part(int64_t at, double share, int64_t i, double streams) {
    const int64_t to = k_ * p_.max_parts + at;
    int64_t* chosen = p_.chosen + at * p_.num_blocks + begin_;
    p_.share[to] = share, p_.part_streams[to] = streams, p_.kind[to] = i < 0 ? 0 : i / 2;
    if (i < 0) {
      p_.mode[to] = p_.one[k_] <= all_still_ + streams * p_.tiers[k_] ? kOneTier : kTiers;
      std::fill(chosen, chosen + n_, int64_t{0});
    } else {
      p_.mode[to] = i % 2 ? kTiersPushed : kAllPushed;
      std::copy(kinds_[i].chosen.begin(), kinds_[i].chosen.end(), chosen);
    }
    return at + 1;
  }

  // Record `chosen_` as the cheapest set of kind i, and of all kinds if it is.
  void keep_set(int64_t i, double cost) {
    kinds_[i].cost = cost, kinds_[i].chosen = chosen_;
    if (cost < best_) best_ = cost, best_kind_ = i;
  }

  // Least id streams of type j over the classes of owners.
  double streams_of(int64_t j) const {
    double least = kInfinity;
    for (int64_t m = 0; m < p_.num_options; ++m) {
      const int64_t at = type_of(j, m);
      if (at >= 0) least = std::min(least, p_.streams[at]);
    }
    return least;
  }

  // Bound all types of pieces in a mode (all rows pushed, or some).
  void types(int64_t num_types, Mode mode) {
    chosen_.assign(n_, 0), class_.assign(n_, 0), found_.assign(n_, 0), other_.assign(n_, 0.0);
    mode_ = mode;
    types_.clear();
    for (int64_t j = 0; j < num_types; ++j)
      if (admitted(j) && (mode == kTiersPushed || heavy(j) == 0)) types_.push_back({begin_type(j), j});
    std::sort(types_.begin(), types_.end());  // the most promising first
    for (const auto& [below, j] : types_) {
      limit_ = best_;
      Kind& kind = kinds_[kind_of(j, mode)];
      kind.least = below < best_ ? least_of(j) : below;
      kind.is_exact = kind.cost <= kind.least + close();
      least_ = std::min(least_, kind.least);
    }
  }

  // Search for the cheapest set of kind i, without a limit by the costs of other kinds.
  void look_at(int64_t i) {
    limit_ = kInfinity, mode_ = i % 2 ? kTiersPushed : kAllPushed;
    kinds_[i].least = least_of(i / 2);
    kinds_[i].is_exact = true;
  }

  // Lower bound of the cost of a table in pieces of type j. It is not raised further once it exceeds
  // `limit_` or the cost of a known set.
  double least_of(int64_t j) {
    const bool must = mode_ == kAllPushed;
    double least = begin_type(j) - offset_;
    if (least < cutoff(j)) least = std::max(least, linear(j, must));
    if (least < cutoff(j)) least = std::max(least, merged(j, must));
    if (of_class_.size() == 1) return least + offset_;
    for (const int64_t m : of_class_) {
      if (least < cutoff(j)) least = std::max(least, beside_lines(j, must, m));
      if (least < cutoff(j)) least = std::max(least, beside_chords(j, must, m, least));
    }
    return least + offset_;
  }

  // Sets `gain_` to the least cost of pushing each block, less that of staying, over the classes of
  // owners, and `class_` to the class.
  void cheapest_classes(bool with_sums) {
    std::fill(gain_.begin(), gain_.end(), kInfinity);
    for (const int64_t m : of_class_)
      for (int64_t b = 0, at = m * n_; b < n_; ++b, ++at) {
        const double cost = pushed_[at] + (with_sums ? least_sums_[at] : 0.0);
        if (cost < gain_[b]) gain_[b] = cost, class_[b] = m + 1;
      }
    for (int64_t b = 0; b < n_; ++b) gain_[b] = std::min(gain_[b] - fixed_[b], 1e30);
  }

  // Bound with partial sums that are linear in the blocks, so that each block chooses independently.
  double linear(int64_t j, bool must) {
    cheapest_classes(true);
    double least = 0;
    for (int64_t b = 0; b < n_; ++b) {
      found_[b] = must || gain_[b] < 0 ? class_[b] : 0;
      least += found_[b] ? gain_[b] : 0.0;
    }
    keep(j, 0);
    return least;
  }

  // Bound with all classes of owners replaced by one, which has the largest capacity and the lowest
  // price of any.
  double merged(int64_t j, bool must) {
    double full = 0, price = kInfinity;
    for (const int64_t m : of_class_) full = std::max(full, full_of(j, m)), price = std::min(price, price_of(m));
    cheapest_classes(false);
    const double least = full_prefixes(full, price, must);
    for (int64_t b = 0; b < n_; ++b) found_[b] = prefixes_.has(b) ? class_[b] : 0;
    keep(j, 0);
    for (const int64_t m : of_class_)
      if (of_class_.size() > 1) keep(j, m + 1);
    return least;
  }

  // Bound with exact partial sums of class `only`, and of each other class the larger of two lower bounds
  // that are linear in the blocks.
  double beside_lines(int64_t j, bool must, int64_t only) {
    begin_other(must);
    for (const int64_t m : of_class_) {
      if (m == only) continue;
      const double most = std::min(mass_all_, full_of(j, m));
      // Cost of a full owner, per id.
      const double share = most > 0 ? sums_cost(j, m, most) / most : 0.0;
      const double* line = &least_sums_[m * n_];
      const bool by_share = share * mass_all_ > std::accumulate(line, line + n_, 0.0);
      lower_other(m, by_share ? p_.ids + begin_ : line, by_share ? share : 1.0);
    }
    return beside_other(j, only);
  }

  // Bound with exact partial sums of class `only`, and of the other classes those of a single owner, at the
  // lowest of their prices. Together they have a share of the lookups in one of several ranges, the first of
  // which contains 0; over each of these, concave partial sums are at least their chord. Ranges are looked at
  // only until the bound is no larger than the bound `known`.
  double beside_chords(int64_t j, bool must, int64_t only, double known) {
    double least = kInfinity, price = kInfinity;
    for (const int64_t m : of_class_)
      if (m != only) price = std::min(price, price_of(m));
    for (size_t i = 0; i + 1 < std::size(kRanges) && least > known; ++i) {
      const double low = kRanges[i], high = kRanges[i + 1], first = sums_at(p_.sums, k_, low);
      const double slope = (sums_at(p_.sums, k_, high) - first) / (high - low);
      const double base = price * (first - low * slope);
      begin_other(must);
      for (const int64_t m : of_class_)
        if (m != only) lower_other(m, p_.ids + begin_, price * slope / p_.total_ids[k_]);
      double below = base;  // without the partial sums of class `only`
      for (int64_t b = 0; b < n_; ++b) below += std::min(other_[b], pushed_[only * n_ + b]) - fixed_[b];
      if (below < least) least = std::min(least, base + beside_other(j, only));
    }
    return least;
  }

  // `other_` is the least cost of each block if class `only` does not have it, and `class_` how: begin
  // with not pushing it.
  void begin_other(bool must) {
    for (int64_t b = 0; b < n_; ++b) other_[b] = must ? kInfinity : fixed_[b], class_[b] = 0;
  }

  // Pushing blocks to class m, with partial sums that cost weight x each[b].
  void lower_other(int64_t m, const double* each, double weight) {
    for (int64_t b = 0; b < n_; ++b) {
      const double cost = pushed_[m * n_ + b] + weight * each[b];
      if (cost < other_[b]) other_[b] = cost, class_[b] = m + 1;
    }
  }

  // Least cost of the table if each block costs `other_` or is in class `only`, with exact partial sums.
  double beside_other(int64_t j, int64_t only) {
    double rest = 0;
    for (int64_t b = 0; b < n_; ++b) {
      rest += other_[b] - fixed_[b];
      gain_[b] = std::min(pushed_[only * n_ + b] - other_[b], 1e30);
    }
    const double least = full_prefixes(full_of(j, only), price_of(only), false);
    for (int64_t b = 0; b < n_; ++b) found_[b] = prefixes_.has(b) ? only + 1 : class_[b];
    keep(j, 0);
    return rest + least;
  }

  // Least cost of a set of blocks in one class of owners who hold at most `full` ids each; `prefixes_` has it.
  double full_prefixes(double full, double price, bool all) {
    const auto sums = [&](double mass) { return mass > 0 ? price * sums_of(full, mass) : 0.0; };
    const auto kinks = [&](double low, double high, auto visit) {
      // Between these masses the cost is concave: the first and the last multiple inside the block.
      const double last = full_before(full, high);
      visit(std::min(last, full * (std::floor(low / full) + 1)));
      visit(last);
    };
    return prefixes_.least(&gain_[0], p_.ids + begin_, n_, all, sums, kinks);
  }

  // Absolute tolerance of a set's cost.
  double close() const {
    return p_.close * (std::abs(rest_) + (std::isfinite(limit_) ? std::abs(limit_) : 0.0));
  }
  // Cost, without `offset_`, from which a set is of no use.
  double cutoff(int64_t j) const { return known_of(j) - offset_; }
  double known_of(int64_t j) const { return std::min(limit_, kinds_[kind_of(j, mode_)].cost); }

  // Set the unit costs of type j; returns a simple lower bound of the cost in such pieces.
  double begin_type(int64_t j) {
    set_type(j);
    const double streams = streams_of(j);
    fixed_.resize(n_);
    rest_ = 0.0;
    for (int64_t b = 0; b < n_; ++b) {
      const double stay = stay_of(streams, begin_ + b);
      fixed_[b] = std::isfinite(stay) ? stay : 0.0;
      rest_ += fixed_[b];
    }
    offset_ = rest_ + (streams - 1.0) * p_.piece +
              (mode_ == kTiersPushed ? streams * p_.tiers_pushed[k_] : 0.0);
    // Every id pays at least the share of partial sums that it has in a full owner, or in all ids.
    std::fill(gain_.begin(), gain_.end(), kInfinity);
    for (const int64_t m : of_class_) {
      const double most = std::min(mass_all_, full_of(j, m));
      const double share = most > 0 ? sums_cost(j, m, most) / most : 0.0;
      lower(&gain_[0], &pushed_[m * n_], p_.ids + begin_, share, n_);
    }
    return offset_ + spare(&gain_[0], &fixed_[0], n_, mode_ == kAllPushed ? kInfinity : 0.0);
  }

  // Set the costs of pushing each block to each class in pieces of type j, without partial sums.
  void set_type(int64_t j) {
    const int64_t M = p_.num_options, n = n_, begin = begin_;
    const int64_t never = mode_ == kTiersPushed ? heavy(j) : 0;  // of types pushed whole, none is
    of_class_.clear();
    pushed_.resize(M * n), least_sums_.resize(M * n);
    for (int64_t m = 0; m < M; ++m) {
      if (!may_push(j, m)) continue;
      const double more = p_.streams[type_of(j, m)] - 1.0;
      const int64_t at = m * p_.num_blocks + begin;
      blend(&pushed_[m * n], p_.go + at, p_.more + at, more, n);
      // An owner of an entire piece sends no requests to itself.
      const bool asks = mode_ == kTiersPushed || mass_of(j, m) < kWhole;
      for (int64_t b = 0; b < n && asks; ++b)
        pushed_[m * n + b] += (more + 1.0) * p_.own[k_ * M + m] * p_.ids[begin + b];
      const double* unit = p_.least_sums + 3 * type_of(j, m);
      for (int64_t b = 0; b < n; ++b) {
        double sums = 0;
        for (int64_t f = 0; f < 3; ++f) sums += unit[f] * p_.features[f * p_.num_blocks + begin + b];
        least_sums_[m * n + b] = price_of(m) * sums;
      }
      std::fill_n(&pushed_[m * n], never, kNever);
      of_class_.push_back(m);
    }
  }

  // Record the set `found_` (with all blocks in one class if `only` > 0) if it is the cheapest so far,
  // at the costs of `set_type`.
  void keep(int64_t j, int64_t only) {
    const int64_t n = n_;
    double total = 0;
    for (const int64_t m : of_class_) {
      if (only > 0 && m != only - 1) continue;
      double cost, ids, sums;
      picked(&found_[0], only ? 0 : m + 1, &pushed_[m * n], &fixed_[0], p_.ids + begin_, &least_sums_[m * n], n,
             &cost, &ids, &sums);
      total += cost + (ids > 0 ? std::max(sums_cost(j, m, ids), sums) : 0.0);
    }
    if (!(total + offset_ < known_of(j))) return;
    for (int64_t b = 0; b < n; ++b) chosen_[b] = found_[b] ? (only ? only : found_[b]) : 0;
    keep_set(kind_of(j, mode_), total + offset_);
  }

  // Cost of a block that is not pushed, in a table cut into `streams` pieces.
  double stay_of(double streams, int64_t block) const {
    return p_.stay[block] + (streams - 1.0) * p_.stay_more[block];
  }
  double full_of(int64_t j, int64_t m) const { return mass_of(j, m) * p_.total_ids[k_]; }
  double price_of(int64_t m) const { return p_.price[k_ * p_.num_options + m]; }
  // Lower bound of the cost of the partial sums of `ids` ids pushed to class m.
  double sums_cost(int64_t j, int64_t m, double ids) const {
    return price_of(m) * sums_of(full_of(j, m), ids);
  }
  // Lower bound of the bytes of partial sums of owners who hold at most `full` ids each. As bytes are
  // concave in the ids of an owner, they are fewest if all owners but one are full.
  double sums_of(double full, double ids) const {
    const double total = p_.total_ids[k_];
    if (ids <= full) return sums_at(p_.sums, k_, ids / total);
    const double before = full_before(full, ids);
    return sums_at(p_.sums, k_, full / total) * std::round(before / full) +
           sums_at(p_.sums, k_, (ids - before) / total);
  }
  // The largest multiple of `full` below `ids`.
  static double full_before(double full, double ids) {
    return full * std::floor(ids / full * (1 - kRounding));
  }

  // The cheapest way to make up a table's columns from pieces, each with the width of some type and its
  // cost per column, or pushing nothing. Columns that remain next to wide pieces need narrower ones, with
  // an id stream each. Shortest path over columns, in two lanes: nothing pushed so far, or something.
  double whole_widths(double Kind::* cost_of) {
    const int64_t columns = p_.columns[k_], step = p_.step, count = columns / step;
    by_width_.assign(count + 1, {kInfinity, 0});  // cost and kind of the cheapest piece of each width
    for (int64_t m = 0; m < p_.num_options; ++m)
      for (int64_t j = 0; 2 * j < int64_t(kinds_.size()); ++j) {
        const int64_t at = type_of(j, m);
        // A class that can hold the table as one piece has only that type.
        if (at < 0 || p_.mass[at] <= 0 || (j > 0 && at == type_of(0, m))) continue;
        const int64_t low = std::llround(p_.narrowest[at]) / step,
                      high = std::llround(double(columns) / p_.streams[at]) / step;
        for (int64_t w = low; w <= high; ++w)
          for (int64_t i = 2 * j; i < 2 * j + 2; ++i)
            by_width_[w] = std::min(by_width_[w], std::pair(kinds_[i].*cost_of, i));
      }
    steps_.assign(kLanes * (count + 1), Step{});
    steps_[0].cost = 0;
    for (int64_t to = 1; to <= count; ++to)
      for (int64_t w = 1; w <= to; ++w) {
        const double share = double(w) / double(count);
        const auto [pushed, i] = by_width_[w];
        const Step* from = &steps_[kLanes * (to - w)];
        Step* x = &steps_[kLanes * to];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          x[lane].take(from[lane].cost + share * still_cost(1 / share), w, -1, lane);
          x[kIsPushed].take(from[lane].cost + share * pushed, w, i, lane);
        }
      }
    const uint8_t pushes = p_.pushes[k_];
    const bool may[kLanes] = {pushes <= kStill, pushes != kStill};
    double least = kInfinity;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      if (const double cost = steps_[kLanes * count + lane].cost; may[lane] && cost < least)
        least = cost, lane_ = lane;
    return least;
  }

  // Call `look` for the steps of the path of `whole_widths`, last to first.
  template <class Look>
  void along_path(Look look) const {
    int64_t lane = lane_;
    for (int64_t at = p_.columns[k_] / p_.step; at > 0;) {
      const Step& x = steps_[kLanes * at + lane];
      look(x);
      at -= x.width, lane = x.lane;
    }
  }

  // A kind on the path that is not exact; -1 if there is none.
  int64_t passed_over() const {
    int64_t kind = -1;
    along_path([&](const Step& x) {
      if (kind < 0 && x.kind >= 0 && !kinds_[x.kind].is_exact) kind = x.kind;
    });
    return kind;
  }

  // Write the parts of the path; returns their number.
  int64_t path_parts() {
    const int64_t count = p_.columns[k_] / p_.step;
    std::vector<std::pair<std::pair<int64_t, int64_t>, int64_t>> parts;  // kind and width; how often
    along_path([&](const Step& x) {
      const std::pair<int64_t, int64_t> piece{x.kind, x.width};
      auto same = std::find_if(parts.begin(), parts.end(), [&](const auto& y) { return y.first == piece; });
      if (same == parts.end()) parts.push_back({piece, 1});
      else ++same->second;
    });
    int64_t number = 0;
    for (const auto& [piece, times] : parts)
      number = part(number, double(times * piece.second) / double(count), piece.first,
                    double(count) / double(piece.second));
    return number;
  }

  int64_t type_of(int64_t j, int64_t m) const {  // -1 if option m has no such type
    const int64_t at = k_ * p_.num_options + m, count = p_.first[at + 1] - p_.first[at];
    if (count == 1) return p_.first[at];  // one piece, even if the table is cut for other options
    return j < count ? p_.first[at] + j : -1;
  }
  double mass_of(int64_t j, int64_t m) const {
    const int64_t at = type_of(j, m);
    return at < 0 ? 0.0 : p_.mass[at];
  }
  bool admitted(int64_t j) const {
    for (int64_t m = 0; m < p_.num_options; ++m)
      if (may_push(j, m)) return true;
    return false;
  }
  // The number of first blocks that may not be pushed in pieces of type j.
  int64_t heavy(int64_t j) const {
    int64_t least = n_;
    for (int64_t m = 0; m < p_.num_options; ++m)
      if (may_push(j, m)) least = std::min(least, p_.heavy[type_of(j, m)]);
    return least;
  }
  // Whether a class may own pieces of type j; then it may own every block of the table that is not heavy.
  bool may_push(int64_t j, int64_t m) const {
    return mass_of(j, m) > 0 && std::isfinite(p_.go[m * p_.num_blocks + begin_]);
  }
  OperPricing& p_;
  int64_t k_ = 0, begin_ = 0, n_ = 0;  // a table, and its blocks
  double all_still_ = 0, all_more_ = 0, mass_all_ = 0;
  bool must_ = false;
  int64_t best_kind_ = -1;  // -1: nothing is pushed
  double best_ = 0, least_ = 0, rest_ = 0, offset_ = 0;
  double limit_ = kInfinity;  // sets that cost more are not searched for
  Mode mode_ = kAllPushed;
  static constexpr int64_t kIsPushed = 1, kLanes = 2;
  int64_t lane_ = 0;
  Prefixes prefixes_;
  std::vector<double> gain_, fixed_, other_, pushed_, least_sums_;
  std::vector<Kind> kinds_;
  std::vector<Step> steps_;
  std::vector<std::pair<double, int64_t>> by_width_, types_;
  std::vector<int64_t> chosen_, class_, found_, of_class_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int oper_price(OperPricing* pricing) {
  if (!is_known(*pricing)) return 1;
  OperPricing& p = *pricing;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    Pricing one(p);
    for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < p.num_tables;) one.table(k);
  };
  std::thread other;
  if (p.num_options * p.num_tables > kAlone) {
    try {
      other = std::thread(work);
    } catch (const std::system_error&) {  // continue with one thread
    }
  }
  work();
  if (other.joinable()) other.join();
  return 0;
}
