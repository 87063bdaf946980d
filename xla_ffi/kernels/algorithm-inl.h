// The one algorithm behind every instruction set, over a class V of 16-wide logical vectors.
//
// A kernel file defines V (see vec_portable-inl.h for what each member means), includes this file
// inside an anonymous namespace of its own, and hands out MakeKernels<V>(). Nothing here may differ
// in result between instruction sets: sums of codes are exact integers, floats meet only fused
// multiply-adds and correctly rounded operations in a fixed order, and every file is compiled with
// -ffp-contract=off.
//
// No standard C++ header belongs here: their inline functions would be compiled with this file's
// flags and could be the copy that the linker keeps for everybody.

// Tiles must be unrolled and inlined to live in registers; the portable file has none to keep, and
// leaves it be.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(JAX_W4A8_PORTABLE)
#define JAX_W4A8_UNROLL _Pragma("GCC unroll 16")
#define JAX_W4A8_INLINE inline __attribute__((always_inline))
#define JAX_W4A8_NOINLINE __attribute__((noinline))
#else
#define JAX_W4A8_UNROLL
#define JAX_W4A8_INLINE inline
#define JAX_W4A8_NOINLINE
#endif

// What a prefetch brings.
constexpr int64_t kLineBytes = 64;

// ---------------------------------------------------------------------------------------------------------
// Quantisation of activations (rule 1 of the contract).

// Loads n <= 16 floats; lanes behind them are zero.
template <class V>
static inline typename V::F LoadSome(const float* x, int64_t n) {
  if (n >= kBlockChannels) return V::Load(x);
  float lanes[kBlockChannels] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = x[i];
  return V::Load(lanes);
}

struct RowRange {
  float low;   // min(0, min x)
  float high;  // max(0, max x)
  bool finite;
};

// A row times a factor, which mostly is 1: that costs no multiplication then.
template <class V, bool kScaled>
struct ScaledRow {
  const float* x;
  int64_t n;
  typename V::F factor;

  // 16 values from i on. Unless kWhole, lanes from n on are zero.
  template <bool kWhole>
  inline typename V::F At(int64_t i) const {
    const typename V::F value = kWhole ? V::Load(x + i) : LoadSome<V>(x + i, n - i);
    if constexpr (kScaled) return V::Mul(value, factor);
    return value;
  }
};

// What of a row has been seen.
template <class V>
struct Extremes {
  typename V::F low = V::Set(0), high = V::Set(0);
  typename V::F check = V::Set(0);  // NaN from the first NaN or infinity on, else +0

  inline void Add(typename V::F value) {
    low = V::Min(value, low);
    high = V::Max(value, high);
    check = V::Fma(value, V::Set(0), check);
  }
};

template <class V, bool kScaled>
static inline RowRange FindRange(const ScaledRow<V, kScaled>& row) {
  Extremes<V> even, odd;  // alone, either would wait for its own last step
  int64_t i = 0;
  for (; i + 2 * kBlockChannels <= row.n; i += 2 * kBlockChannels) {
    even.Add(row.template At<true>(i));
    odd.Add(row.template At<true>(i + kBlockChannels));
  }
  for (; i < row.n; i += kBlockChannels) even.Add(row.template At<false>(i));
  const float low = V::Largest(V::Sub(V::Set(0), V::Min(even.low, odd.low)));
  const float high = V::Largest(V::Max(even.high, odd.high));
  uint32_t checks[kBlockChannels], seen = 0;
  V::Store(reinterpret_cast<float*>(checks), V::Add(even.check, odd.check));
  for (uint32_t check : checks) seen |= check;
  return {0 - low, high, seen == 0};
}

// code = min(rint(value * multiplier) + zero, 127), of [-128, 127] as the scheme was chosen, or of
// [-127, 127] if it is symmetric; value = (code - zero) * scale.
struct RowScheme {
  float multiplier;
  float zero;
  float scale;
};

static inline RowScheme AsymmetricScheme(const RowRange& range) {
  const float multiplier = 255.0f / (range.high - range.low);
  const float below = range.low * multiplier;
  const float above = range.high * multiplier;
  float zero = (below + above) - 1.0f > 0 ? -128.0f - below : 127.0f - above;
  zero = zero < -128.0f ? -128.0f : zero;
  zero = zero > 127.0f ? 127.0f : zero;
  return {multiplier, rintf(zero), 1.0f / multiplier};
}

static inline RowScheme SymmetricScheme(float magnitude) {
  return {127.0f / magnitude, 0, magnitude / 127.0f};
}

