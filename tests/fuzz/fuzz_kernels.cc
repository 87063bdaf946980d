// Every instruction set against the portable one, bit for bit: single kernels and whole layers on
// random shapes, ids (absent ones, too), strides, dtypes and values, non-finite ones included.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "bytes.h"
#include "check.h"
#include "float_env.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "layout.h"
#include "matmul.h"
#include "moe.h"
#include "parallel.h"
#include "scratch.h"

namespace jax_w4a8 {
namespace {

enum Subject {
  kToFloat,
  kQuantizeRow,
  kMatmul,
  kCombine,
  kMoe,
  kLinear,
  kAttend,
  kAttention,
  kSubjects
};

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr float kInfinity = __builtin_inff();

// ---------------------------------------------------------------------------------------------------------
// Operands, in memory of exactly their size.

template <class T>
using Array = std::unique_ptr<T[]>;

template <class T>
Array<T> MakeArray(int64_t count, int filling) {
  Array<T> array(new T[static_cast<size_t>(count)]);
  if (count > 0)
    memset(static_cast<void*>(array.get()), filling, static_cast<size_t>(count) * sizeof(T));
  return array;
}

Array<float> MakeFloats(Random& random, Floats kind, int64_t count) {
  Array<float> array = MakeArray<float>(count, 0);
  for (int64_t i = 0; i < count; ++i) array[static_cast<size_t>(i)] = MakeFloat(random, kind);
  return array;
}

// Floats rounded to `dtype`, as bytes.
Array<uint8_t> MakeRounded(Random& random, Floats kind, DType dtype, int64_t count) {
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  Array<uint8_t> array = MakeArray<uint8_t>(count * size, 0);
  for (int64_t i = 0; i < count; ++i) {
    const float value = MakeFloat(random, kind);
    const uint16_t half = dtype == DType::kBF16 ? BF16Of(value) : F16Of(value);
    memcpy(array.get() + i * size, dtype == DType::kF32 ? static_cast<const void*>(&value) : &half,
           SizeOf(dtype));
  }
  return array;
}

Array<int32_t> MakeIds(Random& random, int64_t count, int64_t experts, bool absent) {
  Array<int32_t> ids = MakeArray<int32_t>(count, 0);
  for (int64_t i = 0; i < count; ++i) {
    ids[static_cast<size_t>(i)] =
        static_cast<int32_t>(random.Int(absent || experts == 0 ? -1 : 0, experts - 1));
  }
  return ids;
}

class Stack {
 public:
  Stack(Bytes& bytes, Random& random, int64_t count, int64_t blocks, int64_t groups,
        int64_t group_width) {
    const DType dtype = bytes.Flag() ? DType::kF32 : DType::kBF16;
    const Floats kind = bytes.Rarely(4) ? bytes.Pick(kFloatKinds) : Floats::kUnit;
    const int64_t code_bytes = count * blocks * groups * group_width * kBlockChannels / 2;
    codes_ = MakeArray<uint8_t>(code_bytes, 0);
    const int extreme = bytes.Rarely(8) ? (bytes.Flag() ? 0x00 : 0xff) : -1;
    if (extreme >= 0) {
      codes_ = MakeArray<uint8_t>(code_bytes, extreme);
    } else {
      for (int64_t i = 0; i < code_bytes; i += 8) {  // whole groups: a multiple of 8 bytes
        const uint64_t bits = random.Next();
        memcpy(codes_.get() + i, &bits, 8);
      }
    }
    scale_ = MakeRounded(random, kind, dtype, count * blocks * groups * kBlockChannels);
    sums_ = MakeFloats(random, kind, count * blocks * kBlockChannels);
    bias_ = MakeFloats(random, kind, count * blocks * kBlockChannels);
    first_ = {codes_.get(), scale_.get(), dtype,  sums_.get(),
              bias_.get(),  blocks,       groups, group_width};
  }
  const PackedMatrix& first() const { return first_; }

