// Groups of lanes that process a row together, and how a row is spread over their registers.
#pragma once

#include <type_traits>

#include "device/device.h"
#include "device/platform.cuh"

namespace oper::device {

// G consecutive lanes of a warp, which must call every member together. `in_step`: all groups of
// the warp call members together (in lockstep), each with its own values. Without lockstep,
// divergent groups run one after another, and shuffles take several more instructions, as the
// compiler does not know their mask.
template <int G>
struct Group {
  int lane;
  bool in_step;
  unsigned mask;

  OPER_DEVICE explicit Group(bool warp_in_step = false) : in_step(G < 32 && warp_in_step) {
    const int in_warp = static_cast<int>(threadIdx.x) % 32;
    lane = in_warp % G;
    mask = G == 32 || in_step ? ~0u : ((1u << (G % 32)) - 1u) << (in_warp / G * G);
  }
  // Whether `holds` is true for this group or, in lockstep, for any group of the warp.
  OPER_DEVICE bool any(bool holds) const {
    return in_step ? __any_sync(mask, holds) : holds;
  }
  // This group's `number` or, in lockstep, the maximum over the warp's groups.
  OPER_DEVICE int most(int number) const {
    if (!in_step) return number;
#pragma unroll
    for (int distance = G; distance < 32; distance *= 2) {
      const int other = __shfl_xor_sync(mask, number, distance, 32);
      number = other > number ? other : number;
    }
    return number;
  }
  template <class T>
  OPER_DEVICE T shuffle(T value, int from) const {
    return __shfl_sync(mask, value, from, G);
  }
  template <class T>
  OPER_DEVICE T shuffle_xor(T value, int distance) const {
    return __shfl_xor_sync(mask, value, distance, G);
  }
  // Bit l is the value of lane l of this group.
  OPER_DEVICE unsigned ballot(bool value) const {
    const int first = static_cast<int>(threadIdx.x) % 32 / G * G;
    const unsigned bits = __ballot_sync(mask, value) >> first;
    return G == 32 ? bits : bits & ((1u << (G % 32)) - 1u);
  }
  OPER_DEVICE void sync() const { __syncwarp(mask); }

  // Number of this group in the grid, and the number of groups.
  static OPER_DEVICE int64_t index() { return thread_index() / G; }
  static OPER_DEVICE int64_t count() { return num_threads() / G; }
};

OPER_DEVICE bool is_set(unsigned bits, int k) { return bits >> k & 1u; }

// Copies a row with all lanes of a group, in parts of 16, 4 or 2 bytes as size and addresses allow.
template <int G>
OPER_DEVICE void copy_row(const Group<G>& group, char* to, const char* from, int64_t num_bytes) {
  const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                       static_cast<uint64_t>(num_bytes);
  const auto copy = [&](auto part) {
    using Part = decltype(part);
    for (int64_t at = group.lane * sizeof(Part); at < num_bytes; at += G * sizeof(Part))
      *reinterpret_cast<Part*>(to + at) = *reinterpret_cast<const Part*>(from + at);
  };
  if (all % 16 == 0) {
    copy(uint4{});
  } else if (all % 4 == 0) {
    copy(uint32_t{});
  } else {
    copy(uint16_t{});
  }
}

// ---- parts of rows -----------------------------------------------------------------------------

// How a row is spread over a group: lane l has the columns [c, c + E) with c = (i * G + l) * E, for
// i < V. E elements of type T take 16 bytes; or E = 1, if the size of rows is not a multiple of 16
// bytes.
template <class T_, int E_, int G_, int V_>
struct Shape {
  using T = T_;
  static constexpr int E = E_, G = G_, V = V_;
  static OPER_DEVICE int column(int i, int lane) { return (i * G + lane) * E; }
};

// The same rows spread over half as many lanes, if each lane then has 32 bytes: a warp processes
// twice as many rows at a time, with fewer instructions per row.
template <class S>
using Halved = std::conditional_t<S::V == 1 && S::E * sizeof(typename S::T) == 16 && (S::G >= 8),
                                  Shape<typename S::T, S::E, S::G / 2, 2>, S>;

// The same for rows of 32-bit elements only: for kernels in which 16-bit ones do not gain, as their
// groups are not in lockstep or shared memory holds too few of the longer parts.
template <class S>
using HalvedIf32 = std::conditional_t<sizeof(typename S::T) == 4, Halved<S>, S>;

// Blocks of 256 threads that a multiprocessor must hold (__launch_bounds__): two if a row takes few
// registers.
template <class Shape>
constexpr int kBlocks = Shape::V * Shape::E <= 16 ? 2 : 1;

// E consecutive elements as they are in memory, in which form rows in flight take few registers.
template <class S, int E>
struct Part {
  static constexpr bool kWords = E * sizeof(S) % 16 == 0;
  static constexpr int kCount = kWords ? E * sizeof(S) / 16 : 1;
  static constexpr int kPer = kWords ? 16 / sizeof(S) : E;
  struct Elements {
    S at[kPer];
  };
  using Word = std::conditional_t<kWords, uint4, Elements>;
  Word words[kCount];

