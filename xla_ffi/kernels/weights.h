// Quantisation of float weights: the table of functions that an instruction set fills.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_WEIGHTS_H_
#define JAX_W4A8_XLA_FFI_KERNELS_WEIGHTS_H_

#include <stdint.h>

#include "layout.h"

namespace jax_w4a8 {

constexpr int64_t kMostWeights = 2048;

struct WeightKernels {
  const char* name;  // that of the Kernels of the same instruction set

  // The largest magnitude of n weights at any address, as a float; infinite or NaN if one of them
  // is. Subnormal floats count as zero, as they do for XLA on CPUs.
  float (*largest)(DType dtype, const void* weights, int64_t n);

  // Quantises n <= kMostWeights weights: code = round(weight / scale), halves to even, at most 7.
  // runs[r] gets the four bytes that one channel has in a run of the packed layout, ceil(n / 8) of
  // them, with code 0 behind the last weight. Returns the sum of the codes. Takes scale > 0, and
  // magnitudes of at most 8 x scale.
  int32_t (*quantize)(DType dtype, const void* weights, int64_t n, float scale, uint32_t* runs);
};

// Those of the instruction set in use; see ActiveKernels.
const WeightKernels& ActiveWeightKernels();

extern const WeightKernels kPortableWeightKernels;
#ifdef JAX_W4A8_X86_64
extern const WeightKernels kAvx2WeightKernels;
extern const WeightKernels kAvx512WeightKernels;
#endif

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_WEIGHTS_H_
