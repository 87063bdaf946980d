// Working memory of calls, kept between them.
#ifndef JAX_W4A8_XLA_FFI_SCRATCH_H_
#define JAX_W4A8_XLA_FFI_SCRATCH_H_

#include <stddef.h>
#include <stdint.h>

#include <utility>

#include "sanitizers.h"

namespace jax_w4a8 {

// Adds up aligned parts of one block of memory: first to learn its size, then to hand the parts
// out. A size beyond kMostBytes stays there, which no machine has.
class ScratchLayout {
 public:
  explicit ScratchLayout(char* base = nullptr) : base_(base) {}

  template <class T>
  T* Take(int64_t count) {
    if (size_ >= kMostBytes || static_cast<size_t>(count) > (kMostBytes - size_) / sizeof(T)) {
      size_ = kMostBytes;
      return nullptr;
    }
    T* part = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    const size_t end = size_ + static_cast<size_t>(count) * sizeof(T);
    size_ = (end + kZoneBytes + kAlignment - 1) / kAlignment * kAlignment;
    if (base_) ForbidAccess(base_ + end, size_ - end);
    return part;
  }
  size_t size() const { return size_; }

  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMostBytes = SIZE_MAX / 4;

 private:
  char* base_;
  size_t size_ = 0;
};

// A block of at least `bytes`, from those that earlier calls gave back where one is large enough.
// Memory held between calls: at most one block for each call that ran at the same time, none larger
// than the largest that such a call needed, and kMostKept in all.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  // A block of what `lay_out` adds up to in the layout that it is called with; where there is
  // memory, it is called again and hands out the parts.
  template <class LayOut, class = decltype(std::declval<const LayOut&>()(ScratchLayout()))>
  explicit Scratch(const LayOut& lay_out) : Scratch(static_cast<size_t>(lay_out(ScratchLayout()))) {
    if (data_) lay_out(ScratchLayout(data_));
  }
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Null when there is no memory.
  char* data() const { return data_; }

  static constexpr size_t kMostKept = size_t{1} << 30;

 private:
  char* data_;
  size_t size_;
};

// Frees what no running call uses; returns how many bytes.
size_t ReleaseScratch();

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_SCRATCH_H_
