// Softmax attention of a run of tokens over one key and value head, over vectors V as in
// algorithm-inl.h, which includes this file.
//
// Every score is one chain of fused multiply-adds over the head's width, every mixture one over the
// slots of a segment in ascending order, and segments are merged in ascending order. What is
// subtracted from scores (logarithms to base 2) is a whole number, so that rescaling is by powers
// of two. So a row's bits depend neither on the rows beside it nor on how the work is split.

template <class V>
constexpr int kAttendRows = V::kRegisters >= 32 ? 8 : 4;
template <class V>
constexpr int kAttendVectors = V::kRegisters >= 32 ? 2 : 1;
// Of a row that is mixed alone: as many sums as a tile has at least.
template <class V>
constexpr int kAloneVectors = V::kRegisters >= 32 ? 8 : 4;

constexpr float kLowestScore = -0x1p100f;
constexpr float kMaskedScore = -0x1p120f;

// 2^x for x up to 127; 0 below -126. NaN stays NaN.
template <class V>
static inline typename V::F Exp2(typename V::F x) {
  const typename V::F clamped = V::Max(V::Set(-126.0f), x);
  const typename V::F n = V::Rint(clamped);
  const typename V::F r = V::Sub(clamped, n);
  typename V::F p = V::Set(1.535336188319500e-4f);  // minimax of 2^r on [-1/2, 1/2]
  p = V::Fma(p, r, V::Set(1.339887440266574e-3f));
  p = V::Fma(p, r, V::Set(9.618437357674640e-3f));
  p = V::Fma(p, r, V::Set(5.550332471162809e-2f));
  p = V::Fma(p, r, V::Set(2.402264791363012e-1f));
  p = V::Fma(p, r, V::Set(6.931472028550421e-1f));
  p = V::Fma(p, r, V::Set(1.0f));
  return V::SelectNegative(V::Add(x, V::Set(126.0f)), V::Set(0), V::MulPow2(p, n));
}

// 2^(from - to) of whole numbers, from <= to.
static inline float Shrinkage(float from, float to) {
  const float n = from - to;
  return !(n >= -126.0f) ? 0.0f
                         : FloatOf(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

// What is known of a row after some slots: of the sum of powers, 16 parts.
struct AttendRow {
  float* mixed;
  float* total;
  float* highest;
};

static inline AttendRow RowOf(float* state, int64_t row, int64_t width) {
  float* begin = state + row * (width + kAttendRowExtra);
  return {begin, begin + width, begin + width + kBlockChannels};
}

template <class V>
static void StartRows(float* state, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const AttendRow r = RowOf(state, row, width);
    for (int64_t i = 0; i < width + kBlockChannels; i += kBlockChannels) {
      V::Store(r.mixed + i, V::Set(0));
    }
    *r.highest = kLowestScore;
  }
}

// Adds what later slots gave.
template <class V>
static void MergeRow(const AttendRow& into, const AttendRow& part, int64_t width) {
  const float highest = *part.highest > *into.highest ? *part.highest : *into.highest;
  const typename V::F keep = V::Set(Shrinkage(*into.highest, highest));
  const typename V::F take = V::Set(Shrinkage(*part.highest, highest));
  *into.highest = highest;
  for (int64_t i = 0; i < width + kBlockChannels; i += kBlockChannels) {  // the total lies behind
    const typename V::F kept = V::Mul(V::Load(into.mixed + i), keep);
    V::Store(into.mixed + i, V::Fma(V::Load(part.mixed + i), take, kept));
  }
}

static inline int64_t TokenOf(const AttendArgs& args, int64_t row) {
  return args.token_begin + row / args.group;
}

// Scaled queries of all tiles: [tile, input, row of the tile].
template <class V>
static void PackQueries(const AttendArgs& args) {
  constexpr int kRows = kAttendRows<V>;
  const int64_t rows = (args.token_end - args.token_begin) * args.group;
  for (int64_t tile = 0; tile < rows; tile += kRows) {
    float* out = args.packed_queries + tile * args.dim;
    for (int row = 0; row < kRows; ++row) {
      const int64_t place = tile + row < rows ? tile + row : rows - 1;
      const float* query =
          args.queries + TokenOf(args, place) * args.query_stride + place % args.group * args.dim;
      for (int64_t i = 0; i < args.dim; ++i) out[i * kRows + row] = query[i] * args.scale;
    }
  }
}

// Asks for floats that will be read soon, in the order in which they lie.
template <class V>
static inline void PrefetchFloats(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kBlockChannels) {
    V::Prefetch(reinterpret_cast<const uint8_t*>(x + i));
  }
}

