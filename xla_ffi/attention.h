// Softmax attention over a cache of keys and values.
#ifndef JAX_W4A8_XLA_FFI_ATTENTION_H_
#define JAX_W4A8_XLA_FFI_ATTENTION_H_

#include <stdint.h>

#include "kernels/kernels.h"
#include "parallel.h"

namespace jax_w4a8 {

struct AttendCall {
  const float* queries;    // [batch, tokens, heads, dim]
  const float* keys;       // [batch, kv_heads, dim, slots]
  const float* values;     // [batch, kv_heads, slots, width]
  const int32_t* starts;   // [batch]: positions of the first tokens
  const int32_t* lengths;  // [batch], of [0, tokens]; the tokens behind get zeros
  const float* sinks;      // [heads], or null
  int64_t batch;
  int64_t tokens;
  int64_t heads;  // a multiple of kv_heads
  int64_t kv_heads;
  int64_t slots;  // a multiple of kAttendStep
  int64_t dim;
  int64_t width;   // a multiple of 16
  int64_t window;  // 0 for none
  float scale;     // of scores that are logarithms to base e
  float* out;      // [batch, tokens, heads, width]
};

// False when there is no memory for scratch.
bool RunAttend(const AttendCall& call, const Kernels& kernels, Team& team);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_ATTENTION_H_