static inline RowScheme ChooseScheme(const RowRange& range, bool symmetric) {
  constexpr float kSmallestRange = 0x1p-100f;  // below, a reciprocal could overflow
  const float magnitude = -range.low > range.high ? -range.low : range.high;
  const float extent = symmetric ? magnitude : range.high - range.low;
  if (!(extent >= kSmallestRange)) return {0, 0, 0};
  if (extent == INFINITY) return {0, 0, NAN};  // of finite values too far apart
  return symmetric ? SymmetricScheme(magnitude) : AsymmetricScheme(range);
}

// code = rint(value * multiplier) + zero, clamped to what a byte holds.
template <class V, bool kScaled>
struct RowCoder {
  ScaledRow<V, kScaled> row;
  typename V::F multiplier;
  typename V::I zero;

  inline typename V::I Whole(typename V::F value) const {
    return V::AddInt(V::RoundToInt(V::Mul(value, multiplier)), zero);
  }

  // As Whole, of 16 values from i on; zeros from the row's end on.
  inline typename V::I WholeOfSome(int64_t i) const {
    if (i >= row.n) return V::SetInt(0);
    const typename V::I whole = Whole(row.template At<false>(i));
    const int64_t left = row.n - i;
    return left < kBlockChannels ? V::KeepFirst(whole, static_cast<int>(left)) : whole;
  }

  // Codes of the values [begin, end), a multiple of kChunkInputs; zeros from the row's end on.
  // Returns their sum. Meanwhile the next row is fetched, which mostly lies behind this one:
  // finding its range would wait for memory.
  inline int32_t Store(int64_t begin, int64_t end, int8_t* codes) const {
    typename V::I sum = V::SetInt(0);
    int64_t i = begin;
    for (const int64_t whole = end <= row.n ? end : begin; i < whole; i += kChunkInputs) {
      const uint8_t* const ahead = reinterpret_cast<const uint8_t*>(row.x + row.n + i);
      V::Prefetch(ahead);
      V::Prefetch(ahead + kLineBytes);
      sum = V::StoreCodes(codes + i, Whole(row.template At<true>(i)),
                          Whole(row.template At<true>(i + kBlockChannels)), sum);
    }
    for (; i < end; i += kChunkInputs) {
      sum = V::StoreCodes(codes + i, WholeOfSome(i), WholeOfSome(i + kBlockChannels), sum);
    }
    return V::Sum(sum);
  }
};

template <class V, bool kScaled>
static inline void QuantizeScaled(const ScaledRow<V, kScaled>& values, bool symmetric, int64_t row,
                                  const QuantizedRows& out) {
  const RowRange range = FindRange(values);
  RowScheme scheme = {0, 0, NAN};  // of a row with NaN or infinity: codes 0, result NaN
  if (range.finite) scheme = ChooseScheme(range, symmetric);
  out.zero[row] = scheme.zero;
  out.scale[row] = scheme.scale;

  int8_t* codes = out.codes + row * out.inputs();
  int32_t* start = out.start + row * out.groups;
  if (!(scheme.multiplier > 0)) {
    memset(codes, 0, static_cast<size_t>(out.inputs()));
    memset(start, 0, static_cast<size_t>(out.groups) * sizeof(*start));
    return;
  }
  const RowCoder<V, kScaled> coder = {values, V::Set(scheme.multiplier),
                                      V::SetInt(static_cast<int32_t>(scheme.zero))};
  for (int64_t group = 0; group < out.groups; ++group) {
    const int64_t begin = group * out.group_width;
    start[group] = -kCodeOffset * coder.Store(begin, begin + out.group_width, codes);
  }
}

