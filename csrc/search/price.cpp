#include "search/clones.h"
#include "search/price.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kGroups = 5;
constexpr int kBisections = 20;

// Linear between the points of the grid: from below, because the bytes are concave in the share.
double sums_at(const OperSums& s, int64_t table, double share) {
  const double* y = s.bytes + table * s.num_points;
  if (share <= 0) return 0.0;
  if (share >= 1) return y[s.num_points - 1];
  if (share <= s.first) return y[0] * (share / s.first);
  const double at = std::log(share / s.first) / std::log(s.ratio);
  const int64_t i = std::min<int64_t>(int64_t(at), s.num_points - 2);
  const double low = s.first * std::pow(s.ratio, double(i)), high = low * s.ratio;
  return y[i] + std::clamp((share - low) / (high - low), 0.0, 1.0) * (y[i + 1] - y[i]);
}

class Fit {
 public:
  explicit Fit(OperFit& f) : f_(f) {}

  void run() {
    for (int64_t k = 0; k < f_.num_tables; ++k)
      for (int64_t c = 0; c < f_.num_classes; ++c) table(k, c);
  }

 private:
  void table(int64_t k, int64_t c) {
    const int64_t begin = f_.first[k], end = f_.first[k + 1];
    const double widest = f_.narrow[begin], narrowest = f_.narrow[end - 1];
    for (int64_t j = begin; j < end; ++j) {
      // Loads are linear in the width; `own` holds the whole row's and the narrowest piece's.
      const double along = widest > narrowest ? (widest - f_.narrow[j]) / (widest - narrowest) : 0.0;
      const double part = f_.narrow[j] / widest;
      double low = 0, high = 1;
      if (fits(k, c, along, part, 1.0)) {
        low = 1;
      } else if (!fits(k, c, along, part, 0.0)) {
        high = 0;
      } else {
        for (int n = 0; n < kBisections; ++n) {
          const double middle = (low + high) / 2;
          (fits(k, c, along, part, middle) ? low : high) = middle;
        }
      }
      f_.mass[j * f_.num_classes + c] = low == 1 ? 1.0 : high;
    }
    f_.whole[k * f_.num_classes + c] = f_.mass[begin * f_.num_classes + c] == 1.0;
  }

  bool fits(int64_t k, int64_t c, double along, double part, double mass) const {
    const int64_t G = f_.num_loads;
    const double* own = f_.own + (k * f_.num_classes + c) * 2 * G;
    const double* partial = f_.partial + c * G;
    const double bytes = part * sums_at(f_.sums, k, mass);
    double step = 0;
    for (int64_t phase = 0; phase < G; phase += kGroups) {
      double busy = 0;
      for (int64_t g = phase; g < phase + kGroups; ++g) {
        const double load = mass * (own[g] + along * (own[G + g] - own[g])) + bytes * partial[g];
        if (load > f_.most[g]) return false;
        busy = std::max(busy, load + f_.floor[c * G + g]);
      }
      step += busy;
    }
    return step <= f_.step;
  }

  OperFit& f_;
};

// least[b] = min(least[b], cost[b] + weight ids[b])
OPER_CLONES void lower(double* __restrict least, const double* cost, const double* ids,
                       double weight, int64_t n) {
  for (int64_t b = 0; b < n; ++b) {
    const double x = cost[b] + weight * ids[b];
    least[b] = x < least[b] ? x : least[b];
  }
}

// gain[b] -= fixed[b], at most 1e30; returns the sum of what is at most `limit`, and `limit` of others.
OPER_CLONES double spare(double* __restrict gain, const double* fixed, int64_t n, double limit) {
  constexpr int64_t kSums = 8;  // in this order whatever the processor
  double sums[kSums] = {};
  for (int64_t b = 0; b < n; ++b) {
    const double x = gain[b] - fixed[b];
    gain[b] = x < 1e30 ? x : 1e30;
  }
  int64_t b = 0;
  for (; b + kSums <= n; b += kSums)
    for (int64_t i = 0; i < kSums; ++i) sums[i] += gain[b + i] < limit ? gain[b + i] : limit;
  for (int64_t i = 0; b < n; ++b, ++i) sums[i] += gain[b] < limit ? gain[b] : limit;
  double sum = 0;
  for (const double x : sums) sum += x;
  return sum;
}

