// Quantisation of float weights in plain loops, which each instruction set's file turns into its
// own vectors. Division, rounding and comparison are exact, so that all give the same codes.
//
// Included inside an anonymous namespace; no standard C++ header belongs here (see
// algorithm-inl.h).

// How bit patterns of a dtype become floats. Magnitudes of patterns compare as integers do.

struct F32Weights {
  using Bits = int32_t;
  static constexpr Bits kMagnitude = 0x7fffffff;
  static inline float ToFloat(Bits bits) { return FloatOf(static_cast<uint32_t>(bits)); }
};

struct BF16Weights {
  using Bits = int16_t;
  static constexpr Bits kMagnitude = 0x7fff;
  static inline float ToFloat(Bits bits) { return FloatOfBF16(static_cast<uint16_t>(bits)); }
};

struct F16Weights {
  using Bits = int16_t;
  static constexpr Bits kMagnitude = 0x7fff;
  static inline float ToFloat(Bits bits) {
    // Exponents differ by 112; the product is exact, and makes normal floats of subnormal halves.
    const uint32_t half = static_cast<uint16_t>(bits);
    const float magnitude = FloatOf((half & 0x7fffu) << 13) * 0x1p+112f;
    const uint32_t infinite = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return FloatOf(BitsOf(magnitude) | infinite | ((half & 0x8000u) << 16));
  }
};

static inline float FlushSubnormal(float x) { return BitsOf(x) & 0x7f800000u ? x : 0.0f; }

// Element `index` of an array at any address.
template <class Bits>
static inline Bits BitsAt(const void* weights, int64_t index) {
  Bits bits;
  memcpy(&bits, static_cast<const char*>(weights) + index * static_cast<int64_t>(sizeof(Bits)),
         sizeof(Bits));
  return bits;
}

template <class Format>
static inline float LargestOf(const void* weights, int64_t n) {
  using Bits = typename Format::Bits;
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = static_cast<Bits>(BitsAt<Bits>(weights, i) & Format::kMagnitude);
    largest = bits > largest ? bits : largest;
  }
  return FlushSubnormal(Format::ToFloat(largest));
}

// stored[i] = code of weights[i] plus 8.
template <class Format, bool kFlush>
static inline void QuantizeAll(const void* weights, int64_t n, float scale, uint8_t* stored) {
  using Bits = typename Format::Bits;
  // Added to a small float, rounds it to a whole number (halves to even), with 8 more in the lowest
  // bits.
  constexpr float kRounder = 0x1.8p+23f + kCodeOffset;
  constexpr uint8_t kMost = 7 + kCodeOffset;
  for (int64_t i = 0; i < n; ++i) {
    float weight = Format::ToFloat(BitsAt<Bits>(weights, i));
    if (kFlush) weight = FlushSubnormal(weight);
    const uint8_t code = static_cast<uint8_t>(BitsOf(weight / scale + kRounder) & 0xffu);
    stored[i] = code < kMost ? code : kMost;
  }
}

template <class Format>
static inline int32_t QuantizeOf(const void* weights, int64_t n, float scale, uint32_t* runs) {
  alignas(64) uint8_t stored[kMostWeights];
  // Next to a larger scale a subnormal weight rounds to 0 all by itself.
  if (scale > 0x1p-120f) {
    QuantizeAll<Format, false>(weights, n, scale, stored);
  } else {
    QuantizeAll<Format, true>(weights, n, scale, stored);
  }
  const int64_t count = (n + kRunInputs - 1) / kRunInputs;
  for (int64_t i = n; i < count * kRunInputs; ++i) stored[i] = kCodeOffset;
  int32_t sum = 0;
  for (int64_t i = 0; i < count * kRunInputs; ++i) sum += stored[i];
  for (int64_t run = 0; run < count; ++run) {
    uint64_t eight;
    memcpy(&eight, stored + run * kRunInputs, sizeof(eight));
    runs[run] = static_cast<uint32_t>(eight | (eight >> 28));
  }
  return sum - kCodeOffset * static_cast<int32_t>(count * kRunInputs);
}

static float Largest(DType dtype, const void* weights, int64_t n) {
  switch (dtype) {
    case DType::kF32:
      return LargestOf<F32Weights>(weights, n);
    case DType::kBF16:
      return LargestOf<BF16Weights>(weights, n);
    default:
      return LargestOf<F16Weights>(weights, n);
  }
}

static int32_t Quantize(DType dtype, const void* weights, int64_t n, float scale, uint32_t* runs) {
  switch (dtype) {
    case DType::kF32:
      return QuantizeOf<F32Weights>(weights, n, scale, runs);
    case DType::kBF16:
      return QuantizeOf<BF16Weights>(weights, n, scale, runs);
    default:
      return QuantizeOf<F16Weights>(weights, n, scale, runs);
  }
}