template <class V>
static void QuantizeRow(const float* x, int64_t n, float factor, bool symmetric, int64_t row,
                        const QuantizedRows& out) {
  if (factor == 1.0f) {
    QuantizeScaled(ScaledRow<V, false>{x, n, V::Set(factor)}, symmetric, row, out);
  } else {
    QuantizeScaled(ScaledRow<V, true>{x, n, V::Set(factor)}, symmetric, row, out);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Activations (rule 4).

// e^x to 2 ulp for x of [-87, 88]; e^-87 below, infinity above. NaN stays NaN.
template <class V>
static inline typename V::F Exp(typename V::F x) {
  // Operand order matters: Min and Max return their second operand when one is NaN.
  x = V::Max(V::Set(-87.0f), V::Min(V::Set(89.0f), x));
  const typename V::F n = V::Rint(V::Mul(x, V::Set(0x1.715476p+0f)));
  typename V::F r = V::Fma(n, V::Set(-0x1.62e4p-1f), x);
  r = V::Fma(n, V::Set(-0x1.7f7d1cp-20f), r);
  typename V::F p = V::Set(0.0013933652f);  // minimax of (e^r - 1 - r) / r^2
  p = V::Fma(p, r, V::Set(0.008363182f));
  p = V::Fma(p, r, V::Set(0.041666467f));
  p = V::Fma(p, r, V::Set(0.16666576f));
  p = V::Fma(p, r, V::Set(0.5f));
  p = V::Fma(p, V::Mul(r, r), r);
  p = V::Add(p, V::Set(1.0f));
  return V::MulPow2(p, n);  // n of [-126, 128]
}

template <class V>
static inline typename V::F Sigmoid(typename V::F x) {
  const typename V::F e = Exp<V>(V::Sub(V::Set(0), x));
  return V::Div(V::Set(1.0f), V::Add(V::Set(1.0f), e));
}

// The normal distribution's cumulative function. erfc(a) = e^(-a^2) t P(t), t = 1 / (1 + 0.37 a): P
// is a minimax fit (2.6e-8) over a of [0, 9.5], beyond which e^(-a^2) is 0 in float.
template <class V>
static inline typename V::F NormalCdf(typename V::F x) {
  const typename V::F magnitude = V::Max(V::Sub(V::Set(0), x), x);
  const typename V::F scaled = V::Mul(magnitude, V::Set(0.37f * 0.70710678118654752f));
  const typename V::F t = V::Div(V::Set(1.0f), V::Add(V::Set(1.0f), scaled));
  typename V::F p = V::Set(0.06320789f);
  p = V::Fma(p, t, V::Set(-0.30930763f));
  p = V::Fma(p, t, V::Set(0.49886706f));
  p = V::Fma(p, t, V::Set(-0.29855856f));
  p = V::Fma(p, t, V::Set(0.3196042f));
  p = V::Fma(p, t, V::Set(0.10291529f));
  p = V::Fma(p, t, V::Set(0.20714119f));
  p = V::Fma(p, t, V::Set(0.20731004f));
  p = V::Fma(p, t, V::Set(0.20882054f));
  const typename V::F e = Exp<V>(V::Mul(V::Mul(x, x), V::Set(-0.5f)));
  const typename V::F tail = V::Mul(V::Set(0.5f), V::Mul(e, V::Mul(t, p)));
  return V::SelectNegative(x, tail, V::Sub(V::Set(1.0f), tail));
}

template <class V>
static inline typename V::F Activate(const Activation& activation, typename V::F gate,
                                     typename V::F up) {
  switch (activation.kind) {
    case ActivationKind::kSwigluOai: {
      const typename V::F limit = V::Set(activation.limit);
      gate = V::Min(limit, gate);
      up = V::Max(V::Set(-activation.limit), V::Min(limit, up));
      const typename V::F sigmoid = Sigmoid<V>(V::Mul(V::Set(activation.alpha), gate));
      return V::Mul(V::Add(up, V::Set(1.0f)), V::Mul(gate, sigmoid));
    }
    case ActivationKind::kGelu:
      return V::Mul(V::Mul(gate, NormalCdf<V>(gate)), up);
    case ActivationKind::kGeluTanh: {
      // 0.5 (1 + tanh(y)) = sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3).
      const typename V::F cube = V::Mul(V::Mul(gate, gate), gate);
      const typename V::F inner = V::Fma(V::Set(0.044715f), cube, gate);
      return V::Mul(V::Mul(gate, Sigmoid<V>(V::Mul(V::Set(1.5957691216057308f), inner))), up);
    }
    case ActivationKind::kSilu:
      break;
  }
  return V::Mul(V::Mul(gate, Sigmoid<V>(gate)), up);
}

// ---------------------------------------------------------------------------------------------------------
// The product (rule 3). Two blocks at a time: in w13 they are the gate and up sides of 16 channels.

// Rows are cut into tiles of nearly equal height, at most V::kTileRows.
template <class V>
static inline int64_t TileCount(const MatmulArgs& args) {
  return (args.row_count + V::kTileRows - 1) / V::kTileRows;
}
template <class V>
static inline int64_t TileBegin(const MatmulArgs& args, int64_t tile) {
  return tile * args.row_count / TileCount<V>(args);
}

static inline int64_t SourceRow(const MatmulArgs& args, int64_t row) {
  return args.row_index ? args.row_index[row] : row;
}

// Copies tiles of R rows as [inputs / kChunkInputs][R][kChunkInputs], and what their sums start
// from as [groups][R]: one pointer each reaches all that a tile needs next.
template <class V>
static void ArrangeTiles(const MatmulArgs& args) {
  const QuantizedRows& q = args.rows;
  for (int64_t tile = 0; tile < TileCount<V>(args); ++tile) {
    const int64_t begin = TileBegin<V>(args, tile);
    const int64_t height = TileBegin<V>(args, tile + 1) - begin;
    for (int64_t r = 0; r < height; ++r) {
      const int64_t row = SourceRow(args, begin + r);
      const int8_t* codes = q.codes + row * q.inputs();
      int8_t* to = args.row_tiles + begin * q.inputs() + r * kChunkInputs;
      for (int64_t k = 0; k < q.inputs(); k += kChunkInputs, to += height * kChunkInputs) {
        memcpy(to, codes + k, kChunkInputs);
      }
      const int32_t* start = q.start + row * q.groups;
      int32_t* starts = args.row_starts + begin * q.groups + r;
      for (int64_t group = 0; group < q.groups; ++group) starts[group * height] = start[group];
    }
  }
}

// Two blocks' worth of work: inputs [begin, end) of blocks `first` and `second`. `group` is the
// one that `begin` lies in.
struct PairRange {
  int64_t first, second;
  int64_t begin, end;
  int64_t group;
};

template <class V>
static inline typename V::F LoadScale(const void* scale, DType dtype, int64_t index) {
  if (dtype == DType::kBF16) return V::LoadBF16(static_cast<const uint16_t*>(scale) + index);
  return V::Load(static_cast<const float*>(scale) + index);
}

// Weights of 4 inputs and two blocks.
template <class V>
struct WeightPair {
  typename V::W first, second;
};

static inline const uint8_t* CodesAt(const PackedMatrix& w, int64_t block, int64_t input) {
  return w.codes + block * static_cast<int64_t>(w.block_bytes()) + input * kBlockChannels / 2;
}

// Bytes between what is read from memory and what is fetched ahead: enough for its latency at its
// full rate.
constexpr int64_t kFetchAhead = 8192;

// Packed nibbles and scales of two whole blocks, read once: right when one tile of rows is all
// there is. Memory sets the pace then, so codes are fetched long before their use, those of the two
// blocks that follow included.
template <class V, DType kScale>
struct PackedSource {
  static constexpr bool kInPackedOrder = true;

  const uint8_t* codes[2];
  const void* scale;
  int64_t scale_index[2];  // of the group that comes next
  int64_t block_bytes;
  int64_t ahead;  // bytes from the next codes to those that are fetched
  int64_t left;   // bytes of a block to fetch before the next pair of blocks is due

  PackedSource(const PackedMatrix& w, int64_t first, int64_t second)
      : codes{CodesAt(w, first, 0), CodesAt(w, second, 0)},
        scale(w.scale),
        scale_index{first * w.groups * kBlockChannels, second * w.groups * kBlockChannels},
        block_bytes(static_cast<int64_t>(w.block_bytes())),
        ahead(kFetchAhead + kFetchAhead / block_bytes * block_bytes),
        left(block_bytes - kFetchAhead % block_bytes) {}

  inline void Next(WeightPair<V>* low, WeightPair<V>* high) {
    V::Unpack(codes[0], &low->first, &high->first);
    V::Unpack(codes[1], &low->second, &high->second);
    V::Prefetch(codes[0] + ahead);
    V::Prefetch(codes[1] + ahead);
    codes[0] += kRunBytes;
    codes[1] += kRunBytes;
  }

  // After the runs of kChunkInputs inputs.
  inline void EndChunk() {
    left -= kChunkInputs / kRunInputs * kRunBytes;
    // Not a branch: around one, compilers move accumulators from register to register.
    const int64_t jump = -static_cast<int64_t>(left == 0) & block_bytes;
    ahead += jump;
    left += jump;
  }

  inline typename V::F NextScale(int block) {
    const typename V::F value = LoadScale<V>(scale, kScale, scale_index[block]);
    scale_index[block] += kBlockChannels;
    return value;
  }
};

// Bytes and floats that the first of several tiles of rows decoded. While their products keep the
// arithmetic busy memory would be idle, so the first two tiles fetch the codes that a later panel
// will be decoded from, one block each.
template <class V>
struct PanelSource {
  static constexpr bool kInPackedOrder = false;  // but in that of Products<V>::StoreRun

  const uint8_t* next;
  const float* scale;
  const uint8_t* ahead;
  int64_t ahead_step;

  inline void Next(WeightPair<V>* low, WeightPair<V>* high) {
    low->first = V::LoadWeights(next);
    low->second = V::LoadWeights(next + kRunBytes);
    high->first = V::LoadWeights(next + 2 * kRunBytes);
    high->second = V::LoadWeights(next + 3 * kRunBytes);
    V::Prefetch(ahead);
    next += 4 * kRunBytes;
    ahead += ahead_step;
  }
  inline void EndChunk() {}

  // Of the first block, then of the second.
  inline typename V::F NextScale(int) {
    const typename V::F value = V::Load(scale);
    scale += kBlockChannels;
    return value;
  }
};

// Panels between the one in use and the one that is fetched: with few tiles of rows a panel's
// products take less than memory's latency under load.
constexpr int kPanelsAhead = 2;

// What a class of vectors may do in a way of its own, by a specialisation: the order of a run's
// weights in a panel, and the products of a tile.
template <class V>
struct Products;

// As PackedSource, of codes that were fetched before: right for the first of several tiles. Weights
// and scales are left to the others as PanelSource reads them; on the way the codes of a later
// panel are fetched.
template <class V, DType kScale>
struct DecodingSource {
  static constexpr bool kInPackedOrder = true;

  const uint8_t* codes[2];
  const void* scale;
  int64_t scale_index[2];  // of the group that comes next
  uint8_t* panel;
  float* scales;
  const uint8_t* ahead;

  DecodingSource(const PackedMatrix& w, const PairRange& range, const uint8_t* to_fetch,
                 uint8_t* weights_out, float* scales_out)
      : codes{CodesAt(w, range.first, range.begin), CodesAt(w, range.second, range.begin)},
        scale(w.scale),
        scale_index{(range.first * w.groups + range.group) * kBlockChannels,
                    (range.second * w.groups + range.group) * kBlockChannels},
        panel(weights_out),
        scales(scales_out),
        ahead(to_fetch) {}

  inline void Next(WeightPair<V>* low, WeightPair<V>* high) {
    V::Unpack(codes[0], &low->first, &high->first);
    V::Unpack(codes[1], &low->second, &high->second);
    Products<V>::StoreRun(*low, *high, panel);
    V::Prefetch(ahead);
    codes[0] += kRunBytes;
    codes[1] += kRunBytes;
    panel += 4 * kRunBytes;
    ahead += kRunBytes;
  }
  inline void EndChunk() {}

  inline typename V::F NextScale(int block) {
    const typename V::F value = LoadScale<V>(scale, kScale, scale_index[block]);
    V::Store(scales, value);
    scale_index[block] += kBlockChannels;
    scales += kBlockChannels;
    return value;
  }
};

// Adds the products of kChunkInputs inputs to the sums of R rows and two blocks.
template <class V, int R, class Source, class Sum>
static JAX_W4A8_INLINE void AddChunk(Source& source, const int8_t* codes, Sum (&sum)[R][2]) {
  JAX_W4A8_UNROLL
  for (int run = 0; run < kChunkInputs; run += kRunInputs) {
    WeightPair<V> low, high;
    source.Next(&low, &high);
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename V::B four = V::Broadcast(codes + r * kChunkInputs + run);
      sum[r][0] = V::Dot(sum[r][0], low.first, four);
      sum[r][1] = V::Dot(sum[r][1], low.second, four);
    }
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename V::B four = V::Broadcast(codes + r * kChunkInputs + run + 4);
      sum[r][0] = V::Dot(sum[r][0], high.first, four);
      sum[r][1] = V::Dot(sum[r][1], high.second, four);
    }
  }
  source.EndChunk();
}

