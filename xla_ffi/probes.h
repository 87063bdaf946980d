// Calls outside of XLA, for tests that count instead of timing: instructions, items of work,
// phases.
#ifndef JAX_W4A8_XLA_FFI_PROBES_H_
#define JAX_W4A8_XLA_FFI_PROBES_H_

#include <stdint.h>

#include <vector>

#include "matmul.h"

namespace jax_w4a8 {

// How a product of these sizes is cut up: `counts` rows for matrix 0, 1, ... of a stack.
std::vector<WorkItem> PlanProbe(int64_t blocks, int64_t groups, int64_t group_width,
                                const std::vector<int64_t>& counts, int threads);

struct MoeProbe {
  int64_t tokens;
  int64_t top_k;
  int64_t experts;
  int64_t hidden;
  int64_t intermediate;  // a multiple of 16
  int64_t group_width;   // a divisor of both widths
  int threads;           // helpers never come: the caller does all the work
};

// Runs the expert call on made-up operands; returns its number of phases, each of which ends in a
// barrier. The part that counts is the function jax_w4a8_counted_call.
int RunMoeProbe(const MoeProbe& probe);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_PROBES_H_
