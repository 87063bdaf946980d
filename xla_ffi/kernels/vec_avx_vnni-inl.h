// As AVX2, which comes first, with VNNI's dot products in 256-bit registers (AVX-VNNI: not the
// AVX-512 encoding).

struct AvxVnni : Avx2 {
  static constexpr int kPeakChains = 6;  // of two registers each
  static constexpr bool kNarrowSums = false;

  // Not the intrinsic, as in Avx512.
  static inline I Dot(I sum, W w, B codes) {
    for (int i = 0; i < 2; ++i) {
      __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.half[i]) : "x"(w.half[i]), "x"(codes));
    }
    return sum;
  }
};
