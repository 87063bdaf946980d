// Single tile instructions, by the processor and by the model of them that the tests own.
#ifndef JAX_W4A8_TESTS_NATIVE_TILE_OPERATIONS_H_
#define JAX_W4A8_TESTS_NATIVE_TILE_OPERATIONS_H_

#include <stdint.h>

#include "kernels/kernels.h"

namespace jax_w4a8 {

// Of a product: `sums` and `a` have `rows` rows, `a` has `inputs` bytes a row (a multiple of 4),
// and `sums` and `b` have `columns` words a row.
struct TileShape {
  int rows, inputs, columns;
};

// Bytes of a whole tile, which all operands are; those outside of `shape` are there to be left
// alone.
constexpr int kTileBytes = 16 * 64;

struct TileOperations {
  // Loads the three, adds the products, and stores the sums over `sums`; `zeros` gets a tile's
  // zeros.
  void (*product)(const TileShape& shape, uint8_t* sums, const uint8_t* a, const uint8_t* b,
                  uint8_t* zeros);
  // Two affine maps of 64 bytes: those that decode the halves of packed weights, 64 bytes each.
  void (*decode)(const uint8_t* packed, uint8_t* out);
};

extern const TileOperations kModelTiles;
// The kernels for AMX, compiled over the model and the portable vectors.
extern const Kernels kAmxModelKernels;
#ifdef JAX_W4A8_AMX
extern const TileOperations kSiliconTiles;
#endif

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_NATIVE_TILE_OPERATIONS_H_
