// The expert call: quantise, gate and up projections with activation, quantise again, down
// projection, combine.
#ifndef JAX_W4A8_XLA_FFI_MOE_H_
#define JAX_W4A8_XLA_FFI_MOE_H_

#include <stdint.h>

#include "kernels/kernels.h"
#include "layout.h"
#include "parallel.h"

namespace jax_w4a8 {

struct MoeCall {
  DType dtype;           // of x, and of y when combined
  const void* x;         // [tokens, hidden]
  const float* weights;  // [tokens, top_k]
  const int32_t* ids;    // [tokens, top_k], of [-1, experts)
  int64_t tokens;
  int64_t top_k;
  int64_t hidden;
  int64_t experts;
  PackedMatrix w13;  // of the first expert; see PackedMatrix::At
  PackedMatrix w2;
  Activation activation;
  bool symmetric;
  bool weight_on_input;
  // Exactly one is set: the combined result [tokens, hidden] of `dtype`, or each slot's output
  // [tokens, top_k, hidden], float.
  void* y;
  float* slots;
};

// False when there is no memory for scratch. Scratch stays below what kMostTokens tokens need.
bool RunMoe(const MoeCall& call, const Kernels& kernels, Team& team);

struct CombineCall {
  const float* slots;    // [tokens, top_k, hidden]
  const int32_t* ids;    // [tokens, top_k]; slots of negative ids are passed over. Null: none are.
  const float* weights;  // [tokens, top_k]; null: ones
  int64_t tokens;
  int64_t top_k;
  int64_t hidden;
  DType dtype;  // of y
  void* y;      // [tokens, hidden]
};

void RunCombine(const CombineCall& call, const Kernels& kernels, Team& team);

// Tokens that one pass takes; more are taken in several.
constexpr int64_t kMostTokens = 2048;

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_MOE_H_
