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
#else
#define JAX_W4A8_UNROLL
#define JAX_W4A8_INLINE inline
#endif

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

template <class V>
static inline RowRange FindRange(const float* x, int64_t n, typename V::F factor) {
  typename V::F low = V::Set(0), high = V::Set(0), check = V::Set(0);
  for (int64_t i = 0; i < n; i += kBlockChannels) {
    const typename V::F value = V::Mul(LoadSome<V>(x + i, n - i), factor);
    low = V::Min(value, low);
    high = V::Max(value, high);
    check = V::Fma(value, V::Set(0), check);  // NaN from the first NaN or infinity on
  }
  float lows[kBlockChannels], highs[kBlockChannels], checks[kBlockChannels];
  V::Store(lows, low);
  V::Store(highs, high);
  V::Store(checks, check);
  RowRange range = {0, 0, true};
  for (int lane = 0; lane < kBlockChannels; ++lane) {
    range.low = lows[lane] < range.low ? lows[lane] : range.low;
    range.high = highs[lane] > range.high ? highs[lane] : range.high;
    range.finite = range.finite && checks[lane] == 0;
  }
  return range;
}

// code = clamp(rint(value * multiplier) + zero, smallest, 127); value = (code - zero) * scale.
struct RowScheme {
  float multiplier;
  float zero;
  float scale;
  float smallest;
};

static inline RowScheme AsymmetricScheme(const RowRange& range) {
  const float multiplier = 255.0f / (range.high - range.low);
  const float below = range.low * multiplier;
  const float above = range.high * multiplier;
  float zero = (below + above) - 1.0f > 0 ? -128.0f - below : 127.0f - above;
  zero = zero < -128.0f ? -128.0f : zero;
  zero = zero > 127.0f ? 127.0f : zero;
  return {multiplier, rintf(zero), 1.0f / multiplier, -128.0f};
}

static inline RowScheme SymmetricScheme(float magnitude) {
  return {127.0f / magnitude, 0, magnitude / 127.0f, -127.0f};
}

static inline RowScheme ChooseScheme(const RowRange& range, bool symmetric) {
  constexpr float kSmallestRange = 0x1p-100f;  // below, a reciprocal could overflow
  const float magnitude = -range.low > range.high ? -range.low : range.high;
  const float extent = symmetric ? magnitude : range.high - range.low;
  if (!(extent >= kSmallestRange)) return {0, 0, 0, 0};
  if (extent == INFINITY) return {0, 0, NAN, 0};  // of finite values too far apart
  return symmetric ? SymmetricScheme(magnitude) : AsymmetricScheme(range);
}

