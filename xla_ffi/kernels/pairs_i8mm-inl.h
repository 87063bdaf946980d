// The product (rule 3) by `smmla`: two rows x 8 inputs by two channels x 8 inputs, 32 products to
// an instruction. Sums of codes are exact, and what follows them is the same arithmetic in the same
// order as in algorithm-inl.h, which comes first.
//
// All that a tile keeps has the shape of what the instruction adds to: of two rows, channels 2i and
// 2i + 1 of the first, then those of the second. Three pairs of rows and one block at a time make
// 24 sums, which with the rows' codes and a few weights fill the 32 registers.

struct NeonI8mm : NeonDotprod {
  static constexpr int kTileRows = 6;
};

struct RowPairs {
  // Weights of a run and four channels of a block in the instruction's order.
  struct Weights {
    int8x16_t part[2];
  };
  static constexpr int kParts = kBlockChannels / 2;

  // Parts 2i and 2i + 1 of quarter i of two rows, and back.
  static inline int32x4_t Part(int part, int32x4_t first, int32x4_t second) {
    const int64x2_t a = vreinterpretq_s64_s32(first), b = vreinterpretq_s64_s32(second);
    return vreinterpretq_s32_s64(part % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
  }
  static inline float32x4_t Part(int part, float32x4_t first, float32x4_t second) {
    return vreinterpretq_f32_s32(
        Part(part, vreinterpretq_s32_f32(first), vreinterpretq_s32_f32(second)));
  }

  // From four bytes of low and of high nibbles each to eight of one channel.
  static inline Weights Join(int8x16_t low, int8x16_t high) {
    const int32x4_t a = vreinterpretq_s32_s8(low), b = vreinterpretq_s32_s8(high);
    return {{vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))}};
  }

  // The run of block n at `offset` inputs from where the source begins, and weights of its
  // channels.
  template <DType kScale>
  static inline const uint8_t* Run(const PackedSource<NeonI8mm, kScale>& source, int64_t offset,
                                   int n) {
    const uint8_t* run = source.codes[n] + offset * (kRunBytes / kRunInputs);
    NeonI8mm::Prefetch(run + source.ahead);
    return run;
  }
  static inline const uint8_t* Run(const PanelSource<NeonI8mm>& source, int64_t offset, int n) {
    if (n == 0) NeonI8mm::Prefetch(source.ahead + offset / kRunInputs * source.ahead_step);
    return source.next + offset * (4 * kRunBytes / kRunInputs) + n * 2 * kRunBytes;
  }
  template <DType kScale>
  static inline Weights Load(const PackedSource<NeonI8mm, kScale>&, const uint8_t* run,
                             int quarter) {
    const uint8x16_t bytes = vld1q_u8(run + 16 * quarter);
    return Join(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))),
                vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)));
  }
  static inline Weights Load(const PanelSource<NeonI8mm>&, const uint8_t* run, int quarter) {
    const int8_t* from = reinterpret_cast<const int8_t*>(run) + 32 * quarter;
    return {{vld1q_s8(from), vld1q_s8(from + 16)}};
  }
  // Of a run of one block, as Load reads it.
  static inline void Store(const NeonI8mm::W& low, const NeonI8mm::W& high, uint8_t* run) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const Weights weights = Join(low.quarter[quarter], high.quarter[quarter]);
      for (int i = 0; i < 2; ++i) {
        vst1q_s8(reinterpret_cast<int8_t*>(run) + 32 * quarter + 16 * i, weights.part[i]);
      }
    }
  }
};

// The totals of a tile of R rows, an odd last one of which is taken twice, over a range.
template <int R>
class PairTile {
 public:
  PairTile(const MatmulArgs& args, const PairRange& range, int64_t row)
      : width_(args.weights.group_width),
        codes_(args.row_tiles + row * args.weights.inputs() + range.begin * R),
        starts_(args.row_starts + (row * args.weights.groups + range.group * R)),
        state_(args.state + row),
        range_(range) {
    for (int n = 0; n < 2; ++n) {
      for (int p = 0; p < kPairs; ++p) {
        for (int i = 0; i < RowPairs::kParts; ++i) {
          const int quarter = i / 2 * 4;
          total_[n][p][i] = range.begin == 0
                                ? vdupq_n_f32(0)
                                : RowPairs::Part(i, vld1q_f32(state_[First(p)].total[n] + quarter),
                                                 vld1q_f32(state_[Second(p)].total[n] + quarter));
        }
      }
    }
  }