  // `wide`: the address is a multiple of 16. __ldg is allowed because no kernel loads a part again
  // that has changed since.
  OPER_DEVICE void load(const S* from, bool wide) {
    if constexpr (kWords) {
      if (wide) {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          words[k] = __ldg(reinterpret_cast<const uint4*>(from) + k);
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      Elements part;
#pragma unroll
      for (int j = 0; j < kPer; ++j) part.at[j] = from[k * kPer + j];
      __builtin_memcpy(&words[k], &part, sizeof(part));
    }
  }
  // `to`: a multiple of 16 if the size of the part is.
  OPER_DEVICE void store(S* to) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) *(reinterpret_cast<Word*>(to) + k) = words[k];
  }
  OPER_DEVICE void unpack(float (&to)[E]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      Elements part;
      __builtin_memcpy(&part, &words[k], sizeof(part));
#pragma unroll
      for (int j = 0; j < kPer; ++j) to[k * kPer + j] = to_float(part.at[j]);
    }
  }
};

template <int E, class S>
OPER_DEVICE void load_elements(const S* from, float (&to)[E], bool wide) {
  Part<S, E> part;
  part.load(from, wide);
  part.unpack(to);
}

template <int E>
OPER_DEVICE void store_elements(float* to, const float (&from)[E], bool wide) {
  if constexpr (E % 4 == 0) {
    if (wide) {
#pragma unroll
      for (int k = 0; k < E; k += 4) {
        uint4 raw;
        __builtin_memcpy(&raw, from + k, 16);
        *reinterpret_cast<uint4*>(to + k) = raw;
      }
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < E; ++k) to[k] = from[k];
}

// A row in fp32, spread over the lanes of a group. `wide`: addresses are multiples of 16.
template <class Shape>
struct Row {
  float v[Shape::V][Shape::E];

  OPER_DEVICE void zero() { fill(0.0f); }
  // Sets all elements to -0: (-0) + x is bitwise x, also for x = -0.
  OPER_DEVICE void begin() { fill(-0.0f); }
  OPER_DEVICE void fill(float value) {
    each([=](float& a) { a = value; });
  }
  template <class S>
  OPER_DEVICE void load(const S* row, int dim, int lane, bool wide) {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      if (column < dim) {
        load_elements<Shape::E>(row + column, v[i], wide);
      } else {
#pragma unroll
        for (int e = 0; e < Shape::E; ++e) v[i][e] = 0.0f;
      }
    }
  }
  OPER_DEVICE void store(float* row, int dim, int lane, bool wide) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      if (column < dim) store_elements<Shape::E>(row + column, v[i], wide);
    }
  }
  // Calls body(own element, other's element) for all elements.
  template <class Body>
  OPER_DEVICE void zip(const Row& other, Body body) {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i)
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) body(v[i][e], other.v[i][e]);
  }
  template <class Body>
  OPER_DEVICE void each(Body body) {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i)
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) body(v[i][e]);
  }
  OPER_DEVICE void add(const Row& other) {
    zip(other, [](float& a, float b) { a += b; });
  }
  OPER_DEVICE void scale(float w) {
    each([=](float& a) { a *= w; });
  }
  OPER_DEVICE void divide(float w) {
    each([=](float& a) { a /= w; });
  }
};

// A row of element type S as it is in memory, spread like Row<Shape>.
template <class Shape, class S>
struct RawRow {
  Part<S, Shape::E> parts[Shape::V];

  // Lanes beyond the row load its first part without using it, which is faster than a branch.
  OPER_DEVICE void load(const S* row, int dim, int lane, bool wide) {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      parts[i].load(row + (column < dim ? column : 0), wide);
    }
  }
  OPER_DEVICE void store(S* row, int dim, int lane) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      if (column < dim) parts[i].store(row + column);
    }
  }
  OPER_DEVICE void unpack(Row<Shape>& row) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) parts[i].unpack(row.v[i]);
  }
};

