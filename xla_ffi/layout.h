// The packed weight layout and the plain structs that describe operands to kernels.
// jax_w4a8/weights.py documents the same layout for Python; LAYOUT_VERSION there names it.
#ifndef JAX_W4A8_XLA_FFI_LAYOUT_H_
#define JAX_W4A8_XLA_FFI_LAYOUT_H_

#include <stddef.h>
#include <stdint.h>

namespace jax_w4a8 {

// Output channels of a block; also the width of every logical vector in the kernels.
constexpr int kBlockChannels = 16;
// Inputs whose codes for one block fill kRunBytes: byte 4 * c + i holds input i low, input 4 + i
// high.
constexpr int kRunInputs = 8;
constexpr int kRunBytes = kBlockChannels * kRunInputs / 2;
// Every group is a whole number of chunks, so that kernels may settle narrow accumulators once a
// chunk.
constexpr int kChunkInputs = 32;
// Weight codes are stored plus this.
constexpr int kCodeOffset = 8;

enum class DType { kF32, kBF16, kF16 };

inline size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// One packed matrix: codes [blocks, groups, 8 * group_width], scale [blocks, groups, 16],
// scaled_sum and bias [blocks, 16].
struct PackedMatrix {
  const uint8_t* codes;
  const void* scale;
  DType scale_dtype;  // kF32 or kBF16
  const float* scaled_sum;
  const float* bias;
  int64_t blocks;
  int64_t groups;
  int64_t group_width;

  int64_t inputs() const { return groups * group_width; }
  size_t block_bytes() const { return static_cast<size_t>(inputs()) * kBlockChannels / 2; }

  // The matrix `index` of a stack of such matrices.
  PackedMatrix At(int64_t index) const {
    PackedMatrix one = *this;
    one.codes += index * blocks * static_cast<int64_t>(block_bytes());
    one.scale = static_cast<const char*>(scale) + index * blocks * groups * kBlockChannels *
                                                      static_cast<int64_t>(SizeOf(scale_dtype));
    one.scaled_sum += index * blocks * kBlockChannels;
    one.bias += index * blocks * kBlockChannels;
    return one;
  }
};

// Rows of INT8 codes: value = (code - zero) * scale. `start` holds, per row and group, -8 times the
// sum of the group's codes: what an accumulator starts from so that stored codes need no offset
// taken off.
struct QuantizedRows {
  int8_t* codes;   // [rows, groups * group_width], zeros behind the last input
  int32_t* start;  // [rows, groups]
  float* zero;     // [rows]
  float* scale;    // [rows]
  int64_t groups;
  int64_t group_width;

  int64_t inputs() const { return groups * group_width; }
};

enum class ActivationKind : int32_t { kSilu = 0, kSwigluOai = 1, kGelu = 2, kGeluTanh = 3 };

struct Activation {
  ActivationKind kind;
  float alpha;
  float limit;  // infinity: no clamp
};

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_LAYOUT_H_
