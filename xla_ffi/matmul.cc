#include "matmul.h"

#include <string.h>

#include <algorithm>
#include <numeric>

namespace jax_w4a8 {
namespace {

// An item should take this many bytes' worth of reading at least, some 5 microseconds.
constexpr int64_t kLeastCost = 128 << 10;
constexpr int64_t kItemsPerThread = 8;

// Of one block pair, in bytes read: below some rows a product is bound by reading weights, beyond
// by arithmetic, which per row costs about as much as reading an eighth of the weights.
int64_t PairCost(const PackedMatrix& weights, int64_t rows) {
  const int64_t bytes = 2 * static_cast<int64_t>(weights.block_bytes());
  return bytes + bytes * rows / 8;
}

}  // namespace

// A counting sort.
std::vector<RowRun> SortRows(const int32_t* ids, int64_t rows, int64_t matrices, int32_t* order) {
  std::vector<int64_t> next(static_cast<size_t>(matrices), 0);
  for (int64_t row = 0; row < rows; ++row) {
    if (ids[row] >= 0) ++next[static_cast<size_t>(ids[row])];
  }
  std::vector<RowRun> runs;
  int64_t begin = 0;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const int64_t count = next[static_cast<size_t>(matrix)];
    if (count > 0) runs.push_back({matrix, begin, count});
    next[static_cast<size_t>(matrix)] = begin;
    begin += count;
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (ids[row] >= 0) order[next[static_cast<size_t>(ids[row])]++] = static_cast<int32_t>(row);
  }
  return runs;
}

void ClearAbsentRows(const int32_t* ids, int64_t rows, void* out, size_t row_bytes) {
  for (int64_t row = 0; row < rows; ++row) {
    if (ids[row] < 0)
      memset(static_cast<char*>(out) + static_cast<size_t>(row) * row_bytes, 0, row_bytes);
  }
}

void PlanWork(const PackedMatrix& weights, const std::vector<RowRun>& runs, int threads,
              std::vector<WorkItem>* items) {
  items->clear();
  const int64_t pairs = (weights.blocks + 1) / 2;
  int64_t total = 0;
  for (const RowRun& run : runs) total += pairs * PairCost(weights, run.count);
  const int64_t target = std::max(total / (threads * kItemsPerThread), kLeastCost);
  for (const RowRun& run : runs) {
    const int64_t pieces = (run.count + kMostRows - 1) / kMostRows;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = piece * run.count / pieces, end = (piece + 1) * run.count / pieces;
      const int64_t cost = pairs * PairCost(weights, end - begin);
      const int64_t parts = std::clamp<int64_t>((cost + target / 2) / target, 1, pairs);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t last = 2 * ((part + 1) * pairs / parts);
        items->push_back({{run.index, run.begin + begin, end - begin},
                          2 * (part * pairs / parts),
                          std::min(last, weights.blocks)});
      }
    }
  }
}

QuantizedRows TakeQuantizedRows(ScratchLayout& layout, int64_t rows, const PackedMatrix& weights) {
  QuantizedRows out;
  out.codes = layout.Take<int8_t>(rows * weights.inputs());
  out.start = layout.Take<int32_t>(rows * weights.groups);
  out.zero = layout.Take<float>(rows);
  out.scale = layout.Take<float>(rows);
  out.groups = weights.groups;
  out.group_width = weights.group_width;
  return out;
}

TileScratch::TileScratch(ScratchLayout& layout, int threads, int64_t inputs)
    : parts_(layout.Take<Part>(threads)), inputs_(inputs) {
  row_tiles_ = layout.Take<int8_t>(threads * kMostRows * inputs);
  row_starts_ = layout.Take<int32_t>(threads * kMostRows * MostGroups(inputs));
}

void TileScratch::Forget(int threads) const {
  for (int worker = 0; worker < threads; ++worker) parts_[worker].arranged = -1;
}