 private:
  Array<uint8_t> codes_, scale_;
  Array<float> sums_, bias_;
  PackedMatrix first_;
};

Activation MakeActivation(Bytes& bytes) {
  constexpr float kLimits[] = {7, kInfinity, 0, -1, 1e-3f, __builtin_nanf("")};
  constexpr float kAlphas[] = {1.702f, 1, 0, -3, 1e30f};
  const auto kind = static_cast<ActivationKind>(bytes.Int(0, 3));
  return {kind, bytes.Pick(kAlphas), bytes.Pick(kLimits)};
}

// ---------------------------------------------------------------------------------------------------------
// Results

using Result = std::vector<uint8_t>;

// All NaN count as one: which it is is left open.
template <class Word>
void AddWords(const void* data, int64_t count, Word infinity, Result* out) {
  const size_t begin = out->size();
  out->resize(begin + static_cast<size_t>(count) * sizeof(Word));
  for (int64_t i = 0; i < count; ++i) {
    constexpr Word kMagnitude = static_cast<Word>(-1) >> 1;
    Word bits;
    memcpy(&bits, static_cast<const Word*>(data) + i, sizeof(Word));
    if ((bits & kMagnitude) > infinity) bits = kMagnitude;
    memcpy(out->data() + begin + static_cast<size_t>(i) * sizeof(Word), &bits, sizeof(Word));
  }
}

void AddFloats(DType dtype, const void* data, int64_t count, Result* out) {
  if (dtype == DType::kF32) return AddWords<uint32_t>(data, count, 0x7f800000u, out);
  AddWords<uint16_t>(data, count, dtype == DType::kBF16 ? 0x7f80 : 0x7c00, out);
}

void AddBytes(const void* data, int64_t size, Result* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  if (size > 0) out->insert(out->end(), bytes, bytes + size);
}

// Calls run(kernels, filling) for every instruction set, with memory that it should fill, and its
// scratch, full of `filling`.
using Run = std::function<Result(const Kernels& kernels, int filling)>;

void Compare(const char* what, const Run& run) {
  const ScopedFloatEnv float_env;
  int count = 0;
  const Kernels* const* usable = UsableKernels(&count);
  const auto filled = [&](const Kernels& kernels, int filling) {
    ReleaseScratch();
    {
      const Scratch scratch(1 << 17);
      JAX_W4A8_CHECK(scratch.data(), "no memory");
      memset(scratch.data(), filling, 1 << 17);
    }
    return run(kernels, filling);
  };
  const Result wanted = filled(*usable[count - 1], 0x00);
  for (int i = 0; i < count; ++i) {
    const Result got = filled(*usable[i], 0xff);
    const size_t place = static_cast<size_t>(
        std::mismatch(got.begin(), got.end(), wanted.begin(), wanted.end()).first - got.begin());
    JAX_W4A8_CHECK(got == wanted, "%s: %s differs from portable at byte %zu of %zu", what,
                   usable[i]->name, place, wanted.size());
  }
}

// ---------------------------------------------------------------------------------------------------------
// Single kernels

void FuzzToFloat(Bytes& bytes) {
  const DType dtype = bytes.Pick(kDTypes);
  const int64_t n = bytes.Int(0, 100);
  const Floats kind = bytes.Pick(kFloatKinds);
  Random random(bytes.Take(4));
  const Array<uint8_t> x = MakeRounded(random, kind, dtype, n);
  Compare("to_float", [&](const Kernels& kernels, int filling) {
    const Array<float> out = MakeArray<float>(n, filling);
    kernels.to_float(dtype, x.get(), n, out.get());
    Result result;
    AddFloats(DType::kF32, out.get(), n, &result);
    return result;
  });
}

// Rows of codes in memory of their own.
struct Quantized {
  Array<int8_t> codes;
  Array<int32_t> start;
  Array<float> zero, scale;
  QuantizedRows rows;
  int64_t count;

  Quantized(int64_t rows_count, int64_t groups, int64_t group_width, int filling)
      : codes(MakeArray<int8_t>(rows_count * groups * group_width, filling)),
        start(MakeArray<int32_t>(rows_count * groups, filling)),
        zero(MakeArray<float>(rows_count, filling)),
        scale(MakeArray<float>(rows_count, filling)),
        rows{codes.get(), start.get(), zero.get(), scale.get(), groups, group_width},
        count(rows_count) {}

