// The operations of tile_operations.h on whatever the intrinsics' names mean here.

static void TileProduct(const TileShape& shape, uint8_t* sums, const uint8_t* a, const uint8_t* b,
                        uint8_t* zeros) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const auto set = [&](int tile, int rows, int row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  set(0, shape.rows, 4 * shape.columns);
  set(1, shape.rows, shape.inputs);
  set(2, shape.inputs / 4, 4 * shape.columns);
  set(3, shape.rows, 4 * shape.columns);
#if defined(__GNUC__)
  // GCC believes that the instruction reads no more than a pointer's worth of it.
  __asm__ volatile("" : : "r"(&config) : "memory");
#endif
  _tile_loadconfig(&config);
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  _tile_loadd(3, sums, 64);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, 64);
  _tile_zero(3);
  _tile_stored(3, zeros, 64);
  _tile_release();
#if defined(__GNUC__)
  __asm__ volatile("" : : : "memory");
#endif
}
