#include "grouped.h"

#include <string.h>

#include <vector>

#include "scratch.h"

namespace jax_w4a8 {
namespace {

// Counting sort, stable: `order` lists rows by matrix, rows without one left out.
std::vector<RowRun> SortByMatrix(const GroupedLinearCall& call, int32_t* order) {
  std::vector<int64_t> next(static_cast<size_t>(call.matrices), 0);
  for (int64_t row = 0; row < call.linear.rows; ++row) {
    if (call.ids[row] >= 0) ++next[static_cast<size_t>(call.ids[row])];
  }
  std::vector<RowRun> runs;
  int64_t begin = 0;
  for (int64_t matrix = 0; matrix < call.matrices; ++matrix) {
    const int64_t count = next[static_cast<size_t>(matrix)];
    if (count > 0) runs.push_back({matrix, begin, count});
    next[static_cast<size_t>(matrix)] = begin;
    begin += count;
  }
  for (int64_t row = 0; row < call.linear.rows; ++row) {
    if (call.ids[row] < 0) continue;
    order[next[static_cast<size_t>(call.ids[row])]++] = static_cast<int32_t>(row);
  }
  return runs;
}

}  // namespace

bool RunGroupedLinear(const GroupedLinearCall& call, const Kernels& kernels, Team& team) {
  const LinearCall& linear = call.linear;
  const int64_t floats_stride = (linear.features + 15) / 16 * 16;
  QuantizedRows rows;
  float* floats = nullptr;
  int32_t* order = nullptr;
  TileScratch tiles;
  const auto lay_out = [&](ScratchLayout layout) {
    rows = TakeQuantizedRows(layout, linear.rows, linear.weights);
    floats = layout.Take<float>(team.threads() * floats_stride);
    order = layout.Take<int32_t>(linear.rows);
    tiles = TileScratch(layout, kernels, team.threads(), linear.weights.inputs());
    return layout.size();
  };
  const Scratch scratch(lay_out(ScratchLayout()));
  if (!scratch.data()) return false;
  lay_out(ScratchLayout(scratch.data()));

  ForRanges(team, linear.rows, linear.features / 4, [&](int64_t begin, int64_t end, int worker) {
    QuantizeRange(kernels, linear.dtype, linear.x, linear.features, nullptr, linear.symmetric,
                  begin, end, floats + worker * floats_stride, rows);
  });
  const size_t row_bytes = static_cast<size_t>(linear.out_features) * SizeOf(linear.dtype);
  for (int64_t row = 0; row < linear.rows; ++row) {
    if (call.ids[row] >= 0) continue;
    memset(static_cast<char*>(linear.y) + static_cast<size_t>(row) * row_bytes, 0, row_bytes);
  }

  std::vector<WorkItem> items;
  PlanWork(linear.weights, SortByMatrix(call, order), team.threads(), &items);
  MatmulArgs args = {};
  args.weights = linear.weights;
  args.rows = rows;
  args.row_index = args.out_index = order;
  args.out = linear.y;
  args.out_dtype = linear.dtype;
  args.out_stride = args.out_columns = linear.out_features;
  RunMatmul(team, kernels, args, items, tiles);
  return true;
}

}  // namespace jax_w4a8