// sums[k] += sums[k + width] for k < width; then the same with width / 2, and so on to a single
// sum.
template <int width, int N>
OPER_DEVICE void add_upper_half(float (&sums)[N]) {
  if constexpr (width > 0) {
#pragma unroll
    for (int k = 0; k < width; ++k) sums[k] += sums[k + width];
    add_upper_half<width / 2>(sums);
  }
}

// Sum of all columns of `products` in the order of the host (csrc/host/kernels/rows.inl): 16 sums
// over the columns that are equal modulo 16, each in ascending order, then pairwise sums of these.
// `buffer`: the group's G * V * E floats of shared memory, aligned to 16 bytes.
template <class Shape>
OPER_DEVICE float sum_in_host_order(const Row<Shape>& products, int dim, const Group<Shape::G>& group,
                                    float* buffer) {
  constexpr int G = Shape::G, kColumns = G * Shape::V * Shape::E;
  constexpr int kSums = G >= 16 ? 1 : 16 / G;
  const bool is_full = kColumns % 16 == 0 && dim == kColumns;
#if defined(OPER_EMULATED)
  if (dim > kColumns) std::abort();  // reads would pass the end of the buffer
#endif
  group.sync();
  if (is_full) {
    products.store(buffer, dim, group.lane, Shape::E > 1);
  } else {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i)
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) {
        const int column = Shape::column(i, group.lane) + e;
        if (column < dim) buffer[column] = products.v[i][e];
      }
  }
  group.sync();
  float sums[kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    const int first = (group.lane + k * G) % 16;
    float sum = 0.0f;
    if (is_full) {
      float columns[kColumns / 16 > 0 ? kColumns / 16 : 1];
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) columns[j] = buffer[first + 16 * j];
      sum = columns[0];
#pragma unroll
      for (int j = 1; j < kColumns / 16; ++j) sum += columns[j];
    } else if (first < dim) {
      sum = buffer[first];
      for (int column = first + 16; column < dim; column += 16) sum += buffer[column];
    }
    sums[k] = sum;
  }
  // Adds the sums l and l + 8, then l and l + 4, l + 2, l + 1.
  add_upper_half<kSums / 2>(sums);
  constexpr int kTop = G >= 16 ? 8 : G / 2;
#pragma unroll
  for (int width = kTop; width > 0; width /= 2) sums[0] += group.shuffle_xor(sums[0], width);
  return sums[0];
}

// ---- choosing a shape --------------------------------------------------------------------------

// Calls body(Shape) with the shape of a class of rows with elements of type T.
template <class T, class Body>
void with_shape_of(const RowClass& row_class, Body body) {
  constexpr int E = 16 / sizeof(T);
  if (row_class.lanes == 0) {  // size is not a multiple of 16 bytes
    if (row_class.vectors <= 4) return body(Shape<T, 1, 32, 4>{});
    return body(Shape<T, 1, 32, 32>{});
  }
  switch (row_class.lanes * 16 + row_class.vectors) {
    case 1 * 16 + 1: return body(Shape<T, E, 1, 1>{});
    case 2 * 16 + 1: return body(Shape<T, E, 2, 1>{});
    case 4 * 16 + 1: return body(Shape<T, E, 4, 1>{});
    case 8 * 16 + 1: return body(Shape<T, E, 8, 1>{});
    case 16 * 16 + 1: return body(Shape<T, E, 16, 1>{});
    case 32 * 16 + 1: return body(Shape<T, E, 32, 1>{});
    case 32 * 16 + 2: return body(Shape<T, E, 32, 2>{});
    case 32 * 16 + 4: return body(Shape<T, E, 32, 4>{});
    default:
      if constexpr (sizeof(T) == 4) return body(Shape<T, E, 32, 8>{});
  }
}

// The same for the class's element type.
template <class Body>
void with_shape(const RowClass& row_class, Body body) {
  switch (row_class.type) {
    case RowType::kFloat32: return with_shape_of<float>(row_class, body);
    case RowType::kFloat16: return with_shape_of<Float16>(row_class, body);
    case RowType::kBFloat16: return with_shape_of<BFloat16>(row_class, body);
  }
}

}  // namespace oper::device