template <class V>
static void QuantizeRow(const float* x, int64_t n, float factor, bool symmetric, int64_t row,
                        const QuantizedRows& out) {
  const typename V::F by = V::Set(factor);
  const RowRange range = FindRange<V>(x, n, by);
  RowScheme scheme = {0, 0, NAN, 0};  // of a row with NaN or infinity: codes 0, result NaN
  if (range.finite) scheme = ChooseScheme(range, symmetric);
  out.zero[row] = scheme.zero;
  out.scale[row] = scheme.scale;

  const typename V::F multiplier = V::Set(scheme.multiplier), zero = V::Set(scheme.zero);
  const typename V::F smallest = V::Set(scheme.smallest), largest = V::Set(127);
  int8_t* codes = out.codes + row * out.inputs();
  int32_t* start = out.start + row * out.groups;
  const bool all_zero = !(scheme.multiplier > 0);
  int64_t i = 0;
  for (int64_t group = 0; group < out.groups; ++group) {
    typename V::I sum = V::SetInt(0);
    for (const int64_t end = i + out.group_width; i < end; i += kBlockChannels) {
      if (all_zero || i >= n) {
        V::StoreCodes(codes + i, V::SetInt(0));
        continue;
      }
      const typename V::F value = V::Mul(LoadSome<V>(x + i, n - i), by);
      const typename V::F code = V::Add(V::Rint(V::Mul(value, multiplier)), zero);
      typename V::I whole = V::ToInt(V::Min(V::Max(code, smallest), largest));
      if (n - i < kBlockChannels) whole = V::KeepFirst(whole, static_cast<int>(n - i));
      V::StoreCodes(codes + i, whole);
      sum = V::AddInt(sum, whole);
    }
    start[group] = -kCodeOffset * V::Sum(sum);
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

// Weights of 4 inputs and two blocks.
template <class V>
struct WeightPair {
  typename V::W first, second;
};

// Reads packed nibbles, each once: right when one tile of rows is all there is.
template <class V>
struct PackedSource {
  const uint8_t* first;
  const uint8_t* second;

  inline void Next(WeightPair<V>* low, WeightPair<V>* high) {
    V::Unpack(first, &low->first, &high->first);
    V::Unpack(second, &low->second, &high->second);
    V::Prefetch(first + kPrefetchBytes);
    V::Prefetch(second + kPrefetchBytes);
    first += kRunBytes;
    second += kRunBytes;
  }

  static constexpr int kPrefetchBytes = 1024;
};

// Reads bytes that DecodePanel wrote: right when several tiles of rows use the same weights.
template <class V>
struct PanelSource {
  const uint8_t* next;

  inline void Next(WeightPair<V>* low, WeightPair<V>* high) {
    low->first = V::LoadWeights(next);
    low->second = V::LoadWeights(next + kRunBytes);
    high->first = V::LoadWeights(next + 2 * kRunBytes);
    high->second = V::LoadWeights(next + 3 * kRunBytes);
    next += 4 * kRunBytes;
  }
};

// What a class of vectors may do in a way of its own, by a specialisation: the order of a run's
// weights in a panel, and the products of a tile.
template <class V>
struct Products;

// Decodes inputs [begin, end) of two blocks.
template <class V>
static void DecodePanel(PackedSource<V> source, int64_t begin, int64_t end, uint8_t* panel) {
  source.first += begin * (kRunBytes / kRunInputs);
  source.second += begin * (kRunBytes / kRunInputs);
  for (int64_t k = begin; k < end; k += kRunInputs) {
    WeightPair<V> low, high;
    source.Next(&low, &high);
    Products<V>::StoreRun(low, high, panel);
    panel += 4 * kRunBytes;
  }
}

template <class V>
static inline typename V::F LoadScale(const void* scale, DType dtype, int64_t index) {
  if (dtype == DType::kBF16) return V::LoadBF16(static_cast<const uint16_t*>(scale) + index);
  return V::Load(static_cast<const float*>(scale) + index);
}

// What a tile of R rows and two blocks needs besides its weights' codes.
template <int R>
struct TileRows {
  const int8_t* codes[R];
  const int32_t* start[R];
  int64_t source[R];  // row numbers in the quantised rows
  int64_t target[R];  // row numbers in the result
  TileState* state;   // of the first row; used where a panel holds only part of the inputs
};

// Two blocks' worth of work: inputs [begin, end) of blocks `first` and `second`.
struct PairRange {
  int64_t first, second;
  int64_t begin, end;
};

// Adds the products of kChunkInputs inputs, from k on, to the sums of R rows and two blocks.
template <class V, int R, class Source, class Sum>
static JAX_W4A8_INLINE void AddChunk(Source& source, const TileRows<R>& rows, int64_t k,
                                     Sum (&sum)[R][2]) {
  JAX_W4A8_UNROLL
  for (int run = 0; run < kChunkInputs; run += kRunInputs) {
    WeightPair<V> low, high;
    source.Next(&low, &high);
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename V::B codes = V::Broadcast(rows.codes[r] + k + run);
      sum[r][0] = V::Dot(sum[r][0], low.first, codes);
      sum[r][1] = V::Dot(sum[r][1], low.second, codes);
    }
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename V::B codes = V::Broadcast(rows.codes[r] + k + run + 4);
      sum[r][0] = V::Dot(sum[r][0], high.first, codes);
      sum[r][1] = V::Dot(sum[r][1], high.second, codes);
    }
  }
}

