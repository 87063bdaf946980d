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
static inline float LargestOf(const void* weights, int64_t begin, int64_t n) {
  using Bits = typename Format::Bits;
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = static_cast<Bits>(BitsAt<Bits>(weights, begin + i) & Format::kMagnitude);
    largest = bits > largest ? bits : largest;
  }
  return FlushSubnormal(Format::ToFloat(largest));
}

// Here and below, groups of one chunk have loops of their own: compilers unroll what has a length
// they know.
template <class Format>
static inline void LargestOfGroups(const void* weights, int64_t n, int64_t width, float* largest) {
  for (int64_t begin = 0; begin < n; begin += width, ++largest) {
    const int64_t count = width < n - begin ? width : n - begin;
    *largest = count == kChunkInputs ? LargestOf<Format>(weights, begin, kChunkInputs)
                                     : LargestOf<Format>(weights, begin, count);
  }
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
// weight / scale, correctly rounded, for the reciprocal of the scale that is: at a sixth of what a
// division takes, each step removes what the remainder shows. The first leaves less than one unit
// in the last place, from which the second gives the right result (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990). Remainders must not
// underflow where a code depends on them: kLeastQuick is far above that.
static inline float Quotient(float weight, float scale, float reciprocal) {
  const float first = weight * reciprocal;
  const float second = __builtin_fmaf(__builtin_fmaf(-first, scale, weight), reciprocal, first);
  return __builtin_fmaf(__builtin_fmaf(-second, scale, weight), reciprocal, second);
}
#else
static inline float Quotient(float weight, float scale, float /*reciprocal*/) {
  return weight / scale;
}
#endif
constexpr float kLeastQuick = 0x1p-90f;

// stored[i] = code of weights[i] plus 8. `kSmall`: next to some scale subnormal weights count, and
// Quotient isn't exact. A scale for each weight, so that the loop doesn't end with each group.
template <class Format, bool kSmall>
static inline void StoreCodes(const void* weights, int64_t n, const float* scale,
                              const float* reciprocal, uint8_t* stored) {
  using Bits = typename Format::Bits;
  // Added to a small float, rounds it to a whole number (halves to even), with 8 more in the lowest
  // bits.
  constexpr float kRounder = 0x1.8p+23f + kCodeOffset;
  constexpr uint8_t kMost = 7 + kCodeOffset;
  for (int64_t i = 0; i < n; ++i) {
    const float weight = Format::ToFloat(BitsAt<Bits>(weights, i));
    const float quotient =
        kSmall ? FlushSubnormal(weight) / scale[i] : Quotient(weight, scale[i], reciprocal[i]);
    const uint8_t code = static_cast<uint8_t>(BitsOf(quotient + kRounder) & 0xffu);
    stored[i] = code < kMost ? code : kMost;
  }
}

// Joins stored codes to runs, and sums[run] of what is stored.
static inline void JoinRuns(const uint8_t* stored, int64_t count, uint32_t* runs, uint32_t* sums) {
  for (int64_t run = 0; run < count; ++run) {
    uint64_t eight;
    memcpy(&eight, stored + run * kRunInputs, sizeof(eight));
    runs[run] = static_cast<uint32_t>(eight | (eight >> 28));
    uint64_t sum = eight + (eight >> 32);  // of eight bytes up to 15
    sum += sum >> 16;
    sums[run] = static_cast<uint32_t>(sum + (sum >> 8)) & 0xffu;
  }
}

static inline int32_t SumOfCodes(const uint32_t* sums, int64_t runs) {
  uint32_t sum = 0;
  for (int64_t run = 0; run < runs; ++run) sum += sums[run];
  return static_cast<int32_t>(sum) - kCodeOffset * static_cast<int32_t>(runs * kRunInputs);
}

template <class Format>
static inline void QuantizeOf(const void* weights, const WeightGroups& groups, uint32_t* runs) {
  constexpr int64_t kChunkRuns = kChunkInputs / kRunInputs;
  alignas(64) uint8_t stored[kMostWeights];
  alignas(64) uint32_t sums[kMostWeights / kRunInputs];
  alignas(64) float scale[kMostWeights], reciprocal[kMostWeights];
  const int64_t n = groups.count, width = groups.width;
  const int64_t count = (n + kChunkInputs - 1) / kChunkInputs * kChunkRuns;
  memset(stored + count * kRunInputs - kChunkInputs, kCodeOffset, kChunkInputs);
  bool quick = true;
  for (int64_t begin = 0, group = 0; begin < n; begin += width, ++group) {
    // Where a scale is too small to be one, all weights are 0 by any.
    const float one = groups.scales[group] > 0 ? groups.scales[group] : 1.0f, by = 1.0f / one;
    quick = quick && one > kLeastQuick;
    for (int64_t chunk = begin; chunk < begin + width && chunk < n; chunk += kChunkInputs) {
      for (int64_t i = 0; i < kChunkInputs; ++i) scale[chunk + i] = one;
      for (int64_t i = 0; i < kChunkInputs; ++i) reciprocal[chunk + i] = by;
    }
  }
  if (quick) {
    StoreCodes<Format, false>(weights, n, scale, reciprocal, stored);
  } else {
    StoreCodes<Format, true>(weights, n, scale, reciprocal, stored);
  }
  JoinRuns(stored, count, runs, sums);
  for (int64_t begin = 0, group = 0; begin < count; begin += width / kRunInputs, ++group) {
    const int64_t left = count - begin, whole = width / kRunInputs;
    groups.sums[group] = whole == kChunkRuns
                             ? SumOfCodes(sums + begin, kChunkRuns)
                             : SumOfCodes(sums + begin, whole < left ? whole : left);
  }
}

static void Largest(DType dtype, const void* weights, int64_t n, int64_t width, float* largest) {
  switch (dtype) {
    case DType::kF32:
      return LargestOfGroups<F32Weights>(weights, n, width, largest);
    case DType::kBF16:
      return LargestOfGroups<BF16Weights>(weights, n, width, largest);
    default:
      return LargestOfGroups<F16Weights>(weights, n, width, largest);
  }
}

static void Quantize(DType dtype, const void* weights, const WeightGroups& groups, uint32_t* runs) {
  switch (dtype) {
    case DType::kF32:
      return QuantizeOf<F32Weights>(weights, groups, runs);
    case DType::kBF16:
      return QuantizeOf<BF16Weights>(weights, groups, runs);
    default:
      return QuantizeOf<F16Weights>(weights, groups, runs);
  }
}