class Pricing {
 public:
  explicit Pricing(OperPricing& p) : p_(p) {}

  void run() {
    for (int64_t n = 0; n < p_.num_tables; ++n) table(p_.first_table + n);
  }

 private:
  void table(int64_t k) {
    const int64_t begin = p_.starts[k], n = p_.starts[k + 1] - begin, M = p_.num_options;
    k_ = k;
    std::fill(p_.chosen + begin, p_.chosen + begin + n, int64_t{0});
    p_.kind[k] = 0;
    const double* stay = p_.stay + begin;
    const double* ids = p_.ids + begin;
    double rest = 0, mass = 0;
    bool must = false;
    for (int64_t b = 0; b < n; ++b) {
      rest += stay[b], mass += ids[b];
      must |= !std::isfinite(stay[b]);
    }
    int64_t num_types = 0;
    for (int64_t m = 0; m < M; ++m)
      num_types = std::max(num_types, p_.first[k * M + m + 1] - p_.first[k * M + m]);
    best_ = must ? kInfinity : 0.0;
    chosen_.assign(n, 0);
    gain_.resize(n), order_.resize(n), slope_.resize(n);
    if (M > 1) {
      several(begin, n, num_types, mass, must);
      p_.value[k] = rest_ + std::min(best_, least_);
      std::copy(chosen_.begin(), chosen_.end(), p_.chosen + begin);
      return;
    }
    for (int64_t j = 0; j < num_types; ++j) {
      if (!admitted(j)) continue;
      for (int64_t b = 0; b < n; ++b) gain_[b] = go(j, begin + b);
      if (must) {  // nothing but push is allowed
        const double total = std::accumulate(gain_.begin(), gain_.end(), 0.0) + cost(j, mass);
        if (total < best_) best_ = total, p_.kind[k] = j, chosen_.assign(n, 1);
        continue;
      }
      // No set costs less than if every id paid the least share of partial sums, that of all ids.
      const double least = mass > 0 ? cost(j, mass) / mass : 0.0;
      double below = 0;
      for (int64_t b = 0; b < n; ++b) {
        gain_[b] = std::isfinite(gain_[b]) ? gain_[b] - stay[b] : 1e30;
        below += std::min(0.0, gain_[b] + least * ids[b]);
      }
      if (below < best_) prefixes(j, ids, n);
    }
    p_.value[k] = must ? best_ : rest + best_;
    std::copy(chosen_.begin(), chosen_.end(), p_.chosen + begin);
  }

  // Rows of a table may be pushed to several classes of owners. Partial sums f are concave in an
  // owner's mass and f(0) = 0, so that f(q) >= q f(Q) / Q for each class's share q of the pushed
  // mass Q: with this chord blocks choose their class for themselves. It falls with Q, so for all
  // sets with a mass of at most Q its value at Q is a bound; sets are divided by their mass until
  // the bound is close to the cost of a real set.
  void several(int64_t begin, int64_t n, int64_t num_types, double mass, bool must) {
    rest_ = 0.0, least_ = kInfinity;
    fixed_.resize(n);
    for (int64_t b = 0; b < n; ++b) {
      const double stay = p_.stay[begin + b];
      fixed_[b] = std::isfinite(stay) ? stay : 0.0;
      rest_ += fixed_[b];
    }
    class_.assign(n, 0), found_.assign(n, 0);
    types_.clear();
    for (int64_t j = 0; j < num_types; ++j)
      if (admitted(j)) {
        set_type(j, begin, n);
        types_.push_back({gains(j, begin, n, mass, must), j});
      }
    std::sort(types_.begin(), types_.end());  // the most promising first
    for (const auto& [below, j] : types_) {
      if (below >= best_ - close()) {
        least_ = std::min(least_, below);
        continue;
      }
      set_type(j, begin, n);
      intervals_.assign(1, {must ? mass : 0.0, mass});
      while (!intervals_.empty()) {
        const auto [low, high] = intervals_.back();
        intervals_.pop_back();
        const double bound = between(j, begin, n, low, high, must);
        if (must || bound >= best_ - close() || high <= low * p_.narrow || high <= mass * 1e-6) {
          least_ = std::min(least_, bound);
          continue;
        }
        const double middle = low > 0 ? std::sqrt(low * high) : high / 2;
        intervals_.push_back({low, middle}), intervals_.push_back({middle, high});
      }
    }
  }

