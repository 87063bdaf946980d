// As AVX2, which comes first, with VNNI's dot products in 256-bit registers (AVX-VNNI: not the
// AVX-512 encoding).

struct AvxVnni : Avx2 {
  static constexpr int kPeakChains = 6;  // of two registers each
  static constexpr bool kNarrowSums = false;

  static inline I Dot(I sum, W w, B codes) {
    return {{_mm256_dpbusd_avx_epi32(sum.half[0], w.half[0], codes),
             _mm256_dpbusd_avx_epi32(sum.half[1], w.half[1], codes)}};
  }
};