// Keys of a segment's slots: [step, input, slot of the step]. In the cache an input's slots lie
// together: reads are long, and few of them a multiple of 4096 bytes apart at once.
template <class V>
static void PackKeys(const AttendArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4;
  for (int64_t i = 0; i < args.dim; ++i) {
    const float* from = args.keys + i * args.slots;
    if (i + kAhead < args.dim) PrefetchFloats<V>(from + kAhead * args.slots + begin, end - begin);
    for (int64_t slot = begin; slot < end; slot += kAttendStep) {
      float* to = args.packed_keys + (slot - begin) * args.dim + i * kAttendStep;
      JAX_W4A8_UNROLL
      for (int j = 0; j < kAttendStep; j += kBlockChannels) {
        V::Store(to + j, V::Load(from + slot + j));
      }
    }
  }
}

// scores[row][slot of the step], of one tile.
template <class V>
static void ScoreTile(const float* queries, const float* keys, int64_t dim, float* scores) {
  constexpr int kRows = kAttendRows<V>, kVectors = kAttendVectors<V>;
  for (int column = 0; column < kAttendStep; column += kVectors * kBlockChannels) {
    typename V::F sum[kRows][kVectors];
    JAX_W4A8_UNROLL
    for (int row = 0; row < kRows; ++row) {
      JAX_W4A8_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[row][v] = V::Set(0);
    }
    for (int64_t i = 0; i < dim; ++i) {
      typename V::F key[kVectors];
      JAX_W4A8_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        key[v] = V::Load(keys + i * kAttendStep + column + v * kBlockChannels);
      }
      JAX_W4A8_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const typename V::F query = V::Set(queries[i * kRows + row]);
        JAX_W4A8_UNROLL
        for (int v = 0; v < kVectors; ++v) sum[row][v] = V::Fma(query, key[v], sum[row][v]);
      }
    }
    JAX_W4A8_UNROLL
    for (int row = 0; row < kRows; ++row) {
      JAX_W4A8_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        V::Store(scores + row * kAttendStep + column + v * kBlockChannels, sum[row][v]);
      }
    }
  }
}

// Which slots of a step a token at `position` sees: [first, last), counted from `slot`.
struct Visible {
  int64_t first;
  int64_t last;
};

static inline Visible VisibleSlots(const AttendArgs& args, int64_t token, int64_t slot) {
  const int64_t position = args.start + token;
  const int64_t from = args.window > 0 ? position - args.window + 1 - slot : 0;
  const int64_t first = from < 0 ? 0 : from > kAttendStep ? kAttendStep : from;
  const int64_t to = position + 1 - slot;
  return {first, to < first ? first : to > kAttendStep ? kAttendStep : to};
}

// Makes the visible ones of a row's scores powers of two below its highest score, and zeros of the
// others; returns by how much what was there shrinks.
template <class V>
static float PowersOfRow(float* scores, const Visible& visible, const AttendRow& row) {
  for (int64_t i = 0; i < visible.first; ++i) scores[i] = kMaskedScore;
  for (int64_t i = visible.last; i < kAttendStep; ++i) scores[i] = kMaskedScore;
  typename V::F most = V::Set(*row.highest);
  for (int i = 0; i < kAttendStep; i += kBlockChannels) {
    most = V::Max(V::Load(scores + i), most);  // a NaN hides no other score
  }
  // A NaN, which makes the row's result NaN whatever this is, is no highest score.
  const float found = V::Largest(V::Rint(most));
  const float highest = found > *row.highest ? found : *row.highest;
  const float shrinkage = Shrinkage(*row.highest, highest);
  *row.highest = highest;
  typename V::F sum = V::Mul(V::Load(row.total), V::Set(shrinkage));
  for (int i = 0; i < kAttendStep; i += kBlockChannels) {
    const typename V::F power = Exp2<V>(V::Sub(V::Load(scores + i), V::Set(highest)));
    V::Store(scores + i, power);
    sum = V::Add(sum, power);
  }
  V::Store(row.total, sum);
  return shrinkage;
}

