// Logical vectors as four 128-bit registers: NEON, which every 64-bit Arm processor has. Members as
// in vec_portable-inl.h.

// All but products, which differ between instruction sets.
struct NeonBase {
  static constexpr int kRegisters = 8;

  struct F {
    float32x4_t quarter[4];
  };
  struct I {
    int32x4_t quarter[4];
  };
  // Stored codes are of [0, 15], and so the same signed or not.
  struct W {
    int8x16_t quarter[4];
  };
  using B = int8x16_t;

  static inline F Set(float x) {
    return Map([&](int) { return vdupq_n_f32(x); });
  }
  static inline F Load(const float* p) {
    return Map([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static inline F LoadBF16(const uint16_t* p) {
    return Map([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  static inline F LoadF16(const uint16_t* p) {
    return Map([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
  }
  static inline void Store(float* p, F a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.quarter[i]);
  }
  static inline void Stream(float* p, F a) { Store(p, a); }
  static inline void FinishStream() {}
  static inline void StoreBF16(uint16_t* p, F a) {
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t bits = vreinterpretq_u32_f32(a.quarter[i]);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
      const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
      const uint32x4_t number = vceqq_f32(a.quarter[i], a.quarter[i]);
      vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(number, rounded, quiet), 16));
    }
  }
  static inline void StoreF16(uint16_t* p, F a) {
    for (int i = 0; i < 4; ++i) {
      vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.quarter[i])));
    }
  }

  static inline F Add(F a, F b) {
    return Map([&](int i) { return vaddq_f32(a.quarter[i], b.quarter[i]); });
  }
  static inline F Sub(F a, F b) {
    return Map([&](int i) { return vsubq_f32(a.quarter[i], b.quarter[i]); });
  }
  static inline F Mul(F a, F b) {
    return Map([&](int i) { return vmulq_f32(a.quarter[i], b.quarter[i]); });
  }
  static inline F Div(F a, F b) {
    return Map([&](int i) { return vdivq_f32(a.quarter[i], b.quarter[i]); });
  }
  static inline F Fma(F a, F b, F c) {
    return Map([&](int i) { return vfmaq_f32(c.quarter[i], a.quarter[i], b.quarter[i]); });
  }
  // Not the instructions of these names, which treat NaN and zeros of either sign differently.
  static inline F Min(F a, F b) {
    return Map([&](int i) {
      return vbslq_f32(vcltq_f32(a.quarter[i], b.quarter[i]), a.quarter[i], b.quarter[i]);
    });
  }
  static inline F Max(F a, F b) {
    return Map([&](int i) {
      return vbslq_f32(vcgtq_f32(a.quarter[i], b.quarter[i]), a.quarter[i], b.quarter[i]);
    });
  }
  static inline float Largest(F a) {
    return vmaxvq_f32(
        vmaxq_f32(vmaxq_f32(a.quarter[0], a.quarter[1]), vmaxq_f32(a.quarter[2], a.quarter[3])));
  }
  static inline F SelectNegative(F x, F a, F b) {
    return Map(
        [&](int i) { return vbslq_f32(vcltzq_f32(x.quarter[i]), a.quarter[i], b.quarter[i]); });
  }
  static inline F Rint(F a) {
    return Map([&](int i) { return vrndnq_f32(a.quarter[i]); });
  }
  static inline F MulPow2(F a, F n) {
    return Map([&](int i) {
      const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n.quarter[i]), vdupq_n_s32(127));
      return vmulq_f32(a.quarter[i], vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
    });
  }

