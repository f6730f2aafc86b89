// Rows in flight from device memory to shared memory.
#pragma once

#include "device/group.cuh"

namespace oper::device {

// Shared memory that a block may use by default.
constexpr int kMostSharedBytes = 48 << 10;
// The length of an array for `kBytes`, which must not be empty.
template <int kBytes>
constexpr int kArrayBytes = kBytes > 0 ? kBytes : 16;

// Bytes of shared memory for one row of each group of a block of 256 threads.
template <class Shape, class S>
constexpr int kRingBytes = 256 * Shape::V * static_cast<int>(sizeof(Part<S, Shape::E>));

// A ring of kSlots rows with elements of type S for every group of a block of 256 threads, in
// shared memory. Rows in flight take no registers there, so that there can be enough of them to
// keep memory busy. A lane copies its own parts of a row and reads only these, so that no threads
// need to synchronize: start, commit_copies, wait_for_copies, read.
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

  // Makes the next slot the current one; after the last one, the first.
  OPER_DEVICE void advance() {
    current_ += kRingBytes<Shape, S>;
    if (current_ == first_ + kBytes) current_ = first_;
  }

 private:
  static constexpr int kWord = sizeof(typename Piece::Word);
  SharedAddress first_, current_;

  // Words of neighbouring lanes are adjacent, to avoid bank conflicts.
  OPER_DEVICE SharedAddress word(int i, int k) const {
    return current_ + (i * Piece::kCount + k) * 256 * kWord;
  }

  template <int kCount>
  static OPER_DEVICE void copy_elements(SharedAddress to, const S* from, bool wide) {
    if constexpr (kCount * sizeof(S) == 16) {
      if (wide) return copy_async<16>(to, from);
    }
    // Not unrolled: otherwise the compiler issues it together with the wide copy, which is the
    // usual one.
#pragma unroll 1
    for (int k = 0; k < kCount; ++k) copy_async<sizeof(S)>(to + k * sizeof(S), from + k);
  }
};

// A single slot, in registers: for rows so wide that one row is enough bytes in flight.
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
