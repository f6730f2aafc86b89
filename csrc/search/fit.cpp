#include "search/price.h"
#include "search/sums.h"

#include <algorithm>

namespace {

constexpr int kGroups = 5;
constexpr int kBisections = 20;

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

}  // namespace

extern "C" __attribute__((visibility("default"))) int oper_fit(OperFit* fit) {
  if (!is_known(*fit)) return 1;
  Fit(*fit).run();
  return 0;
}
