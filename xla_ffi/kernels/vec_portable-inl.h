// Logical vectors of 16 lanes in plain C++, and the meaning of every member that algorithm-inl.h
// uses.

struct Portable {
  static constexpr int kTileRows = 2;    // rows of the largest tile
  static constexpr int kPeakChains = 2;  // independent sums that hide a dot product's latency
  static constexpr int kRegisters = 8;   // logical vectors that registers have room for

  struct F {
    float lane[kBlockChannels];
  };
  struct I {
    int32_t lane[kBlockChannels];
  };
  // Whether sums inside a chunk of 32 inputs are kept in a narrower type, V::Partial, that starts
  // from V::Begin() and that V::Finish(sum, partial) adds to a sum.
  static constexpr bool kNarrowSums = false;
  // Weights of 16 channels x 4 inputs, a byte each, stored code + 8.
  struct W {
    uint8_t lane[kRunBytes];
  };
  // 4 activation codes of one row.
  struct B {
    int8_t lane[4];
  };

  template <class Op>
  static inline F Map(Op op) {
    F out;
    for (int i = 0; i < kBlockChannels; ++i) out.lane[i] = op(i);
    return out;
  }

  static inline F Set(float x) {
    return Map([&](int) { return x; });
  }
  static inline F Load(const float* p) {
    return Map([&](int i) { return p[i]; });
  }
  static inline F LoadBF16(const uint16_t* p) {
    return Map([&](int i) { return FloatOfBF16(p[i]); });
  }
  static inline F LoadF16(const uint16_t* p) {
    return Map([&](int i) { return FloatOfF16(p[i]); });
  }
  static inline void Store(float* p, F a) {
    for (int i = 0; i < kBlockChannels; ++i) p[i] = a.lane[i];
  }
  // Stores past the caches, to a multiple of 64 bytes; no other thread may read what was stored
  // before FinishStream. Where there is no such store, as ever.
  static inline void Stream(float* p, F a) { Store(p, a); }
  static inline void FinishStream() {}
  static inline void StoreBF16(uint16_t* p, F a) {
    for (int i = 0; i < kBlockChannels; ++i) p[i] = BF16Of(a.lane[i]);
  }
  static inline void StoreF16(uint16_t* p, F a) {
    for (int i = 0; i < kBlockChannels; ++i) p[i] = F16Of(a.lane[i]);
  }

  static inline F Add(F a, F b) {
    return Map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static inline F Sub(F a, F b) {
    return Map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static inline F Mul(F a, F b) {
    return Map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static inline F Div(F a, F b) {
    return Map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  // a * b + c, rounded once.
  static inline F Fma(F a, F b, F c) {
    return Map([&](int i) { return fmaf(a.lane[i], b.lane[i], c.lane[i]); });
  }
  // The second operand when either is NaN.
  static inline F Min(F a, F b) {
    return Map([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static inline F Max(F a, F b) {
    return Map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // Of all lanes; where one is NaN, that or any of them.
  static inline float Largest(F a) {
    float most = a.lane[0];
    for (int i = 1; i < kBlockChannels; ++i) most = a.lane[i] > most ? a.lane[i] : most;
    return most;
  }
  // x < 0 ? a : b
  static inline F SelectNegative(F x, F a, F b) {
    return Map([&](int i) { return x.lane[i] < 0 ? a.lane[i] : b.lane[i]; });
  }
  // To the nearest whole number, halves to even.
  static inline F Rint(F a) {
    return Map([&](int i) { return rintf(a.lane[i]); });
  }
  // a * 2^n, n whole and of [-126, 127]; infinity for n = 128; NaN for a NaN, whatever n.
  static inline F MulPow2(F a, F n) {
    return Map([&](int i) {
      const int32_t exponent = n.lane[i] == n.lane[i] ? static_cast<int32_t>(n.lane[i]) : 0;
      return a.lane[i] * FloatOf(static_cast<uint32_t>(exponent + 127) << 23);
    });
  }

  static inline I SetInt(int32_t x) {
    I out;
    for (int i = 0; i < kBlockChannels; ++i) out.lane[i] = x;
    return out;
  }
  static inline I LoadInt(const int32_t* p) {
    I out;
    for (int i = 0; i < kBlockChannels; ++i) out.lane[i] = p[i];
    return out;
  }
  static inline void StoreInt(int32_t* p, I a) {
    for (int i = 0; i < kBlockChannels; ++i) p[i] = a.lane[i];
  }
  static inline I AddInt(I a, I b) {
    for (int i = 0; i < kBlockChannels; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static inline int32_t Sum(I a) {
    int32_t total = 0;
    for (int i = 0; i < kBlockChannels; ++i) total += a.lane[i];
    return total;
  }
  // Zeros from lane n on.
  static inline I KeepFirst(I a, int n) {
    for (int i = n; i < kBlockChannels; ++i) a.lane[i] = 0;
    return a;
  }
  // The nearest whole numbers, of two the even one; they must be in range.
  static inline I RoundToInt(F a) {
    I out;
    for (int i = 0; i < kBlockChannels; ++i) out.lane[i] = static_cast<int32_t>(rintf(a.lane[i]));
    return out;
  }
  static inline F ToFloat(I a) {
    return Map([&](int i) { return static_cast<float>(a.lane[i]); });
  }
  // Stores a, then b, clamped to [-128, 127], and adds what was stored to lanes of `sum`,
  // whichever.
  static inline I StoreCodes(int8_t* p, I a, I b, I sum) {
    const I both[2] = {a, b};
    for (int i = 0; i < 2 * kBlockChannels; ++i) {
      const int32_t whole = both[i / kBlockChannels].lane[i % kBlockChannels];
      const int32_t code = whole < -128 ? -128 : whole > 127 ? 127 : whole;
      p[i] = static_cast<int8_t>(code);
      sum.lane[i % kBlockChannels] += code;
    }
    return sum;
  }

  static inline W LoadWeights(const uint8_t* p) {
    W out;
    for (int i = 0; i < kRunBytes; ++i) out.lane[i] = p[i];
    return out;
  }
  static inline void StoreWeights(uint8_t* p, W w) {
    for (int i = 0; i < kRunBytes; ++i) p[i] = w.lane[i];
  }
  // Inputs 0..3 of a run are its low nibbles, 4..7 the high ones.
  static inline void Unpack(const uint8_t* p, W* low, W* high) {
    for (int i = 0; i < kRunBytes; ++i) {
      low->lane[i] = p[i] & 15;
      high->lane[i] = static_cast<uint8_t>(p[i] >> 4);
    }
  }
  static inline void Prefetch(const uint8_t*) {}
  static inline B Broadcast(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }

  // Adds to each channel its 4 products; on V::Partial where sums are narrow.
  static inline I Dot(I sum, W w, B codes) {
    for (int i = 0; i < kBlockChannels; ++i) {
      for (int j = 0; j < 4; ++j) sum.lane[i] += w.lane[4 * i + j] * codes.lane[j];
    }
    return sum;
  }
};
