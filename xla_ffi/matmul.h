// Products of quantised rows with packed weights, cut into items of work of about equal cost.
#ifndef JAX_W4A8_XLA_FFI_MATMUL_H_
#define JAX_W4A8_XLA_FFI_MATMUL_H_

#include <stdint.h>

#include <vector>

#include "kernels/kernels.h"
#include "layout.h"
#include "parallel.h"
#include "scratch.h"

namespace jax_w4a8 {

// Rows [begin, begin + count) of a sorted list, all of which meet the matrix `index` of a stack.
struct RowRun {
  int64_t index;
  int64_t begin;
  int64_t count;
};

// Rows of a run x blocks of its matrix.
struct WorkItem {
  RowRun run;
  int64_t block_begin;
  int64_t block_end;
};

// Lists `rows` rows by the matrix that each meets, those of a matrix in ascending order and those
// of negative ids left out, and returns the runs of that list.
std::vector<RowRun> SortRows(const int32_t* ids, int64_t rows, int64_t matrices, int32_t* order);

// Zeros for the rows of negative ids, which meet no matrix. `out` is [rows, row_bytes].
void ClearAbsentRows(const int32_t* ids, int64_t rows, void* out, size_t row_bytes);

// Cuts every run into row pieces and block ranges, so that `threads` threads share even a single
// run evenly.
void PlanWork(const PackedMatrix& weights, const std::vector<RowRun>& runs, int threads,
              std::vector<WorkItem>* items);

// Quantised rows in scratch; `inputs` of the matrix they will meet.
QuantizedRows TakeQuantizedRows(ScratchLayout& layout, int64_t rows, const PackedMatrix& weights);

// What the products of all workers work in, each in its own part.
class TileScratch {
 public:
  TileScratch() = default;
  // For products with at most `inputs` inputs.
  TileScratch(ScratchLayout& layout, int threads, int64_t inputs);

  // Fills in the scratch of `args` for `worker`, and has the rows of `item` arranged there.
  void Prepare(const Kernels& kernels, const WorkItem& item, int worker, MatmulArgs* args) const;
  // Rows of other products will follow.
  void Forget(int threads) const;

 private:
  struct alignas(64) Part {
    uint8_t panel[2 * kPanelBytes];
    TileState state[kMostRows];
    int64_t arranged;  // where the run of the rows in row_tiles begins, or -1
  };
  Part* parts_ = nullptr;
  static int64_t MostGroups(int64_t inputs) { return inputs / kChunkInputs; }

  int8_t* row_tiles_ = nullptr;
  int32_t* row_starts_ = nullptr;
  int64_t inputs_ = 0;
};

// Runs `items`, each with its matrix, rows and target filled into a copy of `common`. `row_index`
// and `out_index` of `common` are those of the whole list.
void RunMatmul(Team& team, const Kernels& kernels, const MatmulArgs& common,
               const std::vector<WorkItem>& items, const TileScratch& tiles);

// Calls body(begin, end, worker) over [0, count) in pieces that are worth a thread's while when one
// element costs `cost` (about a nanosecond each).
template <class Body>
void ForRanges(Team& team, int64_t count, int64_t cost, const Body& body) {
  constexpr int64_t kWorthwhile = 20000;
  const int64_t least = 1 + kWorthwhile / (cost > 0 ? cost : 1);
  const int64_t even = 1 + (count - 1) / (4 * team.threads());
  const int64_t piece = least > even ? least : even;
  team.ForEach((count + piece - 1) / piece, [&](int64_t item, int worker) {
    const int64_t begin = item * piece;
    body(begin, begin + piece < count ? begin + piece : count, worker);
  });
}

// A linear map, or one whose rows each meet a matrix of their own choice out of a stack.
struct LinearCall {
  DType dtype;    // of x and y
  const void* x;  // [rows, features]
  int64_t rows;
  int64_t features;
  bool symmetric;
  PackedMatrix weights;  // the first of a stack
  void* y;               // [rows, out_features]
  int64_t out_features;
  const int32_t* ids;  // [rows]: matrix of each row, -1 for none: zeros. Null: all meet the first.
  int64_t matrices;
};

// False when there is no memory for scratch.
bool RunLinear(const LinearCall& call, const Kernels& kernels, Team& team);

// Quantises rows [begin, end) of x. `factors`, where given, multiply rows first. `floats` holds
// `features` floats of scratch, used for half precision.
void QuantizeRange(const Kernels& kernels, DType dtype, const void* x, int64_t features,
                   const float* factors, bool symmetric, int64_t begin, int64_t end, float* floats,
                   const QuantizedRows& out);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_MATMUL_H_