// Adds a range of inputs to the totals of the R rows from `row` on. Sums of a group that
// goes on behind the range are left there too.
//
// Registers, AVX-512: R = 12 takes 24 accumulators, 4 weights and a few broadcasts of 32. Totals
// live in the first-level cache: a group touches them once, on ports that products leave idle,
// whereas registers for them make compilers move accumulators about. AVX2 has 16 registers for R =
// 3: 12 of 16-bit partial sums; sums are on the stack, touched once a chunk. Every height of tile
// is a function of its own: inlined into one, compilers keep accumulators of some in memory.
template <class V, int R, class Source>
static JAX_W4A8_NOINLINE void AddVectors(const MatmulArgs& args, Source source,
                                         const PairRange& range, int64_t row) {
  const int64_t groups = args.weights.groups, width = args.weights.group_width;
  const int8_t* codes = args.row_tiles + row * groups * width + range.begin * R;
  const int32_t* start = args.row_starts + row * groups + range.group * R;
  TileState* state = args.state + row;
  if (range.begin == 0) {
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < 2; ++n) V::Store(state[r].total[n], V::Set(0));
    }
  }
  int64_t group_begin = range.group * width;
  for (int64_t k = range.begin; k < range.end;) {
    typename V::I sum[R][2];
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      if (k == group_begin) {
        sum[r][0] = sum[r][1] = V::SetInt(start[r]);
      } else {
        for (int n = 0; n < 2; ++n) sum[r][n] = V::LoadInt(state[r].sum[n]);
      }
    }
    const int64_t group_end = group_begin + width;
    const int64_t end = group_end < range.end ? group_end : range.end;
    do {  // at least one chunk: a zero-trip path would cost copies of all accumulators
      if constexpr (V::kNarrowSums) {
        typename V::Partial part[R][2];
        JAX_W4A8_UNROLL
        for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = V::Begin();
        AddChunk<V, R>(source, codes, part);
        JAX_W4A8_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r][0] = V::Finish(sum[r][0], part[r][0]);
          sum[r][1] = V::Finish(sum[r][1], part[r][1]);
        }
      } else {
        AddChunk<V, R>(source, codes, sum);
      }
      codes += R * kChunkInputs;
      k += kChunkInputs;
    } while (k < end);
    if (end < group_end) {
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < 2; ++n) V::StoreInt(state[r].sum[n], sum[r][n]);
      }
      return;
    }
    const typename V::F scale[2] = {source.NextScale(0), source.NextScale(1)};
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < 2; ++n) {
        float* total = state[r].total[n];
        V::Store(total, V::Fma(V::ToFloat(sum[r][n]), scale[n], V::Load(total)));
      }
    }
    group_begin = group_end;
    start += R;
  }
}

