// How large a share (mass) of a table's lookups one owner of pushed rows can have, for each type of
// column piece and class of ranks, so that no rank exceeds the limits of an OperFit; which of the hottest
// rows no owner can have; and lower bounds of the partial sums that follow from it.
#include "search/price.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

constexpr int kGroups = 5;        // groups of loads per phase; the largest counts
constexpr int kBisections = 20;
constexpr double kRounding = 1e-8;  // relative tolerance within which a single row keeps a limit
constexpr int64_t kFeatures = 3;  // see OperFit::per_unit

// A limit of the load of one owner.
struct Limit {
  // Load of all lookups of a table: if all were to the block with the least load per id, if all
  // were to the one with the largest, and as they are.
  double least = 0, most = 0, mean = 0;
  double partial = 0;  // load of a byte of partial sums
  double limit = 0;
};

class Fit {
 public:
  explicit Fit(OperFit& f) : f_(f) {}

  void run() {
    for (int64_t k = 0; k < f_.num_tables; ++k) {
      std::fill(f_.heavy + f_.first[k], f_.heavy + f_.first[k + 1], f_.num_hot);
      for (int64_t c = 0; c < f_.num_classes; ++c) table(k, c);
    }
  }

 private:
  void table(int64_t k, int64_t c) {
    const int64_t begin = f_.first[k], end = f_.first[k + 1];
    const double widest = f_.narrow[begin], narrowest = f_.narrow[end - 1];
    table_ = k, class_ = c;
    for (int64_t j = begin; j < end; ++j) {
      // Loads are linear in the width; `f_.density` has those of the whole row and of the narrowest
      // piece.
      along_ = widest > narrowest ? (widest - f_.narrow[j]) / (widest - narrowest) : 0.0;
      part_ = f_.narrow[j] / widest;
      double low = 0, high = 1;
      if (fits(1.0)) {
        low = 1;
      } else if (!fits(0.0)) {
        high = 0;
      } else {
        for (int n = 0; n < kBisections; ++n) {
          const double middle = (low + high) / 2;
          (fits(middle) ? low : high) = middle;
        }
      }
      const int64_t at = j * f_.num_classes + c;
      f_.mass[at] = low == 1 ? 1.0 : high;
      if (f_.mass[at] > 0 && low < 1) least_sums(f_.least_sums + at * kFeatures);
      if (f_.mass[at] > 0 && f_.may[k * f_.num_classes + c])
        f_.heavy[j] = std::min(f_.heavy[j], f_.mass[at] < 1 ? heavy_rows() : 0);
    }
    f_.whole[k * f_.num_classes + c] = f_.mass[begin * f_.num_classes + c] == 1.0;
  }

