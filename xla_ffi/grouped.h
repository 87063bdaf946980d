// A linear map whose rows each meet a matrix of their own choice out of a stack.
#ifndef JAX_W4A8_XLA_FFI_GROUPED_H_
#define JAX_W4A8_XLA_FFI_GROUPED_H_

#include <stdint.h>

#include "kernels/kernels.h"
#include "matmul.h"
#include "parallel.h"

namespace jax_w4a8 {

struct GroupedLinearCall {
  LinearCall linear;   // `weights` is the first matrix of the stack
  const int32_t* ids;  // [rows]: matrix of each row, -1 for none: zeros
  int64_t matrices;
};

// False when there is no memory for scratch.
bool RunGroupedLinear(const GroupedLinearCall& call, const Kernels& kernels, Team& team);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_GROUPED_H_
