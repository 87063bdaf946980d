// Logical vectors as one 512-bit register: AVX-512 F, BW, VL and VNNI. Members as in
// vec_portable-inl.h.

struct Avx512 {
  static constexpr int kTileRows = 12;
  static constexpr int kPeakChains = 16;
  static constexpr int kRegisters = 32;
  static constexpr bool kNarrowSums = false;

  using F = __m512;
  using I = __m512i;
  using W = __m512i;
  using B = __m512i;

  static inline F Set(float x) { return _mm512_set1_ps(x); }
  static inline F Load(const float* p) { return _mm512_loadu_ps(p); }
  static inline F LoadBF16(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static inline F LoadF16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void Store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static inline void Stream(float* p, F a) { _mm512_stream_ps(p, a); }
  static inline void FinishStream() { _mm_sfence(); }
  static inline void StoreBF16(uint16_t* p, F a) {
    // Not the BF16 extension's conversion, which flushes subnormal numbers.
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i halves = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(halves));
  }
  static inline void StoreF16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }

  static inline F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static inline F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline float Largest(F a) { return _mm512_reduce_max_ps(a); }
  static inline F SelectNegative(F x, F a, F b) {
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(b, negative, a);
  }
  static inline F Rint(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static inline F MulPow2(F a, F n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23)));
  }

  static inline I SetInt(int32_t x) { return _mm512_set1_epi32(x); }
  static inline I LoadInt(const int32_t* p) { return _mm512_loadu_si512(p); }
  static inline void StoreInt(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
  static inline I AddInt(I a, I b) { return _mm512_add_epi32(a, b); }
  static inline int32_t Sum(I a) { return _mm512_reduce_add_epi32(a); }
  static inline I KeepFirst(I a, int n) {
    return _mm512_maskz_mov_epi32(static_cast<__mmask16>((1u << n) - 1), a);
  }
  static inline I RoundToInt(F a) { return _mm512_cvtps_epi32(a); }
  static inline F ToFloat(I a) { return _mm512_cvtepi32_ps(a); }
  static inline I StoreCodes(int8_t* p, I a, I b, I sum) {
    // Quarters, 4 bytes each, come in the order a0 b0 a1 b1 a2 b2 a3 b3.
    const __m256i bytes = _mm512_cvtsepi16_epi8(_mm512_packs_epi32(a, b));
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i codes = _mm256_permutevar8x32_epi32(bytes, order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_zextsi256_si512(codes));
  }

  static inline W LoadWeights(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static inline void StoreWeights(uint8_t* p, W w) { _mm512_storeu_si512(p, w); }
  static inline void Unpack(const uint8_t* p, W* low, W* high) {
    const __m512i bytes = _mm512_loadu_si512(p);
    const __m512i mask = _mm512_set1_epi8(15);
    *low = _mm512_and_si512(bytes, mask);
    *high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
  }
  static inline void Prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }
  static inline B Broadcast(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }

  // Not the intrinsic: from it GCC makes loops that move accumulators from register to register.
  static inline I Dot(I sum, W w, B codes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(codes));
    return sum;
  }
};