// Adds inputs [range.begin, range.end) to the totals. What earlier ranges of the inputs left behind
// comes from rows.state, and what later ones need goes there.
//
// Registers, AVX-512: R = 6 takes 12 integer and 12 float accumulators, 4 weights, 2 broadcasts
// of 32. AVX2 has 16 registers for R = 3: 12 of 16-bit partial sums; the rest lives on the stack,
// touched once a chunk or a group.
template <class V, int R, DType kScale, class Source>
static inline void TileTotals(const MatmulArgs& args, Source source, const PairRange& range,
                              const TileRows<R>& rows, typename V::F (&total)[R][2]) {
  const int64_t groups = args.weights.groups, width = args.weights.group_width;
  JAX_W4A8_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < 2; ++n) {
      total[r][n] = range.begin == 0 ? V::Set(0) : V::Load(rows.state[r].total[n]);
    }
  }
  int64_t k = range.begin;
  for (int64_t group = k / width; k < range.end; ++group) {
    typename V::I sum[R][2];
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      if (k == group * width) {
        sum[r][0] = sum[r][1] = V::SetInt(rows.start[r][group]);
      } else {
        for (int n = 0; n < 2; ++n) sum[r][n] = V::LoadInt(rows.state[r].sum[n]);
      }
    }
    const int64_t group_end = (group + 1) * width;
    const int64_t end = group_end < range.end ? group_end : range.end;
    do {  // at least one chunk: a zero-trip path would cost copies of all accumulators
      if constexpr (V::kNarrowSums) {
        typename V::Partial part[R][2];
        JAX_W4A8_UNROLL
        for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = V::Begin();
        AddChunk<V, R>(source, rows, k, part);
        JAX_W4A8_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r][0] = V::Finish(sum[r][0], part[r][0]);
          sum[r][1] = V::Finish(sum[r][1], part[r][1]);
        }
      } else {
        AddChunk<V, R>(source, rows, k, sum);
      }
      k += kChunkInputs;
    } while (k < end);
    if (end < group_end) {
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < 2; ++n) V::StoreInt(rows.state[r].sum[n], sum[r][n]);
      }
      break;
    }
    const typename V::F scale[2] = {
        LoadScale<V>(args.weights.scale, kScale, (range.first * groups + group) * kBlockChannels),
        LoadScale<V>(args.weights.scale, kScale, (range.second * groups + group) * kBlockChannels)};
    JAX_W4A8_UNROLL
    for (int r = 0; r < R; ++r) {
      total[r][0] = V::Fma(V::ToFloat(sum[r][0]), scale[0], total[r][0]);
      total[r][1] = V::Fma(V::ToFloat(sum[r][1]), scale[1], total[r][1]);
    }
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

  template <int R, DType kScale, class Source>
  static inline void AddRange(const MatmulArgs& args, const Source& source, const PairRange& range,
                              const TileRows<R>& rows, typename V::F (&total)[R][2]) {
    TileTotals<V, R, kScale>(args, source, range, rows, total);
  }
};

// Result of one row and block: zero point, row scale and bias.
template <class V>
static inline typename V::F Finished(const MatmulArgs& args, typename V::F total, int64_t row,
                                     int64_t block) {
  const float* sum = args.weights.scaled_sum + block * kBlockChannels;
  const float* bias = args.weights.bias + block * kBlockChannels;
  total = V::Fma(V::Set(-args.rows.zero[row]), V::Load(sum), total);
  return V::Add(V::Mul(total, V::Set(args.rows.scale[row])), V::Load(bias));
}

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

// Finishes and stores the totals of R rows and two blocks.
template <class V, int R>
static inline void StoreTile(const MatmulArgs& args, const PairRange& range,
                             const TileRows<R>& rows, typename V::F (&total)[R][2]) {
  JAX_W4A8_UNROLL
  for (int r = 0; r < R; ++r) {
    const typename V::F a = Finished<V>(args, total[r][0], rows.source[r], range.first);
    const typename V::F b = Finished<V>(args, total[r][1], rows.source[r], range.second);
    const int64_t index = rows.target[r] * args.out_stride;
    if (args.activation) {
      const int64_t column = range.first / 2 * kBlockChannels;
      StoreAs<V>(args.out_dtype, args.out, index + column, Activate<V>(*args.activation, a, b),
                 args.out_columns - column);
      continue;
    }
    const int64_t column = range.first * kBlockChannels;
    StoreAs<V>(args.out_dtype, args.out, index + column, a, args.out_columns - column);
    if (range.second == range.first) continue;
    StoreAs<V>(args.out_dtype, args.out, index + column + kBlockChannels, b,
               args.out_columns - column - kBlockChannels);
  }
}

