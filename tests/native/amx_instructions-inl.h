// AMX's tile instructions, and the AVX-512 ones that decode weights for them, in plain C++ under
// the names of their intrinsics: with it, kernels/tiles_amx-inl.h runs as it stands on any machine.
// As in Intel's manual, volume 2; what is an exception of the processor there is one of C++ here.

struct TileUnit {
  struct Tile {
    int rows = 0, row_bytes = 0;  // as configured
    uint8_t byte[16][64] = {};
  };
  bool configured = false;
  Tile tile[8];
};

// Each thread has tile registers of its own.
static thread_local TileUnit tile_unit;

[[noreturn]] static void TileFault(const char* what) { throw std::logic_error(what); }

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

static void CheckConfig(const TileConfig& config) {
  if (config.palette > 1) TileFault("ldtilecfg: unknown palette");
  if (config.start_row != 0) TileFault("ldtilecfg: a start row, which nothing here continues from");
  for (const uint8_t byte : config.reserved) {
    if (byte != 0) TileFault("ldtilecfg: a reserved byte isn't 0");
  }
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], row_bytes = config.row_bytes[i];
    if (i >= 8 && (rows || row_bytes)) TileFault("ldtilecfg: there are 8 tiles");
    if (rows > 16 || row_bytes > 64) TileFault("ldtilecfg: a tile is 16 rows of 64 bytes at most");
    if ((rows == 0) != (row_bytes == 0)) TileFault("ldtilecfg: a tile has rows or columns alone");
  }
}

static inline void _tile_release() { tile_unit = TileUnit(); }

static inline void _tile_loadconfig(const void* p) {
  TileConfig config;
  static_assert(sizeof(config) == 64, "LDTILECFG reads 64 bytes");
  memcpy(&config, p, sizeof(config));
  _tile_release();
  if (config.palette == 0) return;
  CheckConfig(config);
  tile_unit.configured = true;
  for (int i = 0; i < 8; ++i) {
    tile_unit.tile[i].rows = config.rows[i];
    tile_unit.tile[i].row_bytes = config.row_bytes[i];
  }
}

static TileUnit::Tile& UsableTile(int number) {
  if (!tile_unit.configured) TileFault("tiles aren't configured");
  if (number < 0 || number >= 8) TileFault("there are 8 tiles");
  TileUnit::Tile& tile = tile_unit.tile[number];
  if (tile.rows == 0) TileFault("a tile that isn't configured");
  return tile;
}

static inline void _tile_zero(int number) {
  TileUnit::Tile& tile = UsableTile(number);
  memset(tile.byte, 0, sizeof(tile.byte));
}

static inline void _tile_loadd(int number, const void* p, int64_t stride) {
  TileUnit::Tile& tile = UsableTile(number);
  memset(tile.byte, 0, sizeof(tile.byte));
  for (int row = 0; row < tile.rows; ++row) {
    memcpy(tile.byte[row], static_cast<const char*>(p) + row * stride,
           static_cast<size_t>(tile.row_bytes));
  }
}

static inline void _tile_stored(int number, void* p, int64_t stride) {
  const TileUnit::Tile& tile = UsableTile(number);
  for (int row = 0; row < tile.rows; ++row) {
    memcpy(static_cast<char*>(p) + row * stride, tile.byte[row],
           static_cast<size_t>(tile.row_bytes));
  }
}

static void CheckProduct(const TileUnit::Tile& sum, const TileUnit::Tile& a,
                         const TileUnit::Tile& b) {
  if (&sum == &a || &sum == &b || &a == &b) TileFault("tdpbssd: one tile twice");
  if (sum.row_bytes % 4 || a.row_bytes % 4) TileFault("tdpbssd: rows aren't whole words");
  if (sum.rows != a.rows) TileFault("tdpbssd: sums and first factor differ in rows");
  if (sum.row_bytes != b.row_bytes) TileFault("tdpbssd: sums and second factor differ in columns");
  if (a.row_bytes / 4 != b.rows) TileFault("tdpbssd: factors don't fit each other");
}

// sum[m][n] += 4 products of signed bytes for each k, of a[m][k] and b[k][n]; wraps around.
static inline void _tile_dpbssd(int sum_number, int a_number, int b_number) {
  TileUnit::Tile& sum = UsableTile(sum_number);
  const TileUnit::Tile& a = UsableTile(a_number);
  const TileUnit::Tile& b = UsableTile(b_number);
  CheckProduct(sum, a, b);
  for (int m = 0; m < sum.rows; ++m) {
    for (int n = 0; n < sum.row_bytes; n += 4) {
      uint32_t total;
      memcpy(&total, &sum.byte[m][n], 4);
      for (int k = 0; k < b.rows; ++k) {
        for (int i = 0; i < 4; ++i) {
          const int product =
              static_cast<int8_t>(a.byte[m][4 * k + i]) * static_cast<int8_t>(b.byte[k][n + i]);
          total += static_cast<uint32_t>(product);
        }
      }
      memcpy(&sum.byte[m][n], &total, 4);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------

struct Vector512 {
  uint8_t byte[64];
};
#define __m512i Vector512

static inline Vector512 _mm512_loadu_si512(const void* p) {
  Vector512 out;
  memcpy(out.byte, p, sizeof(out.byte));
  return out;
}
static inline void _mm512_storeu_si512(void* p, Vector512 a) { memcpy(p, a.byte, sizeof(a.byte)); }
static inline Vector512 _mm512_set1_epi64(int64_t x) {
  Vector512 out;
  for (int i = 0; i < 64; i += 8) memcpy(out.byte + i, &x, 8);
  return out;
}

// Each byte times an 8 x 8 matrix of bits, whose first row is the highest byte of the 64 bits at
// the byte's place; bit i of `add` is added to bit i.
static inline Vector512 _mm512_gf2p8affine_epi64_epi8(Vector512 x, Vector512 matrix, int add) {
  Vector512 out;
  for (int i = 0; i < 64; ++i) {
    int byte = add;
    for (int bit = 0; bit < 8; ++bit) {
      int ones = x.byte[i] & matrix.byte[i / 8 * 8 + 7 - bit];
      ones ^= ones >> 4;
      ones ^= ones >> 2;
      ones ^= ones >> 1;
      byte ^= (ones & 1) << bit;
    }
    out.byte[i] = static_cast<uint8_t>(byte);
  }
  return out;
}
