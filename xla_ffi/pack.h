// Packing of one matrix, or a range of its blocks, into the layout of layout.h; called from many
// threads at once, each with blocks of its own.
#ifndef JAX_W4A8_XLA_FFI_PACK_H_
#define JAX_W4A8_XLA_FFI_PACK_H_

#include <stdint.h>

#include "layout.h"

namespace jax_w4a8 {

// Rows of a matrix whose elements are neighbours; `stride` counts elements from row to row.
template <class T>
struct PackRows {
  const T* data;
  int64_t stride;
  int64_t rows;
};

// The blocks to fill, each array with a stride between blocks of its own (in elements), so that
// gate and up blocks can alternate. A block's codes [groups, 8 * group_width] and scales [groups,
// 16] have no gaps.
struct PackTarget {
  uint8_t* codes;
  void* scale;
  DType scale_dtype;  // kF32 or kBF16
  float* scaled_sum;
  int64_t codes_stride;
  int64_t scale_stride;
  int64_t sum_stride;
  int64_t blocks;
  int64_t groups;
  int64_t group_width;
  int64_t inputs;  // that exist; groups * group_width or fewer
};

// Scales as they come, [rows, groups]; float16 is widened, the others are of the target's dtype.
struct PackScales {
  const void* data;
  DType dtype;
  int64_t stride;
};

// All three fill every byte of the target's blocks; channels and inputs that only fill blocks up
// get code 0. False if a code is outside [-8, 7], or a scale or weight is NaN or infinite: what is
// then in the target means nothing. Rows may start at any address.

// One code to a byte.
bool PackCodes(const PackRows<int8_t>& codes, const PackScales& scales, const PackTarget& target);

// Eight codes to a word, each plus 8, the first in the lowest bits. Bits behind the last input are
// not looked at.
bool PackWords(const PackRows<int32_t>& words, const PackScales& scales, const PackTarget& target);

// Quantises on the way, as jax_w4a8.quantize does. `data` is float or 16-bit patterns by `dtype`.
bool PackFloats(DType dtype, const PackRows<void>& weights, const PackTarget& target);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_PACK_H_