  double close() const {
    return p_.close * (std::abs(rest_) + (std::isfinite(best_) ? std::abs(best_) : 0.0));
  }

  // Least cost, against staying, of pushing a mass between `low` and `high` in pieces of type j; a
  // real set that is cheaper than all before is kept.
  double between(int64_t j, int64_t begin, int64_t n, double low, double high, bool must) {
    const double* ids = p_.ids + begin;
    const double all = gains(j, begin, n, high, must);
    if (!must && all >= best_ - close()) return all;
    classes(begin, n);
    double gained = 0;  // mass of the blocks that would rather be pushed
    for (int64_t b = 0; b < n; ++b) gained += gain_[b] < 0 ? ids[b] : 0.0;
    if (!must && low <= gained && gained <= high) {
      for (int64_t b = 0; b < n; ++b) found_[b] = gain_[b] < 0 ? class_[b] : 0;
      keep_found(j, begin, n, all);
      return all;
    }
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
    double mass = 0, total = 0;
    std::fill(found_.begin(), found_.end(), int64_t{0});
    for (int64_t i = 0; i < n; ++i) {
      const int b = order_[i];
      if (!must && mass >= low && gain_[b] >= 0) break;
      double part = 1.0;  // of the block, as much as the mass allows or asks for
      if (!must && ids[b] > 0) {
        part = std::min(1.0, (high - mass) / ids[b]);
        if (gain_[b] >= 0) part = std::min(part, (low - mass) / ids[b]);
      }
      if (part <= 0) break;
      total += part * gain_[b], mass += part * ids[b];
      found_[b] = class_[b];
    }
    keep_found(j, begin, n, total);
    return total;
  }

  // Keep the blocks of `found_`, or them in one class, where their bound `total` leaves hope.
  void keep_found(int64_t j, int64_t begin, int64_t n, double total) {
    if (total >= best_) return;
    for (int64_t m = 0; m <= p_.num_options; ++m) keep(j, begin, n, m);
  }

  // What pushing each block to each class costs in pieces of type j, partial sums apart.
  void set_type(int64_t j, int64_t begin, int64_t n) {
    const int64_t M = p_.num_options;
    of_class_.clear();
    pushed_.resize(M * n);
    for (int64_t m = 0; m < M; ++m) {
      if (mass_of(j, m) <= 0) continue;
      const double more = p_.streams[type_of(j, m)] - 1.0;
      double* to = &pushed_[m * n];
      for (int64_t b = 0; b < n; ++b) {
        const int64_t at = (begin + b) * M + m;
        to[b] = p_.go[at] + more * p_.more[at];
      }
      of_class_.push_back(m);
    }
  }

  // What every block costs at least when a mass of at most `high` is pushed, against staying; returns
  // the sum over the blocks that are pushed.
  double gains(int64_t j, int64_t begin, int64_t n, double high, bool must) {
    weight_.clear();
    std::fill(gain_.begin(), gain_.begin() + n, kInfinity);
    for (const int64_t m : of_class_) {
      weight_.push_back(high > 0 ? sums_cost(j, m, high) / high : kInfinity);
      if (high > 0) lower(&gain_[0], &pushed_[m * n], p_.ids + begin, weight_.back(), n);
    }
    return spare(&gain_[0], &fixed_[0], n, must ? kInfinity : 0.0);
  }

  // The classes by which blocks cost what `gains` found.
  void classes(int64_t begin, int64_t n) {
    for (int64_t b = 0; b < n; ++b) {
      double least = kInfinity;
      for (size_t i = 0; i < of_class_.size(); ++i) {
        const double x = pushed_[of_class_[i] * n + b] + p_.ids[begin + b] * weight_[i];
        if (x < least) least = x, class_[b] = of_class_[i] + 1;
      }
    }
  }