// Adds weighted values of some of a step's slots to `kVectors` vectors of the mixtures of `kRows`
// rows.
template <class V, int kRows, int kVectors>
static inline void MixColumns(const float* weights, const float* values, const Visible& slots,
                              int64_t width, const float* shrinkage, float* mixed) {
  const int64_t stride = width + kAttendRowExtra;
  typename V::F sum[kRows][kVectors];
  JAX_W4A8_UNROLL
  for (int row = 0; row < kRows; ++row) {
    JAX_W4A8_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sum[row][v] =
          V::Mul(V::Load(mixed + row * stride + v * kBlockChannels), V::Set(shrinkage[row]));
    }
  }
  for (int64_t slot = slots.first; slot < slots.last; ++slot) {
    typename V::F value[kVectors];
    JAX_W4A8_UNROLL
    for (int v = 0; v < kVectors; ++v)
      value[v] = V::Load(values + slot * width + v * kBlockChannels);
    JAX_W4A8_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const typename V::F weight = V::Set(weights[row * kAttendStep + slot]);
      JAX_W4A8_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[row][v] = V::Fma(weight, value[v], sum[row][v]);
    }
  }
  JAX_W4A8_UNROLL
  for (int row = 0; row < kRows; ++row) {
    JAX_W4A8_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      V::Store(mixed + row * stride + v * kBlockChannels, sum[row][v]);
    }
  }
}

// The same for all columns of `kRows` rows from `row` on.
template <class V, int kRows, int kVectors>
static void MixRows(const AttendArgs& args, const float* values, const Visible& slots,
                    int64_t row) {
  const float* weights = args.scores + row * kAttendStep;
  const float* shrinkage = args.shrinkage + row;
  const int64_t width = args.width;
  float* mixed = RowOf(args.part, row, width).mixed;
  int64_t column = 0;
  for (; column + kVectors * kBlockChannels <= width; column += kVectors * kBlockChannels) {
    MixColumns<V, kRows, kVectors>(weights, values + column, slots, width, shrinkage,
                                   mixed + column);
  }
  for (; column < width; column += kBlockChannels) {
    MixColumns<V, kRows, 1>(weights, values + column, slots, width, shrinkage, mixed + column);
  }
}

// What the rows [begin, end) of a tile see of a step. Later tokens see later slots.
struct TileSight {
  Visible first;  // the first row
  Visible last;   // the last row

  TileSight(const AttendArgs& args, int64_t begin, int64_t end, int64_t slot)
      : first(VisibleSlots(args, TokenOf(args, begin), slot)),
        last(VisibleSlots(args, TokenOf(args, end - 1), slot)) {}

  bool nothing() const { return last.last <= 0 || first.first >= kAttendStep; }
};

// Mixes the slots [from, to) of a step into those of a tile's rows that see them, row by row.
template <class V>
static void MixAlone(const AttendArgs& args, const float* values, int64_t begin, int64_t end,
                     int64_t slot, int64_t from, int64_t to) {
  if (from >= to) return;
  for (int64_t row = begin; row < end; ++row) {
    Visible own = VisibleSlots(args, TokenOf(args, row), slot);
    own.first = own.first > from ? own.first : from;
    own.last = own.last < to ? own.last : to;
    if (own.first >= own.last) continue;
    MixRows<V, 1, kAloneVectors<V>>(args, values, own, row);
    args.shrinkage[row] = 1.0f;  // it is done
  }
}

