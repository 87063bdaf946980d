// The kernels for AMX over the model of its instructions.
#define JAX_W4A8_PORTABLE
#include <math.h>
#include <string.h>

#include <stdexcept>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tile_operations.h"

namespace jax_w4a8 {
namespace {
#include "amx_instructions-inl.h"
#include "kernels/vec_portable-inl.h"
// The traits come first: the algorithms are written in their terms.
#include "kernels/algorithm-inl.h"
#include "kernels/tiled-inl.h"
#include "kernels/tiles_amx-inl.h"
#include "tile_operations-inl.h"
}  // namespace

constexpr TileOperations kModelTiles = {TileProduct, AmxTiles::Decode};
constexpr Kernels kAmxModelKernels = MakeTiledKernels<Portable, AmxTiles>("amx_model");

}  // namespace jax_w4a8
