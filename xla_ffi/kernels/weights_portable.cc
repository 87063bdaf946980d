// Quantisation of float weights, compiled with one instruction set's flags.
#include <string.h>

#include "kernels/scalar.h"
#include "kernels/weights.h"

namespace jax_w4a8 {
namespace {
#include "kernels/weights-inl.h"
}  // namespace

constexpr WeightKernels kPortableWeightKernels = {"portable", Largest, Quantize};

}  // namespace jax_w4a8