  // Lower bound of load g of an owner with this mass, without partial sums: convex and nondecreasing.
  double least_load(int64_t g, double mass) const {
    const int64_t size = 2 * f_.num_tangents;
    const double* whole = f_.tangents + ((table_ * f_.num_classes + class_) * 2 * f_.num_loads + g) * size;
    const double* narrow = whole + f_.num_loads * size;
    double load = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < size; i += 2) {
      const double none = whole[i] + along_ * (narrow[i] - whole[i]);
      const double all = whole[i + 1] + along_ * (narrow[i + 1] - whole[i + 1]);
      load = std::max(load, none + mass * (all - none));
    }
    return load;
  }
  // Load g of all lookups; `which`: 0, 1, 2 = Limit::least, most, mean.
  double density(int64_t g, int64_t which) const {
    return along(f_.density + (table_ * f_.num_classes + class_) * 2 * f_.num_loads * kFeatures, g, which);
  }
  double along(const double* x, int64_t g, int64_t which) const {
    const double whole = x[g * kFeatures + which], narrow = x[(f_.num_loads + g) * kFeatures + which];
    return whole + along_ * (narrow - whole);
  }

  // Whether an owner with this mass, of the rows that load it least, keeps all limits.
  bool fits(double mass) const {
    const double* asks = f_.asks + (table_ * f_.num_classes + class_) * f_.num_loads;
    const double bytes = part_ * sums_at(f_.sums, table_, mass);
    return keeps_limits(
        [&](int64_t g) { return least_load(g, mass) - (mass == 1 ? asks[g] : 0.0) + bytes * partial(g); }, 1.0);
  }

  // How many of the hottest rows no owner of a part of the table can have: a row has one owner, whose
  // load is at least that of the row and its partial sums, and the least load of any further rows. If
  // sums load their owner less than a reader, it is assumed to send all.
  int64_t heavy_rows() const {
    const double* units = f_.per_unit + (table_ * f_.num_classes + class_) * 2 * f_.num_loads * kFeatures;
    for (int64_t n = 0; n < f_.num_hot; ++n) {
      const double* row = f_.hot + (table_ * f_.num_hot + n) * kFeatures;
      const double its = part_ * sums_at(f_.sums, table_, row[0] / f_.total_ids[table_]),
                   sums = sums_at(f_.sums, table_, 1.0);
      const auto load = [&](int64_t g) {
        double all = 0, here = 0;  // load of all columns, and of the narrowest piece of the type
        for (int64_t i = 0; i < kFeatures; ++i)
          all += row[i] * units[g * kFeatures + i], here += row[i] * along(units, g, i);
        return std::min(all, here) + least_load(g, 0.0) + partial(g) * (partial(g) > 0 ? its : sums);
      };
      if (keeps_limits(load, 1 + kRounding)) return n;
    }
    return f_.num_hot;
  }

  // Load g of a byte of partial sums on its owner.
  double partial(int64_t g) const { return f_.partial[(table_ * f_.num_classes + class_) * f_.num_loads + g]; }

  // Whether an owner with load(g) keeps all limits, times `slack`.
  template <class Load>
  bool keeps_limits(Load load, double slack) const {
    const int64_t G = f_.num_loads;
    double step = 0;
    for (int64_t phase = 0; phase < G; phase += kGroups) {
      double busy = 0;
      for (int64_t g = phase; g < phase + kGroups; ++g) {
        const double of_owner = load(g);
        if (of_owner > f_.most[g] * slack) return false;
        busy = std::max(busy, of_owner + f_.floor[class_ * G + g]);
      }
      step += busy;
    }
    return step <= f_.step * slack;
  }

  // Lower bound of the partial sums, linear in the features of the rows.
  //
  // An owner whose rows have load r per unit of mass can have at most the mass m(r) at which r m +
  // s(m) = limit, where s(m) is the load of its partial sums, concave in m. So it sends at least
  // s(m) / m of partial sums per unit of mass. This is concave in r, so that an owner with rows of
  // different r sends no less than the mean of its rows' values, which is no less than the chord
  // between the smallest and the largest r of the table. The chord is linear in r. Of all limits,
  // that with the largest bound for the whole table is used.
  void least_sums(double* out) const {
    double best = 0;
    const auto look = [&](const Limit& x, auto unit) {
      const double low = by_mass(x, x.least), high = by_mass(x, x.most);
      const double slope = x.most > x.least ? std::max(0.0, (high - low) / (x.most - x.least)) : 0.0;
      const double all = low + slope * (x.mean - x.least);
      if (!(all > best)) return;
      best = all;
      for (int64_t n = 0; n < kFeatures; ++n) out[n] = slope * unit(n);
      out[0] += (low - slope * x.least) / f_.total_ids[table_];
    };
    const double* units = f_.per_unit + (table_ * f_.num_classes + class_) * 2 * f_.num_loads * kFeatures;
    const double bytes = part_ * sums_at(f_.sums, table_, 1.0);
    const double* floor = f_.floor + class_ * f_.num_loads;
    Limit step;  // on the sum of all phases, with one group of each
    step.limit = f_.step;
    double step_unit[kFeatures] = {};
    for (int64_t phase = 0; phase < f_.num_loads; phase += kGroups) {
      int64_t top = phase;
      for (int64_t g = phase; g < phase + kGroups; ++g) {
        const Limit x{density(g, 0), density(g, 1), density(g, 2), part_ * partial(g), f_.most[g]};
        if (std::isfinite(x.limit)) look(x, [&](int64_t n) { return along(units, g, n); });
        if (density(g, 2) + bytes * partial(g) > density(top, 2) + bytes * partial(top)) top = g;
      }
      step.least += density(top, 0), step.most += density(top, 1), step.mean += density(top, 2);
      step.partial += part_ * partial(top), step.limit -= floor[top];
      for (int64_t n = 0; n < kFeatures; ++n) step_unit[n] += along(units, top, n);
    }
    if (std::isfinite(step.limit)) look(step, [&](int64_t n) { return step_unit[n]; });
    // An owner of the whole table sends as much already: no bound beyond that is needed.
    if (best <= sums_at(f_.sums, table_, 1.0)) std::fill(out, out + kFeatures, 0.0);
  }

  // Partial sums per unit of mass of the largest possible owner of rows with load `weight` per unit
  // of mass; linear in it if that owner could have the whole table.
  double by_mass(const Limit& x, double weight) const {
    const double all = sums_at(f_.sums, table_, 1.0);
    if (weight + x.partial * all <= x.limit) return all * weight / (x.limit - x.partial * all);
    double low = 0, high = 1;
    for (int n = 0; n < kBisections; ++n) {
      const double middle = (low + high) / 2;
      (weight * middle + x.partial * sums_at(f_.sums, table_, middle) <= x.limit ? low : high) = middle;
    }
    return sums_at(f_.sums, table_, high) / high;
  }

  OperFit& f_;
  int64_t table_ = 0, class_ = 0;
  double along_ = 0, part_ = 1;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int oper_fit(OperFit* fit) {
  if (!is_known(*fit)) return 1;
  Fit(*fit).run();
  return 0;
}