  // Adds inputs [k, end) of one group and block n; they end the group or the range.
  template <class Source>
  inline void AddGroup(Source& source, int64_t group, int64_t k, int64_t end, int n) {
    int32x4_t sum[kPairs][RowPairs::kParts];
    Begin(k == group * width_, group, n, sum);
    do {
      const int64_t offset = k - range_.begin;
      JAX_W4A8_UNROLL
      for (int run = 0; run < kChunkInputs; run += kRunInputs) {
        AddRun(source, RowPairs::Run(source, offset + run, n), codes_ + offset * R + run, sum);
      }
      k += kChunkInputs;
    } while (k < end);
    if (end < (group + 1) * width_) return Keep(n, sum);
    const NeonI8mm::F scale = source.NextScale(n);
    JAX_W4A8_UNROLL
    for (int i = 0; i < RowPairs::kParts; ++i) {
      const float32x4_t both = RowPairs::Part(i, scale.quarter[i / 2], scale.quarter[i / 2]);
      JAX_W4A8_UNROLL
      for (int p = 0; p < kPairs; ++p) {
        total_[n][p][i] = vfmaq_f32(total_[n][p][i], vcvtq_f32_s32(sum[p][i]), both);
      }
    }
  }

  void Store() const {
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < 4; ++i) {
          const float32x4_t* parts = total_[n][r / 2] + 2 * i;
          vst1q_f32(state_[r].total[n] + 4 * i, RowPairs::Part(r, parts[0], parts[1]));
        }
      }
    }
  }

 private:
  static constexpr int kPairs = (R + 1) / 2;
  static constexpr int First(int pair) { return 2 * pair; }
  static constexpr int Second(int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; }

  // Sums at the start of a group, or as the range before left them.
  inline void Begin(bool at_start, int64_t group, int n,
                    int32x4_t (&sum)[kPairs][RowPairs::kParts]) const {
    const int32_t* start = starts_ + (group - range_.group) * R;
    JAX_W4A8_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      if (at_start) {
        const int32x4_t both =
            vcombine_s32(vdup_n_s32(start[First(p)]), vdup_n_s32(start[Second(p)]));
        for (int i = 0; i < RowPairs::kParts; ++i) sum[p][i] = both;
        continue;
      }
      for (int i = 0; i < RowPairs::kParts; ++i) {
        const int quarter = i / 2 * 4;
        sum[p][i] = RowPairs::Part(i, vld1q_s32(state_[First(p)].sum[n] + quarter),
                                   vld1q_s32(state_[Second(p)].sum[n] + quarter));
      }
    }
  }

  // Adds the products of a run's weights with the rows' codes at `rows`.
  template <class Source>
  static JAX_W4A8_INLINE void AddRun(const Source& source, const uint8_t* run, const int8_t* rows,
                                     int32x4_t (&sum)[kPairs][RowPairs::kParts]) {
    int8x16_t codes[kPairs];
    JAX_W4A8_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      codes[p] = vcombine_s8(vld1_s8(rows + First(p) * kChunkInputs),
                             vld1_s8(rows + Second(p) * kChunkInputs));
    }
    JAX_W4A8_UNROLL
    for (int quarter = 0; quarter < 4; ++quarter) {
      const RowPairs::Weights weights = RowPairs::Load(source, run, quarter);
      JAX_W4A8_UNROLL
      for (int i = 0; i < 2; ++i) {
        JAX_W4A8_UNROLL
        for (int p = 0; p < kPairs; ++p) {
          int32x4_t& part = sum[p][2 * quarter + i];
          part = vmmlaq_s32(part, codes[p], weights.part[i]);
        }
      }
    }
  }

  // Leaves sums to the range that comes next.
  inline void Keep(int n, const int32x4_t (&sum)[kPairs][RowPairs::kParts]) const {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) {
        const int32x4_t* parts = sum[r / 2] + 2 * i;
        vst1q_s32(state_[r].sum[n] + 4 * i, RowPairs::Part(r, parts[0], parts[1]));
      }
    }
  }

  const int64_t width_;
  const int8_t* codes_;    // of the range's first input
  const int32_t* starts_;  // of its first group
  TileState* state_;
  const PairRange& range_;
  float32x4_t total_[2][kPairs][RowPairs::kParts];
};