  void AddTo(Result* out) const {
    AddBytes(codes.get(), count * rows.inputs(), out);
    AddBytes(start.get(), count * rows.groups * 4, out);
    AddFloats(DType::kF32, zero.get(), count, out);
    AddFloats(DType::kF32, scale.get(), count, out);
  }
};

struct Groups {
  int64_t width, count;
  explicit Groups(Bytes& bytes) {
    width = bytes.Rarely(16) ? 32 * bytes.Int(1, 40) : 32 * bytes.Int(1, 4);
    count = width > 128 || !bytes.Rarely(8) ? bytes.Int(1, 2) : bytes.Int(1, 8);
  }
  int64_t inputs() const { return width * count; }
};

void FuzzQuantizeRow(Bytes& bytes) {
  constexpr float kFactors[] = {1, 1, 0, -0.5f, 3e38f, 1e-38f, kInfinity, __builtin_nanf("")};
  const Groups groups(bytes);
  const int64_t n = groups.inputs() - bytes.Int(0, std::min<int64_t>(groups.width - 1, 255));
  const float factor = bytes.Pick(kFactors);
  const bool symmetric = bytes.Flag();
  const Floats kind = bytes.Pick(kFloatKinds);
  Random random(bytes.Take(4));
  const Array<float> x = MakeFloats(random, kind, n);
  Compare("quantize_row", [&](const Kernels& kernels, int filling) {
    const Quantized out(1, groups.count, groups.width, filling);
    kernels.quantize_row(x.get(), n, factor, symmetric, 0, out.rows);
    Result result;
    out.AddTo(&result);
    return result;
  });
}

void FuzzCombine(Bytes& bytes) {
  const int64_t count = bytes.Int(0, 9), columns = bytes.Int(0, 70);
  const DType dtype = bytes.Pick(kDTypes);
  const Floats kind = bytes.Pick(kFloatKinds);
  const bool with_ids = bytes.Flag(), with_weights = bytes.Flag();
  Random random(bytes.Take(4));
  const Array<float> slots = MakeFloats(random, kind, count * columns);
  const Array<float> weights = MakeFloats(random, kind, count);
  const Array<int32_t> ids = MakeIds(random, count, 3, true);
  Compare("combine", [&](const Kernels& kernels, int filling) {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    const Array<uint8_t> out = MakeArray<uint8_t>(columns * size, filling);
    kernels.combine(slots.get(), with_ids ? ids.get() : nullptr,
                    with_weights ? weights.get() : nullptr, count, columns, dtype, out.get());
    Result result;
    AddFloats(dtype, out.get(), columns, &result);
    return result;
  });
}

void FuzzMatmul(Bytes& bytes) {
  const Groups groups(bytes);
  const bool activated = bytes.Flag();
  const int64_t blocks = activated ? 2 * bytes.Int(1, 3) : bytes.Int(1, 5);
  const int64_t sources = bytes.Int(1, 20);
  const int64_t rows = bytes.Rarely(16) ? bytes.Int(1, kMostRows) : bytes.Int(1, 20);
  const int64_t block_begin = 2 * bytes.Int(0, (blocks - 1) / 2);
  const int64_t block_end =
      bytes.Flag() ? blocks : std::min(blocks, block_begin + 2 * bytes.Int(1, 2));
  const int64_t all_columns = (activated ? blocks / 2 : blocks) * kBlockChannels;
  const int64_t columns = all_columns - bytes.Int(0, 15);
  const int64_t stride = columns + bytes.Int(0, 5);
  const DType dtype = bytes.Pick(kDTypes);
  const Activation activation = MakeActivation(bytes);
  const bool identity = bytes.Rarely(4) && rows <= sources;
  const Floats kind = bytes.Pick(kFloatKinds);
  Random random(bytes.Take(4));
  const Stack stack(bytes, random, 1, blocks, groups.count, groups.width);

  Quantized q(sources, groups.count, groups.width, 0);
  for (int64_t i = 0; i < sources * groups.inputs(); ++i) {
    q.codes[static_cast<size_t>(i)] = static_cast<int8_t>(random.Int(-128, 127));
  }
  for (int64_t i = 0; i < sources * groups.count; ++i) {
    int32_t sum = 0;
    for (int64_t k = 0; k < groups.width; ++k)
      sum += q.codes[static_cast<size_t>(i * groups.width + k)];
    q.start[static_cast<size_t>(i)] = -kCodeOffset * sum;
  }
  for (int64_t i = 0; i < sources; ++i) {
    q.zero[static_cast<size_t>(i)] = static_cast<float>(random.Int(-128, 127));
    q.scale[static_cast<size_t>(i)] = MakeFloat(random, kind);
  }
  Array<int32_t> row_index = MakeArray<int32_t>(rows, 0), out_index = MakeArray<int32_t>(rows, 0);
  for (int64_t i = 0; i < rows; ++i) {
    row_index[static_cast<size_t>(i)] = static_cast<int32_t>(random.Int(0, sources - 1));
    out_index[static_cast<size_t>(i)] = static_cast<int32_t>(rows - 1 - i);
  }

  Compare("matmul", [&](const Kernels& kernels, int filling) {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    const int64_t elements = (rows - 1) * stride + columns;
    const Array<uint8_t> out = MakeArray<uint8_t>(elements * size, filling);
    Array<TileState> state = MakeArray<TileState>(kMostRows, filling);
    struct alignas(64) Panel {
      uint8_t bytes[2 * kPanelBytes];
    };
    const Array<Panel> panel = MakeArray<Panel>(1, filling);
    const Array<int8_t> tiles = MakeArray<int8_t>(kMostRows * groups.inputs(), filling);
    const Array<int32_t> starts =
        MakeArray<int32_t>(kMostRows * groups.inputs() / kChunkInputs, filling);
    MatmulArgs args = {};
    args.weights = stack.first();
    args.rows = q.rows;
    args.block_begin = block_begin;
    args.block_end = block_end;
    args.row_count = rows;
    args.row_index = identity ? nullptr : row_index.get();
    args.out_index = identity ? nullptr : out_index.get();
    args.out = out.get();
    args.out_dtype = dtype;
    args.out_stride = stride;
    args.out_columns = columns;
    args.activation = activated ? &activation : nullptr;
    args.row_tiles = tiles.get();
    args.row_starts = starts.get();
    args.panel = panel[0].bytes;
    args.state = state.get();
    kernels.arrange_rows(args);
    kernels.matmul(args);
    // Columns of the blocks asked for are results; whatever else is in `out` must be as it was.
    const int64_t first = block_begin / (activated ? 2 : 1) * kBlockChannels;
    const int64_t last =
        std::min(columns, (block_end + (activated ? 1 : 0)) / (activated ? 2 : 1) * kBlockChannels);
    Result result;
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* begin = out.get() + row * stride * size;
      const uint8_t* end = out.get() + std::min((row + 1) * stride, elements) * size;
      const auto kept = [filling](uint8_t byte) { return byte == static_cast<uint8_t>(filling); };
      JAX_W4A8_CHECK(std::all_of(begin, begin + first * size, kept) &&
                         std::all_of(begin + std::max(first, last) * size, end, kept),
                     "%s writes outside of columns [%lld, %lld)", kernels.name,
                     static_cast<long long>(first), static_cast<long long>(last));
      AddFloats(dtype, begin + first * size, std::max(first, last) - first, &result);
    }
    return result;
  });
}

// Shapes and values of attention.
struct Heads {
  int64_t kv_heads, group, dim, width;
  explicit Heads(Bytes& bytes)
      : kv_heads(bytes.Int(1, 3)),
        group(bytes.Rarely(16) ? bytes.Int(1, 20) : bytes.Int(1, 4)),
        dim(bytes.Rarely(16) ? bytes.Int(0, 150) : bytes.Int(0, 24)),
        width(kBlockChannels * (bytes.Rarely(16) ? bytes.Int(0, 9) : bytes.Int(1, 3))) {}
  int64_t heads() const { return kv_heads * group; }
  // At most so many tokens that an input takes well below a second.
  int64_t Fewer(int64_t tokens, int64_t slots) const {
    constexpr int64_t kMostWork = 20'000'000;
    while (tokens > 1 && tokens * heads() * slots * (dim + width) > kMostWork) tokens /= 2;
    return tokens;
  }
};

float MakeScale(Bytes& bytes) {
  constexpr float kScales[] = {0.125f, 1, 30, 0, -1, 1e-38f, 1e38f, kInfinity, __builtin_nanf("")};
  return bytes.Pick(kScales);
}

int64_t MakeWindow(Bytes& bytes) {
  return bytes.Flag() ? 0 : bytes.Rarely(16) ? INT32_MAX : bytes.Int(1, 400);
}

// What one key and value head gives its tokens, whose slots are met in one go and in several.
void FuzzAttend(Bytes& bytes) {
  const Heads heads(bytes);
  const int64_t token_begin = bytes.Int(0, 3), most_tokens = bytes.Int(1, 12);
  const int64_t slots = kAttendStep * (bytes.Rarely(4) ? bytes.Int(1, 14) : bytes.Int(1, 5));
  const int64_t tokens = heads.Fewer(most_tokens, slots), rows = tokens * heads.group;
  const int64_t tiled = (rows + kMostAttendRows - 1) / kMostAttendRows * kMostAttendRows;
  const int64_t token_end = token_begin + tokens;
  const int64_t start = bytes.Int(0, slots - token_end);
  AttendArgs args = {};
  args.window = MakeWindow(bytes);
  args.scale = MakeScale(bytes);
  const Floats queries_kind = bytes.Pick(kFloatKinds), keys_kind = bytes.Pick(kFloatKinds),
               values_kind = bytes.Pick(kFloatKinds), sink_kind = bytes.Pick(kFloatKinds);
  const bool with_sink = bytes.Flag();
  Random random(bytes.Take(4));
  const int64_t stride = heads.group * heads.dim + bytes.Int(0, 20);
  const Array<float> queries =
      MakeFloats(random, queries_kind, (token_end - 1) * stride + heads.group * heads.dim);
  const Array<float> keys = MakeFloats(random, keys_kind, heads.dim * slots);
  const Array<float> values = MakeFloats(random, values_kind, slots * heads.width);
  const float sink = MakeFloat(random, sink_kind);
  args.queries = queries.get();
  args.query_stride = stride;
  args.keys = keys.get();
  args.values = values.get();
  args.slots = slots;
  args.dim = heads.dim;
  args.width = heads.width;
  args.group = heads.group;
  args.token_begin = token_begin;
  args.token_end = token_end;
  args.start = start;
  const int64_t first =
      args.window > 0 ? std::max<int64_t>(start + token_begin - args.window + 1, 0) : 0;
  const int64_t begin = first / kAttendSegment * kAttendSegment;
  const int64_t end = (start + token_end + kAttendStep - 1) / kAttendStep * kAttendStep;
  const int64_t size = heads.width + kAttendRowExtra;

  // `most` slots at once
  const auto attended = [&](const Kernels& kernels, int filling, int64_t most) {
    const Array<float> packed_queries = MakeArray<float>(tiled * heads.dim, filling);
    const Array<float> packed_keys = MakeArray<float>(kAttendSegment * heads.dim, filling);
    const Array<float> scores = MakeArray<float>(tiled * kAttendStep, filling);
    const Array<float> shrinkage = MakeArray<float>(tiled, filling);
    const Array<float> part = MakeArray<float>(tiled * size, filling);
    const int64_t count = (end - begin + most - 1) / most;
    const Array<float> states = MakeArray<float>(count * rows * size, filling);
    AttendArgs now = args;
    now.packed_queries = packed_queries.get();
    now.packed_keys = packed_keys.get();
    now.scores = scores.get();
    now.shrinkage = shrinkage.get();
    now.part = part.get();
    for (int64_t i = 0; i < count; ++i) {
      now.slot_begin = begin + i * most;
      now.slot_end = std::min(now.slot_begin + most, end);
      now.state = states.get() + i * rows * size;
      kernels.attend(now);
    }
    const Array<float> out = MakeArray<float>(rows * heads.width, filling);
    for (int64_t row = 0; row < rows; ++row) {
      kernels.finish_attention(states.get() + row * size, count, rows * size, heads.width,
                               with_sink ? &sink : nullptr, out.get() + row * heads.width);
    }
    Result result;
    AddFloats(DType::kF32, out.get(), rows * heads.width, &result);
    return result;
  };
  Compare("attend", [&](const Kernels& kernels, int filling) {
    const Result whole = attended(kernels, filling, end - begin);
    JAX_W4A8_CHECK(whole == attended(kernels, filling, kAttendSegment),
                   "attend: %s has other bits where segments are merged later", kernels.name);
    return whole;
  });
}

// ---------------------------------------------------------------------------------------------------------
// Layers

// Tasks that start when the call is over, or at once.
class Tasks {
 public:
  explicit Tasks(bool at_once) : at_once_(at_once) {}
  ~Tasks() {
    for (const auto& task : late_) task();
  }
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  Schedule schedule() {
    return [this](std::function<void()> task) {
      if (at_once_) return task();
      late_.push_back(std::move(task));
    };
  }

