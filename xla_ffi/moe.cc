#include "moe.h"

#include <algorithm>
#include <vector>

#include "matmul.h"
#include "scratch.h"

namespace jax_w4a8 {
namespace {

// One pass over at most kMostTokens tokens. Buffers live in one block of scratch.
class Pass {
 public:
  Pass(const MoeCall& call, const Kernels& kernels, Team& team)
      : call_(call), kernels_(kernels), team_(team), slots_(call.tokens * call.top_k) {}

  size_t LayOut(ScratchLayout layout) {
    const int64_t columns = call_.w13.blocks / 2 * kBlockChannels;
    x_ = TakeQuantizedRows(layout, call_.tokens, call_.w13);
    inner_stride_ = columns;
    inner_ = layout.Take<float>(slots_ * inner_stride_);
    quantized_inner_ = TakeQuantizedRows(layout, slots_, call_.w2);
    order_ = layout.Take<int32_t>(slots_);
    token_ = layout.Take<int32_t>(slots_);
    floats_stride_ = (call_.hidden + 15) / 16 * 16;
    floats_ = layout.Take<float>(team_.threads() * floats_stride_);
    tiles_ = TileScratch(layout, team_.threads(), std::max(call_.w13.inputs(), call_.w2.inputs()));
    if (!call_.slots) outputs_ = layout.Take<float>(slots_ * call_.hidden);
    return layout.size();
  }

  void Run() {
    if (call_.slots) {
      outputs_ = call_.slots;
      ClearAbsentRows(call_.ids, slots_, outputs_,
                      static_cast<size_t>(call_.hidden) * sizeof(float));
    }
    SortByExpert();
    QuantizeTokens();
    Project(call_.w13, x_, token_, inner_, inner_stride_, &call_.activation);
    QuantizeInner();
    Project(call_.w2, quantized_inner_, order_, outputs_, call_.hidden, nullptr);
    if (!call_.y) return;
    RunCombine({outputs_, call_.ids, call_.weight_on_input ? nullptr : call_.weights, call_.tokens,
                call_.top_k, call_.hidden, call_.dtype, call_.y},
               kernels_, team_);
  }

 private:
  void SortByExpert() {
    runs_ = SortRows(call_.ids, slots_, call_.experts, order_);
    const int64_t present = runs_.empty() ? 0 : runs_.back().begin + runs_.back().count;
    for (int64_t place = 0; place < present; ++place) {
      token_[place] = static_cast<int32_t>(order_[place] / call_.top_k);
    }
  }

  void QuantizeTokens() {
    const float* factors = call_.weight_on_input ? call_.weights : nullptr;  // top_k is 1 then
    ForRanges(team_, call_.tokens, call_.hidden / 4, [&](int64_t begin, int64_t end, int worker) {
      QuantizeRange(kernels_, call_.dtype, call_.x, call_.hidden, factors, call_.symmetric, begin,
                    end, floats_ + worker * floats_stride_, x_);
    });
  }

  void QuantizeInner() {
    // Columns that only fill up blocks are zeros; there may be more of them than w2 has inputs.
    const int64_t width = inner_stride_ < call_.w2.inputs() ? inner_stride_ : call_.w2.inputs();
    ForRanges(team_, slots_, width / 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t slot = begin; slot < end; ++slot) {
        if (call_.ids[slot] < 0) continue;
        kernels_.quantize_row(inner_ + slot * inner_stride_, width, 1.0f, call_.symmetric, slot,
                              quantized_inner_);
      }
    });
  }

  void Project(const PackedMatrix& weights, const QuantizedRows& rows, const int32_t* row_index,
               float* out, int64_t columns, const Activation* activation) {
    PlanWork(weights, runs_, team_.threads(), &items_);
    MatmulArgs args = {};
    args.weights = weights;
    args.rows = rows;
    args.row_index = row_index;
    args.out_index = order_;
    args.out = out;
    args.out_dtype = DType::kF32;
    args.out_stride = args.out_columns = columns;
    args.stream = out != call_.slots && PassesCaches(columns);
    args.activation = activation;
    RunMatmul(team_, kernels_, args, items_, tiles_);
  }

  // Whether [slots, columns] floats would only drive weights and rows out of the caches until they
  // are used, and be read before they are written.
  bool PassesCaches(int64_t columns) const {
    constexpr int64_t kCacheBytes = int64_t{8} << 20;
    constexpr int64_t kFloat = sizeof(float), kLine = ScratchLayout::kAlignment;
    return columns * kFloat % kLine == 0 && slots_ * columns * kFloat > kCacheBytes;
  }

  const MoeCall& call_;
  const Kernels& kernels_;
  Team& team_;
  const int64_t slots_;

  QuantizedRows x_;         // by token
  float* inner_ = nullptr;  // [slots, inner_stride_]: activation outputs
  int64_t inner_stride_ = 0;
  QuantizedRows quantized_inner_;  // by slot
  int32_t* order_ = nullptr;       // slots, by expert
  int32_t* token_ = nullptr;       // their tokens
  float* floats_ = nullptr;        // [threads, floats_stride_]
  int64_t floats_stride_ = 0;
  TileScratch tiles_;
  float* outputs_ = nullptr;  // [slots, hidden]
  std::vector<RowRun> runs_;
  std::vector<WorkItem> items_;
};

}  // namespace

bool RunMoe(const MoeCall& call, const Kernels& kernels, Team& team) {
  for (int64_t begin = 0; begin < call.tokens; begin += kMostTokens) {
    MoeCall part = call;
    part.tokens = call.tokens - begin < kMostTokens ? call.tokens - begin : kMostTokens;
    const size_t row_bytes = static_cast<size_t>(call.hidden) * SizeOf(call.dtype);
    part.x = static_cast<const char*>(call.x) + static_cast<size_t>(begin) * row_bytes;
    part.weights += begin * call.top_k;
    part.ids += begin * call.top_k;
    if (call.y) part.y = static_cast<char*>(call.y) + static_cast<size_t>(begin) * row_bytes;
    if (call.slots) part.slots += begin * call.top_k * call.hidden;
    Pass pass(part, kernels, team);
    const Scratch scratch([&](ScratchLayout layout) { return pass.LayOut(layout); });
    if (!scratch.data()) return false;
    pass.Run();
  }
  return true;
}

void RunCombine(const CombineCall& call, const Kernels& kernels, Team& team) {
  ForRanges(team, call.tokens, call.top_k * call.hidden / 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = token * call.top_k;
      char* y = static_cast<char*>(call.y) +
                static_cast<size_t>(token * call.hidden) * SizeOf(call.dtype);
      kernels.combine(call.slots + slot * call.hidden, call.ids ? call.ids + slot : nullptr,
                      call.weights ? call.weights + slot : nullptr, call.top_k, call.hidden,
                      call.dtype, y);
    }
  });
}

}  // namespace jax_w4a8