template <>
struct Products<NeonI8mm> {
  static inline void StoreRun(const WeightPair<NeonI8mm>& low, const WeightPair<NeonI8mm>& high,
                              uint8_t* panel) {
    RowPairs::Store(low.first, high.first, panel);
    RowPairs::Store(low.second, high.second, panel + 2 * kRunBytes);
  }

  template <int R, class Source>
  static inline void AddRange(const MatmulArgs& args, Source source, const PairRange& range,
                              int64_t row) {
    // A row alone has no use for pairs, and its weights needn't be put in their order.
    if constexpr (R == 1 && Source::kInPackedOrder) {
      return AddVectors<NeonI8mm, 1>(args, source, range, row);
    }
    PairTile<R> tile(args, range, row);
    const int64_t width = args.weights.group_width;
    for (int64_t group = range.group; group * width < range.end; ++group) {
      const int64_t from = group * width, to = from + width;
      const int64_t begin = from > range.begin ? from : range.begin;
      const int64_t end = to < range.end ? to : range.end;
      for (int n = 0; n < 2; ++n) tile.AddGroup(source, group, begin, end, n);
    }
    tile.Store();
  }

  // Pairs take one block after the other, so both are decoded before.
  template <int R, DType kScale>
  static inline void AddRange(const MatmulArgs& args, DecodingSource<NeonI8mm, kScale> source,
                              const PairRange& range, int64_t row) {
    const PanelSource<NeonI8mm> decoded = {source.panel, source.scales, source.panel, 0};
    WeightPair<NeonI8mm> low, high;
    for (int64_t k = range.begin; k < range.end; k += kRunInputs) source.Next(&low, &high);
    const int64_t width = args.weights.group_width;
    for (int64_t group = range.group; group * width < range.end; ++group) {
      for (int n = 0; n < 2; ++n) source.NextScale(n);
    }
    AddRange<R>(args, decoded, range, row);
  }
};

// As PeakProbe, with `smmla`.
static int64_t PairPeakProbe(int64_t iterations, int32_t* sink) {
  constexpr int kChains = 16;
  int8_t bytes[16 * (kChains + 1)];
  for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = static_cast<int8_t>((i + *sink) & 7);
  int32x4_t sum[kChains];
  JAX_W4A8_UNROLL
  for (int chain = 0; chain < kChains; ++chain) sum[chain] = vdupq_n_s32(*sink);
  const int8x16_t weights = vld1q_s8(bytes);
  for (int64_t i = 0; i < iterations; ++i) {
    const volatile int64_t offset = 0;  // read anew in each iteration, so that no product is kept
    const int8_t* codes = bytes + 16 + offset;
    JAX_W4A8_UNROLL
    for (int chain = 0; chain < kChains; ++chain) {
      sum[chain] = vmmlaq_s32(sum[chain], vld1q_s8(codes + 16 * chain), weights);
    }
  }
  int32_t total = 0;
  JAX_W4A8_UNROLL
  for (int chain = 0; chain < kChains; ++chain) total += vaddvq_s32(sum[chain]);
  *sink = total;
  return iterations * kChains * 32;
}

static constexpr Kernels MakePairKernels(const char* name) {
  Kernels kernels = MakeKernels<NeonI8mm>(name);
  kernels.peak_probe = &PairPeakProbe;
  return kernels;
}
