// Instantiates the algorithm for one instruction set; compiled with that set's flags.
#include <arm_neon.h>
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {
#include "kernels/vec_neon-inl.h"
// The traits come first: the algorithms are written in their terms.
#include "kernels/algorithm-inl.h"
#include "kernels/pairs_i8mm-inl.h"
}  // namespace

constexpr Kernels kNeonI8mmKernels = MakePairKernels("neon_i8mm");

}  // namespace jax_w4a8