void TileScratch::Prepare(const Kernels& kernels, const WorkItem& item, int worker,
                          MatmulArgs* args) const {
  Part& part = parts_[worker];
  args->panel = part.panel;
  args->state = part.state;
  args->row_tiles = row_tiles_ + worker * kMostRows * inputs_;
  args->row_starts = row_starts_ + worker * kMostRows * MostGroups(inputs_);
  if (part.arranged == item.run.begin) return;  // another range of blocks meets the same rows
  kernels.arrange_rows(*args);
  part.arranged = item.run.begin;
}

void RunMatmul(Team& team, const Kernels& kernels, const MatmulArgs& common,
               const std::vector<WorkItem>& items, const TileScratch& tiles) {
  tiles.Forget(team.threads());
  team.ForEach(static_cast<int64_t>(items.size()), [&](int64_t number, int worker) {
    const WorkItem& item = items[static_cast<size_t>(number)];
    MatmulArgs args = common;
    args.weights = common.weights.At(item.run.index);
    args.block_begin = item.block_begin;
    args.block_end = item.block_end;
    args.row_count = item.run.count;
    args.row_index = common.row_index + item.run.begin;
    args.out_index = common.out_index + item.run.begin;
    tiles.Prepare(kernels, item, worker, &args);
    kernels.matmul(args);
  });
}

void QuantizeRange(const Kernels& kernels, DType dtype, const void* x, int64_t features,
                   const float* factors, bool symmetric, int64_t begin, int64_t end, float* floats,
                   const QuantizedRows& out) {
  const char* bytes = static_cast<const char*>(x);
  for (int64_t row = begin; row < end; ++row) {
    const void* from = bytes + static_cast<size_t>(row * features) * SizeOf(dtype);
    const float* values = static_cast<const float*>(from);
    if (dtype != DType::kF32) {
      kernels.to_float(dtype, from, features, floats);
      values = floats;
    }
    kernels.quantize_row(values, features, factors ? factors[row] : 1.0f, symmetric, row, out);
  }
}

namespace {

// Fills `order` and returns its runs.
std::vector<RowRun> OrderRows(const LinearCall& call, int32_t* order) {
  if (call.ids) return SortRows(call.ids, call.rows, call.matrices, order);
  std::iota(order, order + call.rows, 0);
  return {{0, 0, call.rows}};
}

}  // namespace

bool RunLinear(const LinearCall& call, const Kernels& kernels, Team& team) {
  const PackedMatrix& w = call.weights;
  const int64_t floats_stride = (call.features + 15) / 16 * 16;
  QuantizedRows q;
  float* floats = nullptr;
  int32_t* order = nullptr;
  TileScratch tiles;
  const Scratch scratch([&](ScratchLayout layout) {
    q = TakeQuantizedRows(layout, call.rows, w);
    floats = layout.Take<float>(team.threads() * floats_stride);
    order = layout.Take<int32_t>(call.rows);
    tiles = TileScratch(layout, team.threads(), w.inputs());
    return layout.size();
  });
  if (!scratch.data()) return false;

  ForRanges(team, call.rows, call.features / 4, [&](int64_t begin, int64_t end, int worker) {
    QuantizeRange(kernels, call.dtype, call.x, call.features, nullptr, call.symmetric, begin, end,
                  floats + worker * floats_stride, q);
  });
  if (call.ids) {
    const size_t row_bytes = static_cast<size_t>(call.out_features) * SizeOf(call.dtype);
    ClearAbsentRows(call.ids, call.rows, call.y, row_bytes);
  }

  std::vector<WorkItem> items;
  PlanWork(w, OrderRows(call, order), team.threads(), &items);
  MatmulArgs args = {};
  args.weights = w;
  args.rows = q;
  args.row_index = args.out_index = order;
  args.out = call.y;
  args.out_dtype = call.dtype;
  args.out_stride = args.out_columns = call.out_features;
  RunMatmul(team, kernels, args, items, tiles);
  return true;
}

}  // namespace jax_w4a8