template <class V, int R, DType kScale, class Source>
static void Tile(const MatmulArgs& args, const Source& source, const PairRange& range,
                 int64_t first_row) {
  const QuantizedRows& q = args.rows;
  TileRows<R> rows;
  rows.state = args.state + first_row;
  for (int r = 0; r < R; ++r) {
    const int64_t row = first_row + r;
    rows.source[r] = args.row_index ? args.row_index[row] : row;
    rows.target[r] = args.out_index ? args.out_index[row] : row;
    rows.codes[r] = q.codes + rows.source[r] * q.inputs();
    rows.start[r] = q.start + rows.source[r] * q.groups;
  }
  typename V::F total[R][2];
  Products<V>::template AddRange<R, kScale>(args, source, range, rows, total);
  if (range.end == args.weights.inputs()) {
    StoreTile<V, R>(args, range, rows, total);
    return;
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < 2; ++n) V::Store(rows.state[r].total[n], total[r][n]);
  }
}

template <class V, int R, DType kScale, class Source>
static inline void DispatchTile(const MatmulArgs& args, const Source& source,
                                const PairRange& range, int64_t first_row, int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return DispatchTile<V, R - 1, kScale>(args, source, range, first_row, rows);
  }
  Tile<V, R, kScale>(args, source, range, first_row);
}

// All rows against a range of two blocks, in tiles of nearly equal height.
template <class V, DType kScale, class Source>
static void RowsOfPair(const MatmulArgs& args, const Source& source, const PairRange& range) {
  const int64_t tiles = (args.row_count + V::kTileRows - 1) / V::kTileRows;
  int64_t row = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t end = (tile + 1) * args.row_count / tiles;
    DispatchTile<V, V::kTileRows, kScale>(args, source, range, row, end - row);
    row = end;
  }
}

template <class V, DType kScale>
static void MatmulScaled(const MatmulArgs& args) {
  const PackedMatrix& w = args.weights;
  const int64_t inputs = w.inputs();
  for (int64_t block = args.block_begin; block < args.block_end; block += 2) {
    // A last odd block is computed twice and stored once.
    const int64_t second = block + 1 < w.blocks ? block + 1 : block;
    const int64_t bytes = static_cast<int64_t>(w.block_bytes());
    const PackedSource<V> source = {w.codes + block * bytes, w.codes + second * bytes};
    if (args.row_count <= V::kTileRows) {
      RowsOfPair<V, kScale>(args, source, PairRange{block, second, 0, inputs});
      continue;
    }
    for (int64_t begin = 0; begin < inputs; begin += kPanelInputs) {
      const int64_t end = begin + kPanelInputs < inputs ? begin + kPanelInputs : inputs;
      DecodePanel<V>(source, begin, end, args.panel);
      RowsOfPair<V, kScale>(args, PanelSource<V>{args.panel}, PairRange{block, second, begin, end});
    }
  }
}

template <class V>
static void Matmul(const MatmulArgs& args) {
  if (args.weights.scale_dtype == DType::kBF16) {
    MatmulScaled<V, DType::kBF16>(args);
  } else {
    MatmulScaled<V, DType::kF32>(args);
  }
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
      const void* from = data + offset + i * kRunBytes;
      sum[i] = V::AddInt(sum[i], V::LoadInt(static_cast<const int32_t*>(from)));
    }
  }
  for (int i = 0; i < 4; ++i) *sink += V::Sum(sum[i]);
}

template <class V>
static Kernels MakeKernels(const char* name) {
  return {name,    &ToFloat<V>, &QuantizeRow<V>, &Matmul<V>,
          nullptr, &Combine<V>, &PeakProbe<V>,   &ReadProbe<V>};
}
