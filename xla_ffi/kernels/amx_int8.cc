// Instantiates the algorithm for AVX-512 VNNI with AMX tiles; compiled with those sets' flags.
#include <immintrin.h>
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {
#include "kernels/vec_avx512-inl.h"
// The traits come first: the algorithms are written in their terms.
#include "kernels/algorithm-inl.h"
#include "kernels/tiled-inl.h"
#include "kernels/tiles_amx-inl.h"
}  // namespace

constexpr Kernels kAmxKernels = MakeTiledKernels<Avx512, AmxTiles>("amx_int8");

}  // namespace jax_w4a8
