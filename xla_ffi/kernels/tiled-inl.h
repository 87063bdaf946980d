// The product (rule 3) on tile registers, over a class X of tile operations and the vectors V of
// algorithm-inl.h, which comes first. Sums of codes are exact, and what follows them is the same
// arithmetic in the same order, so results are the same bits.

// How the rows of a call are cut: `bands` of `rows` each, the last filled up with zeros, in
// products of `step` inputs.
struct BandShape {
  int64_t bands;
  int64_t rows;
  int64_t step;
};

template <class X>
static inline BandShape ShapeOf(const MatmulArgs& args) {
  const int64_t bands = (args.row_count + X::kMostRows - 1) / X::kMostRows;
  // A group that isn't made of whole products of 64 takes products of 32.
  const int64_t step = args.weights.group_width % 64 == 0 ? 64 : 32;
  return {bands, (args.row_count + bands - 1) / bands, step};
}

// With fewer rows, vectors are faster: tiles' sums pass through memory once for every group.
template <class X>
static inline bool WorthTiles(const MatmulArgs& args) {
  return args.row_count >=
         (args.weights.group_width < 64 ? X::kFewestRowsOfSmallGroups : X::kFewestRows);
}

template <int kStep>
static inline void CopySteps(const int8_t* from, int64_t inputs, int8_t* to, int64_t stride) {
  for (int64_t k = 0; k < inputs; k += kStep, to += stride) memcpy(to, from + k, kStep);
}

// Copies rows into args.row_tiles as [bands][inputs / step][rows][step]: a tile register's rows lie
// side by side, whatever rows they are.
template <class V, class X>
static void ArrangeRows(const MatmulArgs& args) {
  if (!WorthTiles<X>(args)) return ArrangeTiles<V>(args);
  const BandShape shape = ShapeOf<X>(args);
  const int64_t inputs = args.weights.inputs(), stride = shape.rows * shape.step;
  for (int64_t row = 0; row < shape.bands * shape.rows; ++row) {
    int8_t* to =
        args.row_tiles + row / shape.rows * shape.rows * inputs + row % shape.rows * shape.step;
    if (row >= args.row_count) {
      for (int64_t k = 0; k < inputs; k += shape.step, to += stride) memset(to, 0, shape.step);
      continue;
    }
    const int8_t* from = args.rows.codes + SourceRow(args, row) * inputs;
    if (shape.step == 64) {
      CopySteps<64>(from, inputs, to, stride);
    } else {
      CopySteps<32>(from, inputs, to, stride);
    }
  }
}

// Decodes the panel that comes next, a little at a time between the products of the one in use:
// they keep the tile unit busy, not the ports that decoding needs.
template <class V, class X>
class PanelDecoder {
 public:
  // Of a range of w, in `steps` nearly equal steps, while the codes of the range `following` are
  // fetched.
  void Start(const PackedMatrix& w, const PairRange& range, const PairRange& following,
             int64_t steps, uint8_t* panel) {
    from_[0] = CodesAt(w, range.first, range.begin);
    from_[1] = CodesAt(w, range.second, range.begin);
    ahead_[0] = CodesAt(w, following.first, following.begin) - from_[0];
    ahead_[1] = CodesAt(w, following.second, following.begin) - from_[1];
    panel_ = panel;
    end_ = (range.end - range.begin) * kRunBytes / kRunInputs;
    offset_ = 0;
    piece_ = (end_ / kRunBytes + steps - 1) / steps * kRunBytes;
  }

  // Until it is started anew, nothing is decoded.
  void Stop() { offset_ = end_ = 0; }

  inline void Step() {
    const int64_t end = offset_ + piece_ < end_ ? offset_ + piece_ : end_;
    const uint8_t* first = from_[0];
    const uint8_t* second = from_[1];
    uint8_t* panel = panel_;
    int64_t offset = offset_;
    offset_ = end;
    for (; offset < end; offset += kRunBytes) {
      X::Decode(first + offset, panel + 2 * offset);
      X::Decode(second + offset, panel + kPanelBytes / 2 + 2 * offset);
      V::Prefetch(first + offset + ahead_[0]);
      V::Prefetch(second + offset + ahead_[1]);
    }
  }

  void Finish() {
    piece_ = end_;
    Step();
    X::Fence();
  }

 private:
  const uint8_t* from_[2] = {};
  int64_t ahead_[2] = {};  // from codes that are decoded to those that are fetched
  uint8_t* panel_ = nullptr;
  int64_t end_ = 0, offset_ = 0, piece_ = 0;
};

// A band's sums with two blocks, as tile registers store them.
struct alignas(64) TileSums {
  int32_t sum[2][16][kBlockChannels];  // [block][row]
};

