// The table of functions that an instruction set fills, and the choice among the tables.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_KERNELS_H_
#define JAX_W4A8_XLA_FFI_KERNELS_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

namespace jax_w4a8 {

// Inputs that a panel holds: two blocks' weights, a byte each, that stay in the first-level cache
// while all rows meet them.
constexpr int64_t kPanelInputs = 512;
constexpr int64_t kPanelBytes = 2 * kPanelInputs * kBlockChannels;

// Rows of one Matmul call at most: their codes should stay in the second-level cache.
constexpr int64_t kMostRows = 256;

// What a row of a tile keeps between panels: sums of the group that goes on, totals of the groups
// before.
struct TileState {
  int32_t sum[2][kBlockChannels];
  float total[2][kBlockChannels];
};

// Rows x blocks of one product. Rows are gathered from `rows` by `row_index`; each result row goes
// to `out_index` of `out`. A null index means the identity.
struct MatmulArgs {
  PackedMatrix weights;
  QuantizedRows rows;
  int64_t block_begin;  // even
  int64_t block_end;
  int64_t row_count;
  const int32_t* row_index;
  const int32_t* out_index;
  void* out;
  DType out_dtype;
  int64_t out_stride;   // elements between rows of `out`
  int64_t out_columns;  // columns that exist: the last block may be partly filling
  // `out` goes past the caches, which it wouldn't fit: floats, rows of whole cache lines.
  bool stream;
  // Null for a plain product. Else blocks come in pairs (gate, up), and column block b / 2 of `out`
  // gets activation(gate, up).
  const Activation* activation;
  int8_t* row_tiles;    // kMostRows * inputs; as Kernels::arrange_rows left them
  int32_t* row_starts;  // kMostRows * groups; likewise
  uint8_t* panel;       // two times kPanelBytes of scratch, 64-byte aligned
  TileState* state;     // kMostRows of scratch; row_count must not be above that
};

// Slots of a cache that attention takes at once, and those after which what it found is merged with
// what it found before; caches hold whole multiples of the first.
constexpr int64_t kAttendStep = 64;
constexpr int64_t kAttendSegment = 256;
// Most rows of a tile of attention: scratch is counted in whole ones.
constexpr int64_t kMostAttendRows = 8;
// Floats of a row's state beside its mixture of values.
constexpr int64_t kAttendRowExtra = 2 * kBlockChannels;

// Attention of one row of the batch, of the tokens [token_begin, token_end) and the heads that one
// key and value head serves. A state is [rows, width + kAttendRowExtra], rows by token, then head.
struct AttendArgs {
  const float* queries;  // of the first token and head
  int64_t query_stride;  // elements between tokens
  const float* keys;     // [dim, slots]
  const float* values;   // [slots, width]; width is a multiple of 16
  int64_t slots;
  int64_t dim;
  int64_t width;
  int64_t group;  // heads
  int64_t token_begin;
  int64_t token_end;
  int64_t start;   // position of token 0
  int64_t window;  // positions that a token sees; 0 for all up to its own
  float scale;     // makes scores logarithms to base 2
  // Begins at a segment, and ends at one or behind the last slot that any of these tokens sees,
  // rounded up to a step.
  int64_t slot_begin;
  int64_t slot_end;
  float* state;           // what comes out
  float* packed_queries;  // scratch: [rows, dim], rows in whole tiles
  float* packed_keys;     // scratch: [kAttendSegment, dim]
  float* scores;          // scratch: [rows, kAttendStep], rows in whole tiles
  float* shrinkage;       // scratch: [rows], in whole tiles
  float* part;            // scratch: a state of whole tiles
};

struct Kernels {
  const char* name;

  // Widens n elements to float.
  void (*to_float)(DType dtype, const void* x, int64_t n, float* out);

  // Quantises row `row` of `out` from n floats (n <= out.inputs()), each first multiplied by
  // `factor`.
  void (*quantize_row)(const float* x, int64_t n, float factor, bool symmetric, int64_t row,
                       const QuantizedRows& out);

  void (*matmul)(const MatmulArgs& args);

  // Copies the rows of `args` to args.row_tiles and what their sums start from to args.row_starts,
  // in the order in which `matmul` reads them.
  void (*arrange_rows)(const MatmulArgs& args);

  // out[column] = sum over slots, ascending, of weights[slot] * slots[slot][column], rounded to
  // `dtype`. `slots` is [count, columns]. Null weights are ones. Where ids are given, slots of
  // negative ids are passed over.
  void (*combine)(const float* slots, const int32_t* ids, const float* weights, int64_t count,
                  int64_t columns, DType dtype, void* out);

  // int8 multiply-accumulates in registers alone, for measuring the machine's peak; returns how
  // many.
  int64_t (*peak_probe)(int64_t iterations, int32_t* sink);

  // Reads `bytes` (whole blocks of 256) once, as a product reads weights; for measuring bandwidth.
  void (*read_probe)(const uint8_t* data, int64_t bytes, int32_t* sink);

  void (*attend)(const AttendArgs& args);

  // One row's result, [width], of `count` states `stride` elements apart, in the order of their
  // slots; the first one is used up. `sink` is a score without a value, or null.
  void (*finish_attention)(float* states, int64_t count, int64_t stride, int64_t width,
                           const float* sink, float* out);
};

// Tables compiled in and usable here, best first; the last one is always there.
const Kernels* const* UsableKernels(int* count);

// The table in use: the best usable one unless a lower one was forced.
const Kernels& ActiveKernels();

// Forces the table called `name`; false if it isn't usable here.
bool ForceKernels(const char* name);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_KERNELS_H_
