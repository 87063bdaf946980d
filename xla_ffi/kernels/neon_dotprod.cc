// Instantiates the algorithm for one instruction set; compiled with that set's flags.
#include <arm_neon.h>
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {
#include "kernels/vec_neon-inl.h"
// The traits come first: the algorithm is written in their terms.
#include "kernels/algorithm-inl.h"
}  // namespace

constexpr Kernels kNeonDotprodKernels = MakeKernels<NeonDotprod>("neon_dotprod");

}  // namespace jax_w4a8
