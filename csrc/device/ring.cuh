// Rows on their way from device memory into shared memory.
#pragma once

#include "device/group.cuh"

namespace oper::device {

// Shared memory that a block may use by default; and the length of an array of `kBytes`, since
// arrays must not be empty.
constexpr int kMostSharedBytes = 48 << 10;
template <int kBytes>
constexpr int kArrayBytes = kBytes > 0 ? kBytes : 16;

// Bytes of shared memory for one row of each group.
template <class Shape, class S>
constexpr int kRingBytes = 256 * Shape::V * static_cast<int>(sizeof(Part<S, Shape::E>));

// Space for `kSlots` rows of elements S of every group of a block of 256 threads. Rows in flight
// take no registers, so enough of them keep the memory busy. A lane copies its own parts of a row
// and reads only these, without other threads: start, commit_copies, wait_for_copies, read.
template <class Shape, class S, int kSlots>
class RowRing {
 public:
  using Piece = Part<S, Shape::E>;
  static constexpr int kBytes = kRingBytes<Shape, S> * kSlots;

  // `shared`: `kBytes` for the whole block.
  OPER_DEVICE explicit RowRing(char* shared)
      : own_(reinterpret_cast<typename Piece::Word*>(shared) + threadIdx.x) {}

  // `wide`: as for Part::load.
  OPER_DEVICE void start(int slot, const S* row, int dim, int lane, bool wide) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      const S* from = row + (column < dim ? column : 0);
#pragma unroll
      for (int k = 0; k < Piece::kCount; ++k)
        copy_elements<Piece::kPer>(reinterpret_cast<S*>(word(slot, i, k)), from + k * Piece::kPer,
                                   wide);
    }
  }

  OPER_DEVICE void read(int slot, Row<Shape>& row) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      Piece piece;
#pragma unroll
      for (int k = 0; k < Piece::kCount; ++k) piece.words[k] = *word(slot, i, k);
      piece.unpack(row.v[i]);
    }
  }

 private:
  typename Piece::Word* own_;

  // Words of neighbouring lanes are adjacent, so that no two of them share a bank.
  OPER_DEVICE typename Piece::Word* word(int slot, int i, int k) const {
    return own_ + ((slot * Shape::V + i) * Piece::kCount + k) * 256;
  }

  template <int kCount>
  static OPER_DEVICE void copy_elements(S* to, const S* from, bool wide) {
    if constexpr (kCount * sizeof(S) == 16) {
      if (wide) return copy_async<16>(to, from);
    }
    // Not unrolled, so that it is not issued together with the wide copy, which is the usual one.
#pragma unroll 1
    for (int k = 0; k < kCount; ++k) {
      if constexpr (sizeof(S) == 4) {
        copy_async<4>(to + k, from + k);
      } else {
        to[k] = from[k];
      }
    }
  }
};

// A single slot is in registers: for rows so wide that one alone keeps enough bytes in flight.
template <class Shape, class S>
class RowRing<Shape, S, 1> {
 public:
  static constexpr int kBytes = 0;
  OPER_DEVICE explicit RowRing(char*) {}
  OPER_DEVICE void start(int, const S* row, int dim, int lane, bool wide) {
    row_.load(row, dim, lane, wide);
  }
  OPER_DEVICE void read(int, Row<Shape>& row) const { row_.unpack(row); }

 private:
  RawRow<Shape, S> row_;
};

}  // namespace oper::device
