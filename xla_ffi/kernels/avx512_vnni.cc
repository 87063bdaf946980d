// Instantiates the algorithm for one instruction set; compiled with that set's flags.
#include <immintrin.h>
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {
#include "kernels/vec_avx512-inl.h"
// The traits come first: the algorithm is written in their terms.
#include "kernels/algorithm-inl.h"
}  // namespace

constexpr Kernels kAvx512Kernels = MakeKernels<Avx512>("avx512_vnni");

}  // namespace jax_w4a8