// Products of a panel's bands with its two blocks, group after group. A group takes one slot of
// tile registers, the next one the other. While one group's products run, the sums of the group
// before leave their registers, and those of the group before that, which are in memory by now, are
// added to the totals: tile registers can't be filled anew before they were stored, and what they
// store comes back slowly.
template <class V, class X, DType kScale>
class GroupPipeline {
 public:
  GroupPipeline(const MatmulArgs& args, const BandShape& shape) : args_(args), shape_(shape) {}

  inline void RunPanel(const PairRange& range, const uint8_t* panel, PanelDecoder<V, X>* decoder) {
    range_ = range;
    panel_ = panel;
    decoder_ = decoder;
    const int64_t width = args_.weights.group_width;
    for (int64_t band = 0; band < shape_.bands; ++band) {
      state_ = args_.state + band * X::kMostRows;
      rows_ = args_.row_tiles + (band * args_.weights.inputs() + range.begin) * shape_.rows;
      for (int64_t group = range.begin / width; group * width < range.end; ++group) {
        if (slot_ == 0) {
          RunGroup<0>(group);
        } else {
          RunGroup<1>(group);
        }
      }
    }
    // The registers are settled after one more turn, memory after two.
    Settle();
    Settle();
  }

 private:
  // A finished group on its way to the totals.
  struct Group {
    TileState* state = nullptr;  // of its first row; null: there is none
    int64_t number = 0;
  };

  template <int kSlot>
  inline void RunGroup(int64_t group) {
    const int64_t width = args_.weights.group_width;
    const int64_t from = group * width, to = from + width;
    const int64_t begin = from > range_.begin ? from : range_.begin;
    const int64_t end = to < range_.end ? to : range_.end;
    if (begin == from) {
      X::template ZeroSum<kSlot, 0>();
      X::template ZeroSum<kSlot, 1>();
    } else {  // it goes on from the panel before
      X::template LoadSum<kSlot, 0>(state_->sum[0], sizeof(TileState));
      X::template LoadSum<kSlot, 1>(state_->sum[1], sizeof(TileState));
    }
    for (int64_t k = begin - range_.begin; k < end - range_.begin; k += shape_.step) {
      const uint8_t* weights = panel_ + k * kBlockChannels;
      X::template LoadRows<kSlot>(rows_ + k * shape_.rows, shape_.step);
      X::template LoadWeights<0>(weights);
      X::template Dot<kSlot, 0>();
      X::template LoadWeights<1>(weights + kPanelBytes / 2);
      X::template Dot<kSlot, 1>();
      decoder_->Step();
    }
    if (end < to) {
      X::template StoreSum<kSlot, 0>(state_->sum[0], sizeof(TileState));
      X::template StoreSum<kSlot, 1>(state_->sum[1], sizeof(TileState));
      return;
    }
    Turn<kSlot>({state_, group});
  }

  // `finished` is in slot kSlot.
  template <int kSlot>
  inline void Turn(const Group& finished) {
    constexpr int64_t kStride = kBlockChannels * sizeof(int32_t);
    if (in_tiles_.state) {
      X::template StoreSum<1 - kSlot, 0>(sums_[1 - kSlot].sum[0][0], kStride);
      X::template StoreSum<1 - kSlot, 1>(sums_[1 - kSlot].sum[1][0], kStride);
    }
    if (in_memory_.state) AddToTotals(in_memory_, sums_[kSlot]);
    in_memory_ = in_tiles_;
    in_tiles_ = finished;
    slot_ = 1 - kSlot;
  }

  void Settle() {
    if (slot_ == 0) {
      Turn<0>({});
    } else {
      Turn<1>({});
    }
  }

  // Of all rows that a band can have: a fixed number of steps costs less than the right one.
  static inline void AddBlock(const TileSums& sums, int n, typename V::F scale, bool first,
                              TileState* state) {
    JAX_W4A8_UNROLL
    for (int r = 0; r < X::kMostRows; ++r) {
      float* total = state[r].total[n];
      const typename V::F before = first ? V::Set(0) : V::Load(total);
      V::Store(total, V::Fma(V::ToFloat(V::LoadInt(sums.sum[n][r])), scale, before));
    }
  }

  inline void AddToTotals(const Group& group, const TileSums& sums) {
    const int64_t index[2] = {range_.first * args_.weights.groups + group.number,
                              range_.second * args_.weights.groups + group.number};
    const typename V::F scale[2] = {
        LoadScale<V>(args_.weights.scale, kScale, index[0] * kBlockChannels),
        LoadScale<V>(args_.weights.scale, kScale, index[1] * kBlockChannels)};
    TileState* state = group.state;
    if (group.number == 0) {
      AddBlock(sums, 0, scale[0], true, state);
      AddBlock(sums, 1, scale[1], true, state);
    } else {
      AddBlock(sums, 0, scale[0], false, state);
      AddBlock(sums, 1, scale[1], false, state);
    }
  }