template <class V>
struct Products {
  // As PanelSource reads it.
  static inline void StoreRun(const WeightPair<V>& low, const WeightPair<V>& high, uint8_t* panel) {
    V::StoreWeights(panel, low.first);
    V::StoreWeights(panel + kRunBytes, low.second);
    V::StoreWeights(panel + 2 * kRunBytes, high.first);
    V::StoreWeights(panel + 3 * kRunBytes, high.second);
  }

  template <int R, class Source>
  static inline void AddRange(const MatmulArgs& args, const Source& source, const PairRange& range,
                              int64_t row) {
    AddVectors<V, R>(args, source, range, row);
  }
};

// Stores the first n of 16 values as `dtype`.
template <class V>
static inline void StoreAs(DType dtype, void* out, int64_t index, typename V::F value, int64_t n) {
  float lanes[kBlockChannels];
  if (dtype == DType::kF32) {
    float* to = static_cast<float*>(out) + index;
    if (n >= kBlockChannels) return V::Store(to, value);
    V::Store(lanes, value);
    for (int64_t i = 0; i < n; ++i) to[i] = lanes[i];
    return;
  }
  uint16_t halves[kBlockChannels];
  if (dtype == DType::kBF16) {
    V::StoreBF16(halves, value);
  } else {
    V::StoreF16(halves, value);
  }
  uint16_t* to = static_cast<uint16_t*>(out) + index;
  if (n > kBlockChannels) n = kBlockChannels;
  for (int64_t i = 0; i < n; ++i) to[i] = halves[i];
}

