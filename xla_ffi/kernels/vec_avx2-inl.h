// Logical vectors as two 256-bit registers: AVX2, FMA and F16C. Members as in vec_portable-inl.h.

struct Avx2 {
  static constexpr int kTileRows = 3;
  static constexpr int kPeakChains = 4;
  static constexpr int kRegisters = 8;
  static constexpr bool kNarrowSums = true;

  struct F {
    __m256 half[2];
  };
  struct I {
    __m256i half[2];
  };
  // 16-bit pair sums: at most 8 a chunk of 2 * 15 * 128 = 3840 each, so that they can't overflow.
  struct Partial {
    __m256i half[2];
  };
  struct W {
    __m256i half[2];
  };
  using B = __m256i;

  static inline F Set(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
  static inline F Load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
  static inline F LoadBF16(const uint16_t* p) { return {{WidenBF16(p), WidenBF16(p + 8)}}; }
  static inline F LoadF16(const uint16_t* p) {
    return {{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
             _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))}};
  }
  static inline void Store(float* p, F a) {
    _mm256_storeu_ps(p, a.half[0]);
    _mm256_storeu_ps(p + 8, a.half[1]);
  }
  static inline void Stream(float* p, F a) {
    _mm256_stream_ps(p, a.half[0]);
    _mm256_stream_ps(p + 8, a.half[1]);
  }
  static inline void FinishStream() { _mm_sfence(); }
  static inline void StoreBF16(uint16_t* p, F a) {
    float lanes[kBlockChannels];
    Store(lanes, a);
    for (int i = 0; i < kBlockChannels; ++i) p[i] = BF16Of(lanes[i]);
  }
  static inline void StoreF16(uint16_t* p, F a) {
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i),
                       _mm256_cvtps_ph(a.half[i], _MM_FROUND_TO_NEAREST_INT));
    }
  }

  static inline F Add(F a, F b) {
    return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}};
  }
  static inline F Sub(F a, F b) {
    return {{_mm256_sub_ps(a.half[0], b.half[0]), _mm256_sub_ps(a.half[1], b.half[1])}};
  }
  static inline F Mul(F a, F b) {
    return {{_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])}};
  }
  static inline F Div(F a, F b) {
    return {{_mm256_div_ps(a.half[0], b.half[0]), _mm256_div_ps(a.half[1], b.half[1])}};
  }
  static inline F Fma(F a, F b, F c) {
    return {{_mm256_fmadd_ps(a.half[0], b.half[0], c.half[0]),
             _mm256_fmadd_ps(a.half[1], b.half[1], c.half[1])}};
  }
  static inline F Min(F a, F b) {
    return {{_mm256_min_ps(a.half[0], b.half[0]), _mm256_min_ps(a.half[1], b.half[1])}};
  }
  static inline F Max(F a, F b) {
    return {{_mm256_max_ps(a.half[0], b.half[0]), _mm256_max_ps(a.half[1], b.half[1])}};
  }
  static inline float Largest(F a) {
    const __m256 eight = _mm256_max_ps(a.half[0], a.half[1]);
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
  }
  static inline F SelectNegative(F x, F a, F b) {
    F out;
    for (int i = 0; i < 2; ++i) {
      const __m256 negative = _mm256_cmp_ps(x.half[i], _mm256_setzero_ps(), _CMP_LT_OQ);
      out.half[i] = _mm256_blendv_ps(b.half[i], a.half[i], negative);
    }
    return out;
  }
  static inline F Rint(F a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {{_mm256_round_ps(a.half[0], kMode), _mm256_round_ps(a.half[1], kMode)}};
  }
  static inline F MulPow2(F a, F n) {
    F out;
    for (int i = 0; i < 2; ++i) {
      const __m256i biased =
          _mm256_add_epi32(_mm256_cvtps_epi32(n.half[i]), _mm256_set1_epi32(127));
      out.half[i] = _mm256_mul_ps(a.half[i], _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    }
    return out;
  }

  static inline I SetInt(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
  static inline I LoadInt(const int32_t* p) {
    return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))}};
  }
  static inline void StoreInt(int32_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.half[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.half[1]);
  }
  static inline I AddInt(I a, I b) {
    return {{_mm256_add_epi32(a.half[0], b.half[0]), _mm256_add_epi32(a.half[1], b.half[1])}};
  }
  static inline int32_t Sum(I a) {
    int32_t lanes[kBlockChannels];
    StoreInt(lanes, a);
    int32_t total = 0;
    for (int i = 0; i < kBlockChannels; ++i) total += lanes[i];
    return total;
  }
  static inline I KeepFirst(I a, int n) {
    int32_t lanes[kBlockChannels];
    StoreInt(lanes, a);
    for (int i = n; i < kBlockChannels; ++i) lanes[i] = 0;
    return LoadInt(lanes);
  }
  static inline I RoundToInt(F a) {
    return {{_mm256_cvtps_epi32(a.half[0]), _mm256_cvtps_epi32(a.half[1])}};
  }
  static inline F ToFloat(I a) {
    return {{_mm256_cvtepi32_ps(a.half[0]), _mm256_cvtepi32_ps(a.half[1])}};
  }
  static inline I StoreCodes(int8_t* p, I a, I b, I sum) {
    const __m256i first = _mm256_packs_epi32(a.half[0], a.half[1]);
    const __m256i second = _mm256_packs_epi32(b.half[0], b.half[1]);
    // Quarters, 4 bytes each, come in the order a0 a2 b0 b2 a1 a3 b1 b3.
    const __m256i bytes = _mm256_packs_epi16(first, second);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i codes = _mm256_permutevar8x32_epi32(bytes, order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    sum.half[0] = _mm256_add_epi32(sum.half[0], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    return sum;
  }

  static inline W LoadWeights(const uint8_t* p) { return {{LoadBytes(p), LoadBytes(p + 32)}}; }
  static inline void StoreWeights(uint8_t* p, W w) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.half[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), w.half[1]);
  }
  static inline void Unpack(const uint8_t* p, W* low, W* high) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = LoadBytes(p + 32 * i);
      low->half[i] = _mm256_and_si256(bytes, mask);
      high->half[i] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
  }
  static inline void Prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }
  static inline B Broadcast(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }

  static inline Partial Begin() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
  static inline Partial Dot(Partial part, W w, B codes) {
    return {{_mm256_add_epi16(part.half[0], _mm256_maddubs_epi16(w.half[0], codes)),
             _mm256_add_epi16(part.half[1], _mm256_maddubs_epi16(w.half[1], codes))}};
  }
  static inline I Finish(I sum, Partial part) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {{_mm256_add_epi32(sum.half[0], _mm256_madd_epi16(part.half[0], ones)),
             _mm256_add_epi32(sum.half[1], _mm256_madd_epi16(part.half[1], ones))}};
  }

 private:
  static inline __m256 WidenBF16(const uint16_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static inline __m256i LoadBytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};