  // Keep the blocks of `found_` if pushing them (all to one class: `only` > 0) is the cheapest yet.
  void keep(int64_t j, int64_t begin, int64_t n, int64_t only) {
    double total = 0;
    owned_.assign(p_.num_options, 0.0);
    for (int64_t b = 0; b < n; ++b) {
      if (!found_[b]) continue;
      const int64_t m = (only ? only : found_[b]) - 1;
      if (mass_of(j, m) <= 0) return;
      total += go_of(j, m, begin + b) - fixed_[b];
      owned_[m] += p_.ids[begin + b];
    }
    for (int64_t m = 0; m < p_.num_options; ++m)
      if (owned_[m] > 0) total += sums_cost(j, m, owned_[m]);
    if (!(total < best_)) return;
    best_ = total, p_.kind[k_] = j;
    for (int64_t b = 0; b < n; ++b) chosen_[b] = found_[b] ? (only ? only : found_[b]) : 0;
  }

  double go_of(int64_t j, int64_t m, int64_t block) const {
    const int64_t at = block * p_.num_options + m;
    return p_.go[at] + (p_.streams[type_of(j, m)] - 1.0) * p_.more[at];
  }
  // Cost of the partial sums of so many ids pushed to class m, from below.
  double sums_cost(int64_t j, int64_t m, double ids) const {
    const double total = p_.total_ids[k_], most = std::min(ids, mass_of(j, m) * total);
    return p_.price[m] * sums_at(p_.sums, k_, most / total) * (ids / most);
  }

  // Blocks by what pushing costs per id: the best set is a prefix, or ends where an owner is full.
  void prefixes(int64_t j, const double* ids, int64_t n) {
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
    kinks_.clear();
    for (int64_t m = 0; m < p_.num_options; ++m) {
      const double full = mass_of(j, m);
      if (full > 0 && full < 1) kinks_.push_back(full * p_.total_ids[k_]);
    }
    double mass = 0, total = 0;
    for (int64_t count = 0; count <= n; ++count) {
      const double found = total + cost(j, mass);
      if (found < best_) {
        best_ = found, p_.kind[k_] = j;
        std::fill(chosen_.begin(), chosen_.end(), int64_t{0});
        for (int64_t i = 0; i < count; ++i) chosen_[order_[i]] = 1;
      }
      if (count == n) break;
      const int b = order_[count];
      for (const double at : kinks_) {
        if (at > mass && at < mass + ids[b]) {
          const double inside = total + gain_[b] * (at - mass) / ids[b] + cost(j, at);
          if (inside < best_) best_ = inside;  // no column; the prefix next to it is one
        }
      }
      mass += ids[b], total += gain_[b];
    }
  }

  int64_t type_of(int64_t j, int64_t m) const {  // -1: option m has no such type
    const int64_t at = k_ * p_.num_options + m, count = p_.first[at + 1] - p_.first[at];
    if (count == 1) return p_.first[at];  // as one piece, whatever is cut elsewhere
    return j < count ? p_.first[at] + j : -1;
  }
  double mass_of(int64_t j, int64_t m) const {
    const int64_t at = type_of(j, m);
    return at < 0 ? 0.0 : p_.mass[at];
  }
  bool admitted(int64_t j) const {
    for (int64_t m = 0; m < p_.num_options; ++m)
      if (mass_of(j, m) > 0) return true;
    return false;
  }
  double go(int64_t j, int64_t block) const {
    return mass_of(j, 0) > 0 ? go_of(j, 0, block) : kInfinity;
  }
  double cost(int64_t j, double ids) const { return ids <= 0 ? 0.0 : sums_cost(j, 0, ids); }

  OperPricing& p_;
  int64_t k_ = 0;
  double best_ = 0, least_ = 0, rest_ = 0;
  std::vector<double> gain_, slope_, kinks_, fixed_, owned_, pushed_, weight_;
  std::vector<std::pair<double, double>> intervals_;
  std::vector<std::pair<double, int64_t>> types_;
  std::vector<int> order_;
  std::vector<int64_t> chosen_, class_, found_, of_class_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void oper_fit(OperFit* fit) { Fit(*fit).run(); }

extern "C" __attribute__((visibility("default"))) void oper_price(OperPricing* pricing) {
  Pricing(*pricing).run();
}