// What every row of two blocks is finished with.
template <class V>
struct PairEnd {
  typename V::F sum[2], bias[2];

  PairEnd(const PackedMatrix& w, const PairRange& range) {
    const int64_t block[2] = {range.first * kBlockChannels, range.second * kBlockChannels};
    for (int n = 0; n < 2; ++n) {
      sum[n] = V::Load(w.scaled_sum + block[n]);
      bias[n] = V::Load(w.bias + block[n]);
    }
  }

  // A total with zero point, row scale and bias.
  inline typename V::F Finish(int n, const float* total, typename V::F minus_zero,
                              typename V::F scale) const {
    return V::Add(V::Mul(V::Fma(minus_zero, sum[n], V::Load(total)), scale), bias[n]);
  }
};

// Finishes and stores the totals of `count` rows from `row` on with two blocks.
template <class V>
static void StoreRows(const MatmulArgs& args, const PairRange& range, int64_t row, int64_t count,
                      const TileState* state) {
  const PairEnd<V> end(args.weights, range);
  const int64_t column = (args.activation ? range.first / 2 : range.first) * kBlockChannels;
  const int64_t columns = args.out_columns - column;  // from there on
  for (int64_t r = 0; r < count; ++r) {
    const int64_t source = SourceRow(args, row + r);
    const int64_t target = args.out_index ? args.out_index[row + r] : row + r;
    const typename V::F minus_zero = V::Set(-args.rows.zero[source]);
    const typename V::F scale = V::Set(args.rows.scale[source]);
    const typename V::F a = end.Finish(0, state[r].total[0], minus_zero, scale);
    const typename V::F b = end.Finish(1, state[r].total[1], minus_zero, scale);
    const int64_t index = target * args.out_stride + column;
    float* const line = static_cast<float*>(args.out) + index;  // where floats are stored
    if (args.activation) {
      const typename V::F value = Activate<V>(*args.activation, a, b);
      if (args.stream) {
        V::Stream(line, value);
      } else {
        StoreAs<V>(args.out_dtype, args.out, index, value, columns);
      }
      continue;
    }
    if (args.stream) {
      V::Stream(line, a);
      if (range.second != range.first) V::Stream(line + kBlockChannels, b);
      continue;
    }
    StoreAs<V>(args.out_dtype, args.out, index, a, columns);
    if (range.second == range.first) continue;
    StoreAs<V>(args.out_dtype, args.out, index + kBlockChannels, b, columns - kBlockChannels);
  }
}