// Slots that a row doesn't see take no part in its mixture, not even with weight 0: what they hold
// may be infinite. So rows meet together what all of them see.
template <class V>
static void MixTile(const AttendArgs& args, const float* values, int64_t begin, int64_t end,
                    int64_t slot) {
  constexpr int kRows = kAttendRows<V>;
  const TileSight sight(args, begin, end, slot);
  if (sight.nothing()) return;
  const Visible common = {sight.last.first, sight.first.last};
  MixAlone<V>(args, values, begin, end, slot, sight.first.first, common.first);
  if (common.first < common.last) {
    MixRows<V, kRows, kAttendVectors<V>>(args, values, common, begin);
    for (int row = 0; row < kRows; ++row) args.shrinkage[begin + row] = 1.0f;
  }
  MixAlone<V>(args, values, begin, end, slot,
              common.first > common.last ? common.first : common.last, sight.last.last);
}

// All rows meet the slots [slot, slot + kAttendStep): first their keys, then their values, of which
// each fits the first-level cache.
template <class V>
static void AttendStep(const AttendArgs& args, int64_t slot, const float* keys) {
  constexpr int kRows = kAttendRows<V>;
  const int64_t rows = (args.token_end - args.token_begin) * args.group;
  const float* values = args.values + slot * args.width;
  PrefetchFloats<V>(values, kAttendStep * args.width);
  for (int64_t tile = 0; tile < rows; tile += kRows) {
    const int64_t end = tile + kRows < rows ? tile + kRows : rows;
    if (TileSight(args, tile, end, slot).nothing()) continue;
    float* scores = args.scores + tile * kAttendStep;
    ScoreTile<V>(args.packed_queries + tile * args.dim, keys, args.dim, scores);
    for (int row = 0; row < kRows; ++row) {
      const int64_t place = tile + row < end ? tile + row : end - 1;
      args.shrinkage[tile + row] =
          PowersOfRow<V>(scores + row * kAttendStep, VisibleSlots(args, TokenOf(args, place), slot),
                         RowOf(args.part, tile + row, args.width));
    }
  }
  for (int64_t tile = 0; tile < rows; tile += kRows) {
    MixTile<V>(args, values, tile, tile + kRows < rows ? tile + kRows : rows, slot);
  }
}

template <class V>
static void Attend(const AttendArgs& args) {
  const int64_t rows = (args.token_end - args.token_begin) * args.group;
  const int64_t padded = (rows + kAttendRows<V> - 1) / kAttendRows<V> * kAttendRows<V>;
  PackQueries<V>(args);
  StartRows<V>(args.state, rows, args.width);
  for (int64_t begin = args.slot_begin; begin < args.slot_end; begin += kAttendSegment) {
    const int64_t end =
        begin + kAttendSegment < args.slot_end ? begin + kAttendSegment : args.slot_end;
    PackKeys<V>(args, begin, end);
    StartRows<V>(args.part, padded, args.width);
    for (int64_t slot = begin; slot < end; slot += kAttendStep) {
      AttendStep<V>(args, slot, args.packed_keys + (slot - begin) * args.dim);
    }
    for (int64_t row = 0; row < rows; ++row) {
      MergeRow<V>(RowOf(args.state, row, args.width), RowOf(args.part, row, args.width),
                  args.width);
    }
  }
}

template <class V>
static void FinishAttention(float* states, int64_t count, int64_t stride, int64_t width,
                            const float* sink, float* out) {
  const AttendRow row = RowOf(states, 0, width);
  for (int64_t i = 1; i < count; ++i) MergeRow<V>(row, RowOf(states + i * stride, 0, width), width);
  float total = 0, lanes[kBlockChannels];
  for (int i = 0; i < kBlockChannels; ++i) total += row.total[i];
  float share = 1.0f;
  if (sink) {
    const float score = *sink * 0x1.715476p+0f, whole = rintf(score);
    const float highest = whole > *row.highest ? whole : *row.highest;
    V::Store(lanes, Exp2<V>(V::Set(score - highest)));
    share = Shrinkage(*row.highest, highest);
    total = total * share + lanes[0];
  }
  // Only a row that saw nothing has a total of 0.
  const typename V::F factor = V::Set(total == 0 ? 0.0f : share / total);
  // The sign of a zero depends on how work was split, and on slots that others see: + 0 ends that.
  for (int64_t i = 0; i < width; i += kBlockChannels) {
    V::Store(out + i, V::Fma(V::Load(row.mixed + i), factor, V::Set(0)));
  }
}
