// Instantiates the algorithm for one instruction set; compiled with that set's flags.
#define JAX_W4A8_PORTABLE
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {
#include "kernels/vec_portable-inl.h"
// The traits come first: the algorithm is written in their terms.
#include "kernels/algorithm-inl.h"
}  // namespace

constexpr Kernels kPortableKernels = MakeKernels<Portable>("portable");

}  // namespace jax_w4a8