template <class V, int R, class Source>
static void Tile(const MatmulArgs& args, const Source& source, const PairRange& range,
                 int64_t row) {
  Products<V>::template AddRange<R>(args, source, range, row);
  if (range.end == args.weights.inputs()) StoreRows<V>(args, range, row, R, args.state + row);
}

template <class V, int R, class Source>
static inline void DispatchTile(const MatmulArgs& args, const Source& source,
                                const PairRange& range, int64_t row, int64_t height) {
  if constexpr (R > 1) {
    if (height < R) return DispatchTile<V, R - 1>(args, source, range, row, height);
  }
  Tile<V, R>(args, source, range, row);
}

// The panels of a call in order: inputs of one pair of blocks, then of the next pair.
struct PanelCursor {
  int64_t block;
  int64_t begin;

  inline bool AtEnd(const MatmulArgs& args) const { return block >= args.block_end; }
  inline PairRange Range(const PackedMatrix& w) const {
    const int64_t end = begin + kPanelInputs < w.inputs() ? begin + kPanelInputs : w.inputs();
    // A last odd block is computed twice and stored once.
    return {block, block + 1 < w.blocks ? block + 1 : block, begin, end, begin / w.group_width};
  }
  inline void Advance(const PackedMatrix& w) {
    begin += kPanelInputs;
    if (begin < w.inputs()) return;
    begin = 0;
    block += 2;
  }
};

// Fetches the scales of a range.
template <class V, DType kScale>
static inline void FetchScales(const PackedMatrix& w, const PairRange& range) {
  constexpr int64_t kScaleBytes = kScale == DType::kBF16 ? 2 : 4;
  const int64_t last_group = (range.end - 1) / w.group_width;
  const int64_t bytes = (last_group - range.group + 1) * kBlockChannels * kScaleBytes;
  const int64_t blocks[2] = {range.first, range.second};
  for (const int64_t block : blocks) {
    const int64_t index = (block * w.groups + range.group) * kBlockChannels;
    const uint8_t* scales = static_cast<const uint8_t*>(w.scale) + index * kScaleBytes;
    for (int64_t i = 0; i < bytes; i += kLineBytes) V::Prefetch(scales + i);
  }
}

// All rows against a panel, while codes and scales of the range `ahead` are fetched.
template <class V, DType kScale>
static void RowsOfPanel(const MatmulArgs& args, const PairRange& range, const PairRange& ahead) {
  const PackedMatrix& w = args.weights;
  const int64_t tiles = TileCount<V>(args);
  float* scales = reinterpret_cast<float*>(args.panel + kPanelBytes);
  FetchScales<V, kScale>(w, ahead);
  const DecodingSource<V, kScale> packed(w, range, CodesAt(w, ahead.first, ahead.begin), args.panel,
                                         scales);
  DispatchTile<V, V::kTileRows>(args, packed, range, 0, TileBegin<V>(args, 1));
  for (int64_t tile = 1; tile < tiles; ++tile) {
    const int64_t row = TileBegin<V>(args, tile);
    PanelSource<V> source = {args.panel, scales, args.panel, 0};
    if (tile == 1) {
      source.ahead = CodesAt(w, ahead.second, ahead.begin);
      source.ahead_step = kRunBytes;
    }
    DispatchTile<V, V::kTileRows>(args, source, range, row, TileBegin<V>(args, tile + 1) - row);
  }
}

template <class V, DType kScale>
static void MatmulScaled(const MatmulArgs& args) {
  const PackedMatrix& w = args.weights;
  if (args.row_count <= V::kTileRows) {
    for (PanelCursor cursor = {args.block_begin, 0}; !cursor.AtEnd(args); cursor.block += 2) {
      PairRange range = cursor.Range(w);
      range.end = w.inputs();
      const PackedSource<V, kScale> source(w, range.first, range.second);
      DispatchTile<V, V::kTileRows>(args, source, range, 0, args.row_count);
    }
    return;
  }
  PanelCursor ahead = {args.block_begin, 0};
  for (int i = 0; i < kPanelsAhead; ++i) ahead.Advance(w);
  for (PanelCursor cursor = {args.block_begin, 0}; !cursor.AtEnd(args);) {
    const PairRange range = cursor.Range(w);
    RowsOfPanel<V, kScale>(args, range, ahead.AtEnd(args) ? range : ahead.Range(w));
    cursor.Advance(w);
    ahead.Advance(w);
  }
}

template <class V>
static void Matmul(const MatmulArgs& args) {
  if (args.weights.scale_dtype == DType::kBF16) {
    MatmulScaled<V, DType::kBF16>(args);
  } else {
    MatmulScaled<V, DType::kF32>(args);
  }
  if (args.stream) V::FinishStream();
}

// ---------------------------------------------------------------------------------------------------------
// Combine (rule 5) and conversions.

