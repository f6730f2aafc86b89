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

// Space for `kSlots` rows of elements S of every group of a block of 256 threads, of which one is
// the current slot. Rows in flight take no registers, so enough of them keep the memory busy. A lane
// copies its own parts of a row and reads only these, without other threads: start, commit_copies,
// wait_for_copies, read.
template <class Shape, class S, int kSlots>
class RowRing {
 public:
  using Piece = Part<S, Shape::E>;
  static constexpr int kBytes = kRingBytes<Shape, S> * kSlots;

  // `shared`: `kBytes` for the whole block.
  OPER_DEVICE explicit RowRing(char* shared)
      : first_(shared_address(shared + threadIdx.x * kWord)), current_(first_) {}

  // Begins to copy a row into the current slot. `wide`: as for Part::load.
  OPER_DEVICE void start(const S* row, int dim, int lane, bool wide) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, lane);
      const S* from = row + (column < dim ? column : 0);
#pragma unroll
      for (int k = 0; k < Piece::kCount; ++k)
        copy_elements<Piece::kPer>(word(i, k), from + k * Piece::kPer, wide);
    }
  }

  // The row in the current slot.
  OPER_DEVICE void read(Row<Shape>& row) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      Piece piece;
#pragma unroll
      for (int k = 0; k < Piece::kCount; ++k)
        piece.words[k] = read_shared<typename Piece::Word>(word(i, k));
      piece.unpack(row.v[i]);
    }
  }

  // Goes on to the next slot, after the last one to the first.
  OPER_DEVICE void advance() {
    current_ += kRingBytes<Shape, S>;
    if (current_ == first_ + kBytes) current_ = first_;
  }

 private:
  static constexpr int kWord = sizeof(typename Piece::Word);
  SharedAddress first_, current_;

  // Words of neighbouring lanes are adjacent, so that no two of them share a bank.
  OPER_DEVICE SharedAddress word(int i, int k) const {
    return current_ + (i * Piece::kCount + k) * 256 * kWord;
  }

  template <int kCount>
  static OPER_DEVICE void copy_elements(SharedAddress to, const S* from, bool wide) {
    if constexpr (kCount * sizeof(S) == 16) {
      if (wide) return copy_async<16>(to, from);
    }
    // Not unrolled, so that it is not issued together with the wide copy, which is the usual one.
#pragma unroll 1
    for (int k = 0; k < kCount; ++k) copy_async<sizeof(S)>(to + k * sizeof(S), from + k);
  }
};

// A single slot is in registers: for rows so wide that one alone keeps enough bytes in flight.
template <class Shape, class S>
class RowRing<Shape, S, 1> {
 public:
  static constexpr int kBytes = 0;
  OPER_DEVICE explicit RowRing(char*) {}
  OPER_DEVICE void start(const S* row, int dim, int lane, bool wide) {
    row_.load(row, dim, lane, wide);
  }
  OPER_DEVICE void read(Row<Shape>& row) const { row_.unpack(row); }
  OPER_DEVICE void advance() {}

 private:
  RawRow<Shape, S> row_;
};

}  // namespace oper::device