 private:
  bool at_once_;
  std::vector<std::function<void()>> late_;
};

struct Threads {
  int count;
  bool at_once;
  explicit Threads(Bytes& bytes)
      : count(static_cast<int>(bytes.Int(1, 5))), at_once(bytes.Rarely(16)) {}
};

// One row or token alone must have the bits that it has among the others.
void CheckAlone(const Result& all, const Result& one, int64_t index, const char* what) {
  const size_t begin = static_cast<size_t>(index) * one.size();
  JAX_W4A8_CHECK(begin + one.size() <= all.size() &&
                     std::equal(one.begin(), one.end(), all.begin() + static_cast<int64_t>(begin)),
                 "%s: row %lld alone differs", what, static_cast<long long>(index));
}

Result RunMoeOnce(MoeCall call, const Kernels& kernels, const Threads& threads, bool combined,
                  int filling) {
  const DType dtype = combined ? call.dtype : DType::kF32;
  const int64_t elements = call.tokens * call.hidden * (combined ? 1 : call.top_k);
  const Array<uint8_t> out =
      MakeArray<uint8_t>(elements * static_cast<int64_t>(SizeOf(dtype)), filling);
  if (combined) {
    call.y = out.get();
  } else {
    call.slots = reinterpret_cast<float*>(out.get());
  }
  Tasks tasks(threads.at_once);
  Team team(tasks.schedule(), threads.count);
  JAX_W4A8_CHECK(RunMoe(call, kernels, team), "no memory");
  Result result;
  AddFloats(dtype, out.get(), elements, &result);
  return result;
}

void FuzzMoe(Bytes& bytes) {
  MoeCall call = {};
  call.dtype = bytes.Pick(kDTypes);
  call.tokens = bytes.Rarely(16) ? bytes.Int(0, 60) : bytes.Int(0, 8);
  call.top_k = bytes.Int(0, 4);
  call.experts = bytes.Int(0, 4);
  const Groups in(bytes);
  call.hidden = in.inputs() - bytes.Int(0, std::min<int64_t>(in.width - 1, 255));
  const int64_t inner = bytes.Int(1, 100);
  const int64_t width = 32 * bytes.Int(1, 4);
  call.activation = MakeActivation(bytes);
  call.symmetric = bytes.Flag();
  const bool combined = bytes.Flag();
  call.weight_on_input = call.top_k == 1 && bytes.Flag();
  const Threads threads(bytes);
  const Floats kind = bytes.Pick(kFloatKinds);
  const bool absent = bytes.Flag();
  const int64_t alone = call.tokens > 0 ? bytes.Int(0, call.tokens - 1) : 0;
  Random random(bytes.Take(4));

  const Stack w13(bytes, random, call.experts, 2 * ((inner + 15) / 16), in.count, in.width);
  const Stack w2(bytes, random, call.experts, (call.hidden + 15) / 16, (inner + width - 1) / width,
                 width);
  const Array<uint8_t> x = MakeRounded(random, kind, call.dtype, call.tokens * call.hidden);
  const Array<float> weights = MakeFloats(random, kind, call.tokens * call.top_k);
  const Array<int32_t> ids = MakeIds(random, call.tokens * call.top_k, call.experts, absent);
  call.x = x.get();
  call.weights = weights.get();
  call.ids = ids.get();
  call.w13 = w13.first();
  call.w2 = w2.first();
  Compare("RunMoe", [&](const Kernels& kernels, int filling) {
    return RunMoeOnce(call, kernels, threads, combined, filling);
  });
  if (call.tokens == 0) return;
  const ScopedFloatEnv float_env;
  const Result all = RunMoeOnce(call, ActiveKernels(), threads, combined, 0);
  MoeCall one = call;
  one.tokens = 1;
  one.x = x.get() + static_cast<size_t>(alone * call.hidden) * SizeOf(call.dtype);
  one.weights += alone * call.top_k;
  one.ids += alone * call.top_k;
  CheckAlone(all, RunMoeOnce(one, ActiveKernels(), threads, combined, 0xff), alone, "RunMoe");
}

Result RunLinearOnce(LinearCall call, const Kernels& kernels, const Threads& threads, int filling) {
  const int64_t elements = call.rows * call.out_features;
  const Array<uint8_t> y =
      MakeArray<uint8_t>(elements * static_cast<int64_t>(SizeOf(call.dtype)), filling);
  call.y = y.get();
  Tasks tasks(threads.at_once);
  Team team(tasks.schedule(), threads.count);
  JAX_W4A8_CHECK(RunLinear(call, kernels, team), "no memory");
  Result result;
  AddFloats(call.dtype, y.get(), elements, &result);
  return result;
}

void FuzzLinear(Bytes& bytes, bool grouped) {
  LinearCall call = {};
  call.dtype = bytes.Pick(kDTypes);
  call.rows = bytes.Rarely(16) ? bytes.Int(0, 300) : bytes.Int(0, 20);
  call.matrices = grouped ? bytes.Int(0, 4) : 1;
  const Groups in(bytes);
  call.features = in.inputs() - bytes.Int(0, std::min<int64_t>(in.width - 1, 255));
  call.out_features = bytes.Int(1, 100);
  call.symmetric = bytes.Flag();
  const Threads threads(bytes);
  const Floats kind = bytes.Pick(kFloatKinds);
  const bool absent = bytes.Flag();
  const int64_t alone = call.rows > 0 ? bytes.Int(0, call.rows - 1) : 0;
  Random random(bytes.Take(4));

  const Stack stack(bytes, random, call.matrices, (call.out_features + 15) / 16, in.count,
                    in.width);
  const Array<uint8_t> x = MakeRounded(random, kind, call.dtype, call.rows * call.features);
  const Array<int32_t> ids = MakeIds(random, call.rows, call.matrices, absent);
  call.x = x.get();
  call.weights = stack.first();
  call.ids = grouped ? ids.get() : nullptr;
  Compare("RunLinear", [&](const Kernels& kernels, int filling) {
    return RunLinearOnce(call, kernels, threads, filling);
  });
  if (call.rows == 0) return;
  const ScopedFloatEnv float_env;
  const Result all = RunLinearOnce(call, ActiveKernels(), threads, 0);
  LinearCall one = call;
  one.rows = 1;
  one.x = x.get() + static_cast<size_t>(alone * call.features) * SizeOf(call.dtype);
  if (grouped) one.ids += alone;
  CheckAlone(all, RunLinearOnce(one, ActiveKernels(), threads, 0xff), alone, "RunLinear");
}

Result RunAttendOnce(AttendCall call, const Kernels& kernels, const Threads& threads, int filling) {
  const int64_t elements = call.batch * call.tokens * call.heads * call.width;
  const Array<float> out = MakeArray<float>(elements, filling);
  call.out = out.get();
  Tasks tasks(threads.at_once);
  Team team(tasks.schedule(), threads.count);
  JAX_W4A8_CHECK(RunAttend(call, kernels, team), "no memory");
  Result result;
  AddFloats(DType::kF32, out.get(), elements, &result);
  return result;
}

void FuzzAttention(Bytes& bytes) {
  AttendCall call = {};
  const Heads heads(bytes);
  call.batch = bytes.Int(0, 3);
  call.slots = kAttendStep * (bytes.Rarely(4) ? bytes.Int(0, 14) : bytes.Int(1, 5));
  const int64_t most_tokens = bytes.Rarely(16) ? bytes.Int(0, 300) : bytes.Int(0, 12);
  call.tokens = heads.Fewer(most_tokens, call.slots);
  call.heads = heads.heads();
  call.kv_heads = heads.kv_heads;
  call.dim = heads.dim;
  call.width = heads.width;
  call.window = MakeWindow(bytes);
  call.scale = MakeScale(bytes);
  const bool padded = bytes.Flag();
  const Threads threads(bytes);
  const Floats queries_kind = bytes.Pick(kFloatKinds), keys_kind = bytes.Pick(kFloatKinds),
               values_kind = bytes.Pick(kFloatKinds), sinks_kind = bytes.Pick(kFloatKinds);
  const bool with_sinks = bytes.Flag();
  Random random(bytes.Take(4));
  const Array<float> queries =
      MakeFloats(random, queries_kind, call.batch * call.tokens * call.heads * call.dim);
  const Array<float> keys =
      MakeFloats(random, keys_kind, call.batch * call.kv_heads * call.dim * call.slots);
  const Array<float> values =
      MakeFloats(random, values_kind, call.batch * call.kv_heads * call.slots * call.width);
  const Array<float> sinks = MakeFloats(random, sinks_kind, call.heads);
  const Array<int32_t> starts = MakeArray<int32_t>(call.batch, 0);
  const Array<int32_t> lengths = MakeArray<int32_t>(call.batch, 0);
  const int64_t most = std::min(call.tokens, call.slots);
  for (size_t row = 0; row < static_cast<size_t>(call.batch); ++row) {
    lengths[row] = static_cast<int32_t>(padded ? random.Int(0, most) : most);
    starts[row] = static_cast<int32_t>(random.Int(0, call.slots - lengths[row]));
  }
  call.queries = queries.get();
  call.keys = keys.get();
  call.values = values.get();
  call.starts = starts.get();
  call.lengths = lengths.get();
  call.sinks = with_sinks ? sinks.get() : nullptr;
  Compare("RunAttend", [&](const Kernels& kernels, int filling) {
    return RunAttendOnce(call, kernels, threads, filling);
  });
  const ScopedFloatEnv float_env;
  const Result all = RunAttendOnce(call, ActiveKernels(), threads, 0);
  for (int64_t row = 0; row < call.batch; ++row) {
    if (lengths[static_cast<size_t>(row)] == 0) continue;
    const int64_t token = random.Int(0, lengths[static_cast<size_t>(row)] - 1);
    const int64_t place = row * call.tokens + token;
    const int32_t start = starts[static_cast<size_t>(row)] + static_cast<int32_t>(token);
    const int32_t length = 1;
    AttendCall one = call;
    one.batch = one.tokens = 1;
    one.queries += place * call.heads * call.dim;
    one.keys += row * call.kv_heads * call.dim * call.slots;
    one.values += row * call.kv_heads * call.slots * call.width;
    one.starts = &start;
    one.lengths = &length;
    CheckAlone(all, RunAttendOnce(one, ActiveKernels(), threads, 0xff), place, "RunAttend");
  }
}

}  // namespace
}  // namespace jax_w4a8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_w4a8;
  Bytes bytes(data, size);
  switch (static_cast<Subject>(bytes.Int(0, kSubjects - 1))) {
    case kToFloat:
      FuzzToFloat(bytes);
      break;
    case kQuantizeRow:
      FuzzQuantizeRow(bytes);
      break;
    case kMatmul:
      FuzzMatmul(bytes);
      break;
    case kCombine:
      FuzzCombine(bytes);
      break;
    case kMoe:
      FuzzMoe(bytes);
      break;
    case kLinear:
      FuzzLinear(bytes, bytes.Flag());
      break;
    case kAttend:
      FuzzAttend(bytes);
      break;
    default:
      FuzzAttention(bytes);
  }
  return 0;
}