template <class V>
static void Combine(const float* slots, const int32_t* ids, const float* weights, int64_t count,
                    int64_t columns, DType dtype, void* out) {
  for (int64_t column = 0; column < columns; column += kBlockChannels) {
    const int64_t n = columns - column;
    typename V::F total = V::Set(0);
    for (int64_t slot = 0; slot < count; ++slot) {
      if (ids && ids[slot] < 0) continue;
      const typename V::F value = LoadSome<V>(slots + slot * columns + column, n);
      total = V::Fma(V::Set(weights ? weights[slot] : 1.0f), value, total);
    }
    StoreAs<V>(dtype, out, column, total, n);
  }
}

template <class V>
static void ToFloat(DType dtype, const void* x, int64_t n, float* out) {
  const uint16_t* halves = static_cast<const uint16_t*>(x);
  int64_t i = 0;
  if (dtype == DType::kF32) {
    const float* floats = static_cast<const float*>(x);
    for (; i + kBlockChannels <= n; i += kBlockChannels) V::Store(out + i, V::Load(floats + i));
    for (; i < n; ++i) out[i] = floats[i];
  } else if (dtype == DType::kBF16) {
    for (; i + kBlockChannels <= n; i += kBlockChannels) V::Store(out + i, V::LoadBF16(halves + i));
    for (; i < n; ++i) out[i] = FloatOfBF16(halves[i]);
  } else {
    for (; i + kBlockChannels <= n; i += kBlockChannels) V::Store(out + i, V::LoadF16(halves + i));
    for (; i < n; ++i) out[i] = FloatOfF16(halves[i]);
  }
}

// ---------------------------------------------------------------------------------------------------------

template <class V, class Sum>
static inline void AddProbe(typename V::W weights, const int8_t* codes,
                            Sum (&sum)[V::kPeakChains]) {
  JAX_W4A8_UNROLL
  for (int step = 0; step < kChunkInputs / 4; ++step) {
    JAX_W4A8_UNROLL
    for (int chain = 0; chain < V::kPeakChains; ++chain) {
      const int8_t* four = codes + 4 * (step * V::kPeakChains + chain);
      sum[chain] = V::Dot(sum[chain], weights, V::Broadcast(four));
    }
  }
}

// Dot products of weights in registers, in as many independent chains as hide their latency. Every
// product is of other codes: equal ones would be computed once.
template <class V>
static int64_t PeakProbe(int64_t iterations, int32_t* sink) {
  int8_t bytes[kRunBytes + V::kPeakChains * kChunkInputs];
  for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = static_cast<int8_t>((i + *sink) & 7);
  const typename V::W weights = V::LoadWeights(reinterpret_cast<const uint8_t*>(bytes));
  typename V::I sum[V::kPeakChains];
  for (int chain = 0; chain < V::kPeakChains; ++chain) sum[chain] = V::SetInt(*sink);
  for (int64_t i = 0; i < iterations; ++i) {
    const volatile int64_t offset = 0;  // read anew in each iteration, so that no product is kept
    const int8_t* codes = bytes + kRunBytes + offset;
    if constexpr (V::kNarrowSums) {
      typename V::Partial part[V::kPeakChains];
      JAX_W4A8_UNROLL
      for (int chain = 0; chain < V::kPeakChains; ++chain) part[chain] = V::Begin();
      AddProbe<V>(weights, codes, part);
      JAX_W4A8_UNROLL
      for (int chain = 0; chain < V::kPeakChains; ++chain) {
        sum[chain] = V::Finish(sum[chain], part[chain]);
      }
    } else {
      AddProbe<V>(weights, codes, sum);
    }
  }
  int32_t total = 0;
  for (int chain = 0; chain < V::kPeakChains; ++chain) total += V::Sum(sum[chain]);
  *sink = total;
  return iterations * V::kPeakChains * kChunkInputs * kBlockChannels;
}

template <class V>
static void ReadProbe(const uint8_t* data, int64_t bytes, int32_t* sink) {
  typename V::I sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = V::SetInt(0);
  for (int64_t offset = 0; offset + 4 * kRunBytes <= bytes; offset += 4 * kRunBytes) {
    JAX_W4A8_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint8_t* from = data + offset + i * kRunBytes;
      V::Prefetch(from + kFetchAhead);
      sum[i] = V::AddInt(sum[i], V::LoadInt(reinterpret_cast<const int32_t*>(from)));
    }
  }
  for (int i = 0; i < 4; ++i) *sink += V::Sum(sum[i]);
}

#include "kernels/attention-inl.h"

template <class V>
static constexpr Kernels MakeKernels(const char* name) {
  return {name,        &ToFloat<V>,   &QuantizeRow<V>, &Matmul<V>, &ArrangeTiles<V>,
          &Combine<V>, &PeakProbe<V>, &ReadProbe<V>,   &Attend<V>, &FinishAttention<V>};
}
