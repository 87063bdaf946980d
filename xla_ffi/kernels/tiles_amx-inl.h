// Tile registers as AMX has them: 8 registers of up to 16 rows x 64 bytes. Members are what
// tiled-inl.h uses.

struct AmxTiles {
  static constexpr int kMostRows = 16;
  // Below, memory traffic of weights and sums costs more than tiles save.
  static constexpr int kFewestRows = 13;
  static constexpr int kFewestRowsOfSmallGroups = 48;

  // Bands of `rows` rows, products of `inputs` inputs (a multiple of 4, at most 64).
  static inline void Configure(int rows, int inputs) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int sum = 0; sum < 4; ++sum) SetShape(config, sum, rows, 64);
    for (int band = 4; band < 6; ++band) SetShape(config, band, rows, inputs);
    for (int block = 6; block < 8; ++block) SetShape(config, block, inputs / 4, 64);
    // GCC believes that the instruction reads no more than a pointer's worth of it.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  // Gives the registers back, so that the system need not save them.
  static inline void Release() { _tile_release(); }
  // Ordinary stores before it are seen by tile loads after it: the compiler doesn't know that those
  // read memory.
  static inline void Fence() { __asm__ volatile("" ::: "memory"); }

  // Sums of two slots x two blocks, two bands of rows and two blocks of weights fill the eight
  // registers, whose numbers are part of the instructions.
  template <int kSlot, int kBlock>
  static inline void ZeroSum() {
    if constexpr (kSlot == 0 && kBlock == 0) _tile_zero(0);
    if constexpr (kSlot == 0 && kBlock == 1) _tile_zero(1);
    if constexpr (kSlot == 1 && kBlock == 0) _tile_zero(2);
    if constexpr (kSlot == 1 && kBlock == 1) _tile_zero(3);
  }
  template <int kSlot, int kBlock>
  static inline void LoadSum(const int32_t* p, int64_t stride) {
    if constexpr (kSlot == 0 && kBlock == 0) _tile_loadd(0, p, stride);
    if constexpr (kSlot == 0 && kBlock == 1) _tile_loadd(1, p, stride);
    if constexpr (kSlot == 1 && kBlock == 0) _tile_loadd(2, p, stride);
    if constexpr (kSlot == 1 && kBlock == 1) _tile_loadd(3, p, stride);
  }
  template <int kSlot, int kBlock>
  static inline void StoreSum(int32_t* p, int64_t stride) {
    if constexpr (kSlot == 0 && kBlock == 0) _tile_stored(0, p, stride);
    if constexpr (kSlot == 0 && kBlock == 1) _tile_stored(1, p, stride);
    if constexpr (kSlot == 1 && kBlock == 0) _tile_stored(2, p, stride);
    if constexpr (kSlot == 1 && kBlock == 1) _tile_stored(3, p, stride);
  }
  template <int kSlot>
  static inline void LoadRows(const int8_t* p, int64_t stride) {
    if constexpr (kSlot == 0) _tile_loadd(4, p, stride);
    if constexpr (kSlot == 1) _tile_loadd(5, p, stride);
  }
  template <int kBlock>
  static inline void LoadWeights(const uint8_t* p) {
    if constexpr (kBlock == 0) _tile_loadd(6, p, 64);
    if constexpr (kBlock == 1) _tile_loadd(7, p, 64);
  }
  // Signed by signed.
  template <int kSlot, int kBlock>
  static inline void Dot() {
    if constexpr (kSlot == 0 && kBlock == 0) _tile_dpbssd(0, 4, 6);
    if constexpr (kSlot == 0 && kBlock == 1) _tile_dpbssd(1, 4, 7);
    if constexpr (kSlot == 1 && kBlock == 0) _tile_dpbssd(2, 5, 6);
    if constexpr (kSlot == 1 && kBlock == 1) _tile_dpbssd(3, 5, 7);
  }

  // Weights of 8 inputs and 16 channels as signed bytes, 4 inputs to a channel: one affine map over
  // bits per half. Code c is stored as u = c + 8, so c's low three bits are u's and all higher ones
  // the opposite of u's fourth.
  static inline void Decode(const uint8_t* packed, uint8_t* out) {
    const __m512i bytes = _mm512_loadu_si512(packed);
    const __m512i low = _mm512_set1_epi64(0x0102040808080808);
    const __m512i high = _mm512_set1_epi64(0x1020408080808080);
    _mm512_storeu_si512(out, _mm512_gf2p8affine_epi64_epi8(bytes, low, 0xf8));
    _mm512_storeu_si512(out + kRunBytes, _mm512_gf2p8affine_epi64_epi8(bytes, high, 0xf8));
  }

 private:
  template <class Config>
  static inline void SetShape(Config& config, int tile, int rows, int row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};
