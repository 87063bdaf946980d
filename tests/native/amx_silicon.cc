// Single tile instructions by the processor; compiled with AMX's flags.
#include <immintrin.h>

#include "kernels/kernels.h"
#include "tile_operations.h"

namespace jax_w4a8 {
namespace {
#include "kernels/tiles_amx-inl.h"
#include "tile_operations-inl.h"
}  // namespace

constexpr TileOperations kSiliconTiles = {TileProduct, AmxTiles::Decode};

}  // namespace jax_w4a8