  static inline I SetInt(int32_t x) {
    return MapInt([&](int) { return vdupq_n_s32(x); });
  }
  static inline I LoadInt(const int32_t* p) {
    return MapInt([&](int i) { return vld1q_s32(p + 4 * i); });
  }
  static inline void StoreInt(int32_t* p, I a) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.quarter[i]);
  }
  static inline I AddInt(I a, I b) {
    return MapInt([&](int i) { return vaddq_s32(a.quarter[i], b.quarter[i]); });
  }
  static inline int32_t Sum(I a) {
    return vaddvq_s32(
        vaddq_s32(vaddq_s32(a.quarter[0], a.quarter[1]), vaddq_s32(a.quarter[2], a.quarter[3])));
  }
  static inline I KeepFirst(I a, int n) {
    const int32_t lanes[4] = {0, 1, 2, 3};
    return MapInt([&](int i) {
      const uint32x4_t kept = vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(n - 4 * i));
      return vandq_s32(a.quarter[i], vreinterpretq_s32_u32(kept));
    });
  }
  static inline I RoundToInt(F a) {
    return MapInt([&](int i) { return vcvtnq_s32_f32(a.quarter[i]); });
  }
  static inline F ToFloat(I a) {
    return Map([&](int i) { return vcvtq_f32_s32(a.quarter[i]); });
  }
  static inline I StoreCodes(int8_t* p, I a, I b, I sum) {
    const I both[2] = {a, b};
    for (const I& whole : both) {
      const int16x8_t low =
          vcombine_s16(vqmovn_s32(whole.quarter[0]), vqmovn_s32(whole.quarter[1]));
      const int16x8_t high =
          vcombine_s16(vqmovn_s32(whole.quarter[2]), vqmovn_s32(whole.quarter[3]));
      const int8x16_t codes = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
      vst1q_s8(p, codes);
      sum.quarter[0] = vpadalq_s16(sum.quarter[0], vpaddlq_s8(codes));
      p += kBlockChannels;
    }
    return sum;
  }

  static inline W LoadWeights(const uint8_t* p) {
    W out;
    for (int i = 0; i < 4; ++i) out.quarter[i] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * i));
    return out;
  }
  static inline void StoreWeights(uint8_t* p, W w) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vreinterpretq_u8_s8(w.quarter[i]));
  }
  static inline void Unpack(const uint8_t* p, W* low, W* high) {
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t bytes = vld1q_u8(p + 16 * i);
      low->quarter[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
      high->quarter[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    }
  }
  static inline void Prefetch(const uint8_t* p) { __builtin_prefetch(p); }
  static inline B Broadcast(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }

 private:
  template <class Op>
  static inline F Map(Op op) {
    return {{op(0), op(1), op(2), op(3)}};
  }
  template <class Op>
  static inline I MapInt(Op op) {
    return {{op(0), op(1), op(2), op(3)}};
  }
};

// Without a dot product: 8 products to an instruction, added up in 16 bits.
struct Neon : NeonBase {
  static constexpr int kTileRows = 1;
  static constexpr int kPeakChains = 2;
  static constexpr bool kNarrowSums = true;

  // At most 8 a chunk of 15 * 128 = 1920 each: two of them still fit when they are added.
  struct Partial {
    int16x8_t eighth[8];
  };

  static inline Partial Begin() {
    Partial out;
    for (int i = 0; i < 8; ++i) out.eighth[i] = vdupq_n_s16(0);
    return out;
  }
  static inline Partial Dot(Partial part, W w, B codes) {
    for (int i = 0; i < 4; ++i) {
      part.eighth[2 * i] =
          vmlal_s8(part.eighth[2 * i], vget_low_s8(w.quarter[i]), vget_low_s8(codes));
      part.eighth[2 * i + 1] = vmlal_high_s8(part.eighth[2 * i + 1], w.quarter[i], codes);
    }
    return part;
  }
  static inline I Finish(I sum, Partial part) {
    for (int i = 0; i < 4; ++i) {
      const int16x8_t pairs = vpaddq_s16(part.eighth[2 * i], part.eighth[2 * i + 1]);
      sum.quarter[i] = vpadalq_s16(sum.quarter[i], pairs);
    }
    return sum;
  }
};

#ifdef __ARM_FEATURE_DOTPROD
// 16 products to an instruction, `sdot`. A tile's 16 sums, and the weights of a run, which are read
// before they meet any row, fill the 32 registers.
struct NeonDotprod : NeonBase {
  static constexpr int kTileRows = 2;
  static constexpr int kPeakChains = 4;
  static constexpr bool kNarrowSums = false;

  static inline I Dot(I sum, W w, B codes) {
    for (int i = 0; i < 4; ++i) sum.quarter[i] = vdotq_s32(sum.quarter[i], w.quarter[i], codes);
    return sum;
  }
};
#endif