  const MatmulArgs& args_;
  const BandShape& shape_;
  PairRange range_ = {};
  const uint8_t* panel_ = nullptr;
  PanelDecoder<V, X>* decoder_ = nullptr;
  TileState* state_ = nullptr;    // of the band
  const int8_t* rows_ = nullptr;  // of the band, from the panel's first input on
  int slot_ = 0;
  Group in_tiles_, in_memory_;
  TileSums sums_[2] = {};
};

// Finishes and stores what the totals hold.
template <class V, class X>
static inline void StoreTotals(const MatmulArgs& args, const BandShape& shape,
                               const PairRange& range) {
  for (int64_t band = 0, row = 0; band < shape.bands; ++band, row += shape.rows) {
    const int64_t left = args.row_count - row;
    StoreRows<V>(args, range, row, left < shape.rows ? left : shape.rows,
                 args.state + band * X::kMostRows);
  }
}

template <class V, class X>
static inline void StartDecoding(const MatmulArgs& args, PanelCursor cursor, int64_t steps,
                                 uint8_t* panel, PanelDecoder<V, X>* decoder) {
  if (cursor.AtEnd(args)) return decoder->Stop();
  const PairRange range = cursor.Range(args.weights);
  cursor.Advance(args.weights);
  const PairRange following = cursor.AtEnd(args) ? range : cursor.Range(args.weights);
  decoder->Start(args.weights, range, following, steps, panel);
}

template <class V, class X, DType kScale>
static void MatmulOnTiles(const MatmulArgs& args) {
  const PackedMatrix& w = args.weights;
  const BandShape shape = ShapeOf<X>(args);
  X::Configure(static_cast<int>(shape.rows), static_cast<int>(shape.step));
  uint8_t* panel = args.panel;
  uint8_t* next_panel = args.panel + kPanelBytes;
  PanelDecoder<V, X> decoder;
  GroupPipeline<V, X, kScale> pipeline(args, shape);
  PanelCursor cursor = {args.block_begin, 0};
  StartDecoding(args, cursor, 1, panel, &decoder);
  while (!cursor.AtEnd(args)) {
    decoder.Finish();
    const PairRange range = cursor.Range(w);
    cursor.Advance(w);
    const int64_t steps = (range.end - range.begin) / shape.step * shape.bands;
    StartDecoding(args, cursor, steps, next_panel, &decoder);
    pipeline.RunPanel(range, panel, &decoder);
    if (range.end == w.inputs()) StoreTotals<V, X>(args, shape, range);
    uint8_t* used = panel;
    panel = next_panel;
    next_panel = used;
  }
  X::Release();
}

template <class V, class X>
static void TiledMatmul(const MatmulArgs& args) {
  if (!WorthTiles<X>(args)) return Matmul<V>(args);
  if (args.weights.scale_dtype == DType::kBF16) {
    MatmulOnTiles<V, X, DType::kBF16>(args);
  } else {
    MatmulOnTiles<V, X, DType::kF32>(args);
  }
  if (args.stream) V::FinishStream();
}

// As PeakProbe: products of tiles that stay in registers.
template <class X>
static int64_t TilePeakProbe(int64_t iterations, int32_t* sink) {
  alignas(64) uint8_t bytes[X::kMostRows * 64];
  alignas(64) int32_t sums[X::kMostRows * kBlockChannels];
  for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = static_cast<uint8_t>((i + *sink) & 7);
  X::Configure(X::kMostRows, 64);
  X::Fence();
  X::template LoadWeights<0>(bytes);
  X::template LoadWeights<1>(bytes);
  X::template LoadRows<0>(reinterpret_cast<const int8_t*>(bytes), 64);
  X::template LoadRows<1>(reinterpret_cast<const int8_t*>(bytes), 64);
  X::template ZeroSum<0, 0>();
  X::template ZeroSum<0, 1>();
  X::template ZeroSum<1, 0>();
  X::template ZeroSum<1, 1>();
  for (int64_t i = 0; i < iterations; ++i) {
    X::template Dot<0, 0>();
    X::template Dot<0, 1>();
    X::template Dot<1, 0>();
    X::template Dot<1, 1>();
  }
  X::template StoreSum<0, 0>(sums, 64);
  X::Release();
  *sink = sums[0];
  return iterations * 4 * X::kMostRows * kBlockChannels * 64;
}

template <class V, class X>
static constexpr Kernels MakeTiledKernels(const char* name) {
  Kernels kernels = MakeKernels<V>(name);
  kernels.matmul = &TiledMatmul<V, X>;
  kernels.arrange_rows = &ArrangeRows<V, X>;
  kernels.peak_probe = &TilePeakProbe<X>;
  return kernels;
}
