// Quantisation of float weights: the table of functions that an instruction set fills.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_WEIGHTS_H_
#define JAX_W4A8_XLA_FFI_KERNELS_WEIGHTS_H_

#include <stdint.h>

#include "layout.h"

namespace jax_w4a8 {

// Weights that are quantised by one call at most.
constexpr int64_t kMostWeights = 256;

// Some neighbouring weights of a channel, one or more groups; the last group may lack some.
struct WeightGroups {
  int64_t count;        // of weights, at least 1
  int64_t width;        // of a group: whole chunks
  const float* scales;  // [groups]
  int32_t* sums;        // [groups]: where sums of codes go
};

struct WeightKernels {
  const char* name;  // that of the Kernels of the same instruction set

  // The largest magnitude of each group of `width` out of n weights at any address, as a float, the
  // last group may lack some; infinite or NaN if one of them is. Subnormal floats count as zero, as
  // they do for XLA on CPUs.
  void (*largest)(DType dtype, const void* weights, int64_t n, int64_t width, float* largest);

  // Quantises groups.count <= kMostWeights weights: code = round(weight / scale), halves to even,
  // at most 7. runs[r] gets the four bytes that one channel has in a run of the packed layout, with
  // code 0 behind the last weight, up to the end of its chunk. Takes magnitudes of at most 8 x
  // scale; where a scale isn't above 0 all codes are 0.
  void (*quantize)(DType dtype, const void* weights, const WeightGroups& groups, uint32_t* runs);
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
