// Every handler's decoding and checking: call frames of all kinds of shapes, dtypes and attributes,
// of which an independent statement of the rules says whether they must be refused. A frame that is
// taken has to fill its whole result with the same bits whatever memory held before.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "bytes.h"
#include "check.h"
#include "fake_xla.h"
#include "handlers.h"
#include "scratch.h"

namespace jax_w4a8 {
namespace {

using Shape = std::vector<int64_t>;

enum HandlerKind { kFused, kApply, kCombine, kLinear, kGrouped, kAttend, kHandlers };

XLA_FFI_Handler* const kSymbols[kHandlers] = {JaxW4A8FusedExperts,  JaxW4A8ApplyExperts,
                                              JaxW4A8Combine,       JaxW4A8Linear,
                                              JaxW4A8GroupedLinear, JaxW4A8Attend};
constexpr size_t kArgCounts[kHandlers] = {11, 11, 2, 5, 6, 6};

constexpr int64_t kOddSizes[] = {0,
                                 1,
                                 -1,
                                 -16,
                                 2,
                                 15,
                                 16,
                                 17,
                                 256,
                                 int64_t{1} << 20,
                                 (int64_t{1} << 31) - 1,
                                 int64_t{1} << 31,
                                 (int64_t{1} << 32) + 1,
                                 int64_t{1} << 40,
                                 int64_t{1} << 59,
                                 int64_t{1} << 62,
                                 INT64_MAX,
                                 INT64_MIN};

// ---------------------------------------------------------------------------------------------------------
// Frames

int64_t Size(Bytes& bytes, int64_t low, int64_t high) {
  return bytes.Rarely(24) ? bytes.Pick(kOddSizes) : bytes.Int(low, high);
}

int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b > 0); }

void Add(std::vector<Tensor>& list, XLA_FFI_DataType dtype, Shape dims) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.dims = std::move(dims);
  list.push_back(std::move(tensor));
}

// The four arrays of packed weights with `blocks` blocks for `inputs` inputs.
void AddWeights(Bytes& bytes, Call* call, std::optional<int64_t> stack, int64_t blocks,
                int64_t inputs) {
  constexpr int64_t kOddWidths[] = {0, 16, 48, 1 << 20, (1 << 20) + 32, int64_t{1} << 60};
  const int64_t width = bytes.Rarely(24) ? bytes.Pick(kOddWidths) : 32 * bytes.Int(1, 3);
  const int64_t groups = width > 0 ? CeilDiv(inputs, width) : 1;
  const auto stacked = [&](Shape dims) {
    if (stack) dims.insert(dims.begin(), *stack);
    return dims;
  };
  constexpr XLA_FFI_DataType kScales[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16};
  Add(call->args, XLA_FFI_DataType_U8, stacked({blocks, groups, 8 * (width % (INT64_MAX / 8))}));
  Add(call->args, bytes.Pick(kScales), stacked({blocks, groups, 16}));
  Add(call->args, XLA_FFI_DataType_F32, stacked({blocks, 16}));
  Add(call->args, XLA_FFI_DataType_F32, stacked({blocks, 16}));
}

constexpr XLA_FFI_DataType kFloatTypes[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                            XLA_FFI_DataType_F16};

uint32_t BitsOf(float value) {
  uint32_t pattern;
  memcpy(&pattern, &value, sizeof(value));
  return pattern;
}

void MakeExperts(Bytes& bytes, bool combined, Call* call) {
  const int64_t tokens = Size(bytes, 0, 6), top_k = Size(bytes, 0, 3);
  const int64_t experts = Size(bytes, 0, 4);
  const int64_t hidden = Size(bytes, 1, 100), inner = Size(bytes, 1, 100);
  const XLA_FFI_DataType dtype = bytes.Pick(kFloatTypes);
  Add(call->args, dtype, {tokens, hidden});
  Add(call->args, XLA_FFI_DataType_F32, {tokens, top_k});
  Add(call->args, XLA_FFI_DataType_S32, {tokens, top_k});
  AddWeights(bytes, call, experts, 2 * CeilDiv(inner, 16), hidden);
  AddWeights(bytes, call, experts, CeilDiv(hidden, 16), inner);
  const int64_t activation = bytes.Rarely(16) ? bytes.Int(-3, 9) : bytes.Int(0, 3);
  constexpr float kLimits[] = {7, 0, -1, __builtin_inff(), __builtin_nanf("")};
  const XLA_FFI_AttrType scalar = XLA_FFI_AttrType_SCALAR;
  call->attrs = {{"activation", scalar, XLA_FFI_DataType_S32, static_cast<uint32_t>(activation)},
                 {"alpha", scalar, XLA_FFI_DataType_F32, BitsOf(bytes.Pick(kLimits))},
                 {"limit", scalar, XLA_FFI_DataType_F32, BitsOf(bytes.Pick(kLimits))},
                 {"symmetric", scalar, XLA_FFI_DataType_PRED, bytes.Flag()},
                 {"weight_on_input", scalar, XLA_FFI_DataType_PRED, bytes.Rarely(4)}};
  if (combined) {
    Add(call->rets, dtype, {tokens, hidden});
  } else {
    Add(call->rets, XLA_FFI_DataType_F32, {tokens, top_k, hidden});
  }
}

void MakeCombine(Bytes& bytes, Call* call) {
  const int64_t tokens = Size(bytes, 0, 6), top_k = Size(bytes, 0, 3), hidden = Size(bytes, 0, 40);
  Add(call->args, XLA_FFI_DataType_F32, {tokens, top_k, hidden});
  Add(call->args, XLA_FFI_DataType_F32, {tokens, top_k});
  Add(call->rets, bytes.Pick(kFloatTypes), {tokens, hidden});
}

void MakeLinear(Bytes& bytes, bool grouped, Call* call) {
  const int64_t rows = Size(bytes, 0, 8), matrices = Size(bytes, 0, 4);
  const int64_t features = Size(bytes, 1, 100), columns = Size(bytes, 1, 60);
  const XLA_FFI_DataType dtype = bytes.Pick(kFloatTypes);
  Add(call->args, dtype, {rows, features});
  if (grouped) Add(call->args, XLA_FFI_DataType_S32, {rows});
  AddWeights(bytes, call, grouped ? std::optional(matrices) : std::nullopt, CeilDiv(columns, 16),
             features);
  call->attrs = {{"symmetric", XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_PRED, bytes.Flag()}};
  Add(call->rets, dtype, {rows, columns});
}

void MakeAttend(Bytes& bytes, Call* call) {
  const XLA_FFI_DataType f32 = XLA_FFI_DataType_F32, s32 = XLA_FFI_DataType_S32;
  constexpr int64_t kOddSlots[] = {0, 63, 65, 1 << 10, int64_t{1} << 32, int64_t{1} << 62};
  constexpr int64_t kOddWidths[] = {0, 1, 24, 1 << 10, int64_t{1} << 59};
  constexpr int32_t kWindows[] = {0, 0, 1, 17, 300, INT32_MAX, -1, INT32_MIN};
  constexpr float kScales[] = {0.125f, 1, 0, -2, 1e38f, __builtin_inff(), __builtin_nanf("")};
  const int64_t batch = Size(bytes, 0, 3), tokens = Size(bytes, 0, 5);
  const int64_t kv_heads = Size(bytes, 1, 3), group = Size(bytes, 1, 4);
  const bool small =
      std::clamp<int64_t>(kv_heads, 1, 3) == kv_heads && std::clamp<int64_t>(group, 1, 4) == group;
  const int64_t heads = bytes.Rarely(24) || !small ? group : kv_heads * group;
  const int64_t dim = Size(bytes, 0, 24);
  const int64_t slots = bytes.Rarely(16) ? bytes.Pick(kOddSlots) : 64 * bytes.Int(1, 5);
  const int64_t width = bytes.Rarely(16) ? bytes.Pick(kOddWidths) : 16 * bytes.Int(1, 3);
  Add(call->args, f32, {batch, tokens, heads, dim});
  Add(call->args, f32, {batch, kv_heads, dim, slots});
  Add(call->args, f32, {batch, kv_heads, slots, width});
  Add(call->args, s32, {batch});
  Add(call->args, s32, {batch});
  Add(call->args, f32, bytes.Flag() ? Shape{heads} : Shape{0});
  const int32_t window = bytes.Pick(kWindows);
  call->attrs = {
      {"scale", XLA_FFI_AttrType_SCALAR, f32, BitsOf(bytes.Pick(kScales))},
      {"window", XLA_FFI_AttrType_SCALAR, s32, static_cast<uint32_t>(window)},
  };
  Add(call->rets, f32, {batch, tokens, heads, width});
}

void MutateTensor(Bytes& bytes, Tensor& tensor) {
  constexpr XLA_FFI_DataType kTypes[] = {
      XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16,  XLA_FFI_DataType_F64,
      XLA_FFI_DataType_S32, XLA_FFI_DataType_U8,   XLA_FFI_DataType_S8,   XLA_FFI_DataType_S64,
      XLA_FFI_DataType_U32, XLA_FFI_DataType_S4,   XLA_FFI_DataType_PRED, XLA_FFI_DataType_INVALID};
  const int64_t axis =
      tensor.dims.empty() ? -1 : bytes.Int(0, static_cast<int64_t>(tensor.dims.size()) - 1);
  switch (bytes.Int(0, 5)) {
    case 0:
      tensor.dtype = bytes.Pick(kTypes);
      return;
    case 1:
      if (axis >= 0) tensor.dims.erase(tensor.dims.begin() + axis);
      return;
    case 2:
      tensor.dims.insert(tensor.dims.begin() + std::max<int64_t>(axis, 0), Size(bytes, 0, 3));
      return;
    case 3:
      if (axis >= 0) tensor.dims[static_cast<size_t>(axis)] = bytes.Pick(kOddSizes);
      return;
    default: {
      if (axis < 0) return;
      int64_t& size = tensor.dims[static_cast<size_t>(axis)];
      const int64_t step = bytes.Int(-2, 2);
      if (step < 0 ? size >= INT64_MIN - step : size <= INT64_MAX - step) size += step;
    }
  }
}

void MutateAttribute(Bytes& bytes, Call* call) {
  if (call->attrs.empty()) return;
  const int64_t index = bytes.Int(0, static_cast<int64_t>(call->attrs.size()) - 1);
  Attribute& attr = call->attrs[static_cast<size_t>(index)];
  constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_S32, XLA_FFI_DataType_S64,
                                         XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
                                         XLA_FFI_DataType_PRED};
  switch (bytes.Int(0, 3)) {
    case 0:
      call->attrs.erase(call->attrs.begin() + index);
      return;
    case 1:
      attr.name += static_cast<char>(bytes.Int('a', 'z'));
      return;
    case 2:
      attr.dtype = bytes.Pick(kTypes);
      if (attr.dtype == XLA_FFI_DataType_PRED) attr.value &= 1;
      return;
    default:
      attr.type = XLA_FFI_AttrType_ARRAY;
  }
}

void Mutate(Bytes& bytes, Call* call) {
  const int64_t tensors = static_cast<int64_t>(call->args.size() + call->rets.size());
  switch (bytes.Int(0, 15)) {
    case 0:
      return MutateAttribute(bytes, call);
    case 1:
      if (call->args.size() > 1) call->args.erase(call->args.begin() + bytes.Int(0, 1));
      return;
    case 2:
      return Add(call->args, XLA_FFI_DataType_F32, {Size(bytes, 0, 3)});
    case 3:
      return Add(call->rets, XLA_FFI_DataType_F32, {Size(bytes, 0, 3)});
    case 4:
      call->rets.clear();
      return;
    case 5:
      call->stage = static_cast<XLA_FFI_ExecutionStage>(bytes.Int(0, 3));
      return;
    default:
      if (tensors > 0) {
        const size_t index = static_cast<size_t>(bytes.Int(0, tensors - 1));
        const size_t args = call->args.size();
        MutateTensor(bytes, index < args ? call->args[index] : call->rets[index - args]);
      }
  }
}

// What integers of an operand may be.
struct Range {
  int64_t low, high;
};

// Of ids and spans; of nothing where the operand isn't one of them, or there is none.
std::optional<Range> RangeOf(HandlerKind kind, const Call& call, size_t operand) {
  const auto size = [&](size_t tensor, size_t axis) {
    const bool there = tensor < call.args.size() && axis < call.args[tensor].dims.size();
    return there ? std::clamp<int64_t>(call.args[tensor].dims[axis], 0, 1 << 20) : 0;
  };
  if (kind == kAttend) {
    if (operand == 3) return Range{0, std::max<int64_t>(size(1, 3) - size(0, 1), 0)};
    if (operand == 4) return Range{0, size(0, 1)};
    return {};
  }
  const bool ids =
      operand == 1 ? kind == kGrouped : operand == 2 && (kind == kFused || kind == kApply);
  if (!ids) return {};
  return Range{-1, std::min<int64_t>(size(operand == 1 ? 2 : 3, 0), 4) - 1};
}

void FillOperand(Bytes& bytes, Random& random, const std::optional<Range>& range, Tensor& tensor) {
  if (range && tensor.dtype == XLA_FFI_DataType_S32) {
    const bool wild = bytes.Rarely(8);
    for (int64_t i = 0; i < tensor.bytes / 4; ++i) {
      constexpr int32_t kWild[] = {-1, -2, INT32_MIN, INT32_MAX, 0, 1, 4, 5};
      const int32_t value = wild ? kWild[random.Int(0, 7)]
                                 : static_cast<int32_t>(random.Int(range->low, range->high));
      memcpy(tensor.data.get() + 4 * i, &value, 4);
    }
    return;
  }
  const Floats kind = bytes.Pick(kFloatKinds);
  const bool floats = tensor.dtype == XLA_FFI_DataType_F32;
  for (int64_t i = 0; i < tensor.bytes; i += floats ? 4 : 1) {
    const float value = floats ? MakeFloat(random, kind) : 0;
    if (floats) {
      memcpy(tensor.data.get() + i, &value, 4);
    } else {
      tensor.data[static_cast<size_t>(i)] = static_cast<uint8_t>(random.Next() >> 56);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// The rules, stated once more. Products of sizes are taken in 128 bits.

enum class Verdict { kRefused, kTaken, kNoMemory };

using Wide = __int128;
constexpr int64_t kMost32 = INT32_MAX;

bool Is(const Tensor& tensor, XLA_FFI_DataType dtype, const Shape& shape) {
  return tensor.dtype == dtype && tensor.dims == shape &&
         std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; });
}

bool IsFloat(const Tensor& tensor) {
  return std::count(std::begin(kFloatTypes), std::end(kFloatTypes), tensor.dtype) > 0;
}

struct Weights {
  int64_t blocks = 0, groups = 0, width = 0;
  Wide inputs() const { return Wide{groups} * width; }
  bool Takes(Wide count) const { return inputs() >= count && inputs() - width < count; }
};

// `part` is the first of the four arrays.
std::optional<Weights> WeightsOf(const Tensor* part, std::optional<int64_t> stack) {
  Shape dims = part[0].dims;
  if (part[0].dtype != XLA_FFI_DataType_U8) return {};
  if (stack) {
    if (dims.empty() || dims[0] != *stack) return {};
    dims.erase(dims.begin());
  }
  if (dims.size() != 3 || dims[0] < 1 || dims[1] < 1 || dims[2] < 1 || dims[2] % 256) return {};
  const Weights w = {dims[0], dims[1], dims[2] / 8};
  if (w.width > 1 << 20 || w.inputs() > kMost32 || Wide{w.blocks} * 16 > kMost32) return {};
  Shape scale = {w.blocks, w.groups, 16}, sums = {w.blocks, 16};
  if (stack) {
    scale.insert(scale.begin(), *stack);
    sums.insert(sums.begin(), *stack);
  }
  if (!Is(part[1], XLA_FFI_DataType_F32, scale) && !Is(part[1], XLA_FFI_DataType_BF16, scale))
    return {};
  if (!Is(part[2], XLA_FFI_DataType_F32, sums) || !Is(part[3], XLA_FFI_DataType_F32, sums))
    return {};
  return w;
}

int32_t IntAt(const Tensor& tensor, int64_t index) {
  int32_t value;
  memcpy(&value, tensor.data.get() + 4 * index, 4);
  return value;
}

bool IdsInRange(const Tensor& ids, int64_t experts) {
  for (int64_t i = 0; i < ids.bytes / 4; ++i) {
    if (IntAt(ids, i) < -1 || IntAt(ids, i) >= experts) return false;
  }
  return true;
}

bool SpansInRange(const Call& call) {
  for (int64_t i = 0; i < call.args[3].bytes / 4; ++i) {
    const int64_t start = IntAt(call.args[3], i), length = IntAt(call.args[4], i);
    if (start < 0 || length < 0 || length > call.args[0].dims[1] ||
        start + length > call.args[1].dims[3])
      return false;
  }
  return true;
}

bool HasAttributes(const Call& call, const std::vector<Attribute>& wanted) {
  return std::equal(call.attrs.begin(), call.attrs.end(), wanted.begin(), wanted.end(),
                    [](const Attribute& a, const Attribute& b) {
                      return a.name == b.name && a.type == b.type && a.dtype == b.dtype;
                    });
}

bool ExpertsFit(const Call& call, bool combined) {
  const XLA_FFI_AttrType scalar = XLA_FFI_AttrType_SCALAR;
  if (!HasAttributes(call, {{"activation", scalar, XLA_FFI_DataType_S32},
                            {"alpha", scalar, XLA_FFI_DataType_F32},
                            {"limit", scalar, XLA_FFI_DataType_F32},
                            {"symmetric", scalar, XLA_FFI_DataType_PRED},
                            {"weight_on_input", scalar, XLA_FFI_DataType_PRED}}))
    return false;
  const Tensor& x = call.args[0];
  const Tensor& ids = call.args[2];
  if (x.dims.size() != 2 || ids.dims.size() != 2 || call.args[3].dims.size() != 4) return false;
  const int64_t tokens = x.dims[0], hidden = x.dims[1], top_k = ids.dims[1];
  const int64_t experts = call.args[3].dims[0];
  const auto w13 = WeightsOf(&call.args[3], experts), w2 = WeightsOf(&call.args[7], experts);
  if (!w13 || !w2 || experts < 0) return false;
  const bool operands = IsFloat(x) && Is(x, x.dtype, {tokens, hidden}) &&
                        Is(ids, XLA_FFI_DataType_S32, {tokens, top_k}) &&
                        Is(call.args[1], XLA_FFI_DataType_F32, {tokens, top_k});
  const bool result = combined ? Is(call.rets[0], x.dtype, {tokens, hidden})
                               : Is(call.rets[0], XLA_FFI_DataType_F32, {tokens, top_k, hidden});
  // Some number of intermediate channels that fills w13's last block ends in w2's last group.
  const Wide inner = Wide{w13->blocks} * 8;
  const bool chained = w13->Takes(hidden) && w13->blocks % 2 == 0 && w2->inputs() > inner - 16 &&
                       w2->inputs() - w2->width < inner && w2->blocks == CeilDiv(hidden, 16);
  return operands && result && chained && call.attrs[0].value <= 3 &&
         (!call.attrs[4].value || top_k == 1) && Wide{tokens} * top_k <= kMost32;
}

bool CombineFits(const Call& call) {
  const Tensor& slots = call.args[0];
  if (slots.dims.size() != 3) return false;
  const Shape& d = slots.dims;
  return Is(slots, XLA_FFI_DataType_F32, d) &&
         Is(call.args[1], XLA_FFI_DataType_F32, {d[0], d[1]}) && IsFloat(call.rets[0]) &&
         Is(call.rets[0], call.rets[0].dtype, {d[0], d[2]});
}

bool LinearFits(const Call& call, bool grouped) {
  if (!HasAttributes(call, {{"symmetric", XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_PRED}}))
    return false;
  const Tensor& x = call.args[0];
  const Tensor& y = call.rets[0];
  const Tensor* codes = &call.args[grouped ? 2 : 1];
  if (x.dims.size() != 2 || y.dims.size() != 2) return false;
  std::optional<int64_t> stack;
  if (grouped) {
    if (codes->dims.size() != 4 || codes->dims[0] < 0) return false;
    if (!Is(call.args[1], XLA_FFI_DataType_S32, {x.dims[0]})) return false;
    stack = codes->dims[0];
  }
  const auto w = WeightsOf(codes, stack);
  return w && IsFloat(x) && Is(x, x.dtype, x.dims) && Is(y, x.dtype, y.dims) &&
         y.dims[0] == x.dims[0] && w->Takes(x.dims[1]) && w->blocks == CeilDiv(y.dims[1], 16) &&
         x.dims[0] <= kMost32;
}

bool AttendFits(const Call& call) {
  if (!HasAttributes(call, {{"scale", XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_F32},
                            {"window", XLA_FFI_AttrType_SCALAR, XLA_FFI_DataType_S32}}))
    return false;
  const XLA_FFI_DataType f32 = XLA_FFI_DataType_F32, s32 = XLA_FFI_DataType_S32;
  const Shape &q = call.args[0].dims, &v = call.args[2].dims, &sinks = call.args[5].dims;
  if (q.size() != 4 || v.size() != 4) return false;
  const int64_t heads = q[2], kv_heads = v[1], slots = v[2], width = v[3];
  const bool no_sinks = std::count(sinks.begin(), sinks.end(), 0) > 0;
  return Is(call.args[0], f32, q) && Is(call.args[1], f32, {q[0], kv_heads, q[3], slots}) &&
         Is(call.args[2], f32, {q[0], kv_heads, slots, width}) && Is(call.args[3], s32, {q[0]}) &&
         Is(call.args[4], s32, {q[0]}) && call.args[5].dtype == f32 &&
         (no_sinks || Is(call.args[5], f32, {heads})) &&
         Is(call.rets[0], f32, {q[0], q[1], heads, width}) && kv_heads > 0 &&
         heads % kv_heads == 0 && slots % 64 == 0 && width % 16 == 0 &&
         static_cast<int32_t>(call.attrs[1].value) >= 0;
}

bool HasGhosts(const Call& call) {
  const auto ghost = [](const Tensor& tensor) { return tensor.ghost; };
  return std::any_of(call.args.begin(), call.args.end(), ghost) ||
         std::any_of(call.rets.begin(), call.rets.end(), ghost);
}

Verdict Judge(HandlerKind kind, const Call& call) {
  if (call.stage != XLA_FFI_ExecutionStage_EXECUTE || call.args.size() != kArgCounts[kind] ||
      call.rets.size() != 1)
    return Verdict::kRefused;
  bool fits = false;
  const Tensor* ids = nullptr;
  int64_t experts = 0;
  if (kind == kCombine) {
    fits = CombineFits(call);
  } else if (kind == kLinear || kind == kGrouped) {
    fits = LinearFits(call, kind == kGrouped);
  } else if (kind == kAttend) {
    fits = AttendFits(call);
  } else {
    fits = ExpertsFit(call, kind == kFused);
  }
  if (!fits) return Verdict::kRefused;
  if (HasGhosts(call)) return Verdict::kNoMemory;
  if (kind == kAttend && !SpansInRange(call)) return Verdict::kRefused;
  if (kind == kGrouped) ids = &call.args[1];
  if (kind == kFused || kind == kApply) ids = &call.args[2];
  if (ids) experts = call.args[kind == kGrouped ? 2 : 3].dims[0];
  return !ids || IdsInRange(*ids, experts) ? Verdict::kTaken : Verdict::kRefused;
}

// ---------------------------------------------------------------------------------------------------------

FakePool MakePool(Bytes& bytes) {
  constexpr int64_t kThreads[] = {1, 2, 3, 7, 0, -1, 200};
  FakePool pool;
  pool.threads = bytes.Pick(kThreads);
  pool.available = !bytes.Rarely(16);
  if (bytes.Rarely(16)) pool.schedule = [](const std::function<void()>& task) { task(); };
  return pool;
}

// Runs with results and scratch full of `filling`; returns the bytes of all results.
std::vector<uint8_t> RunFilled(Call* call, HandlerKind kind, const FakePool& pool, int filling,
                               Outcome* outcome) {
  ReleaseScratch();
  {
    const Scratch scratch(1 << 17);
    if (scratch.data()) memset(scratch.data(), filling, 1 << 17);
  }
  for (Tensor& ret : call->rets) {
    if (ret.bytes) memset(ret.data.get(), filling, static_cast<size_t>(ret.bytes));
  }
  *outcome = call->Run(kSymbols[kind], pool);
  std::vector<uint8_t> all;
  for (const Tensor& ret : call->rets)
    all.insert(all.end(), ret.data.get(), ret.data.get() + ret.bytes);
  return all;
}

void FuzzHandler(Bytes& bytes) {
  const HandlerKind kind = static_cast<HandlerKind>(bytes.Int(0, kHandlers - 1));
  Call call;
  switch (kind) {
    case kCombine:
      MakeCombine(bytes, &call);
      break;
    case kLinear:
    case kGrouped:
      MakeLinear(bytes, kind == kGrouped, &call);
      break;
    case kAttend:
      MakeAttend(bytes, &call);
      break;
    default:
      MakeExperts(bytes, kind == kFused, &call);
  }
  for (int64_t mutations = bytes.Int(0, 4) / 2; mutations > 0; --mutations) Mutate(bytes, &call);
  const FakePool pool = MakePool(bytes);
  const bool null_if_empty = bytes.Flag();
  Random random(bytes.Take(4));
  for (size_t i = 0; i < call.args.size(); ++i) {
    call.args[i].Allocate(null_if_empty);
    FillOperand(bytes, random, RangeOf(kind, call, i), call.args[i]);
  }
  for (Tensor& ret : call.rets) ret.Allocate(null_if_empty);

  const Verdict verdict = Judge(kind, call);
  if (verdict == Verdict::kNoMemory) return;
  Outcome outcome, second;
  const std::vector<uint8_t> first_bits = RunFilled(&call, kind, pool, 0x00, &outcome);
  if (verdict == Verdict::kRefused) {
    JAX_W4A8_CHECK(outcome.code == XLA_FFI_Error_Code_INVALID_ARGUMENT, "handler %d, code %d: %s",
                   kind, outcome.code, outcome.message.c_str());
    JAX_W4A8_CHECK(!outcome.message.empty(), "handler %d", kind);
    return;
  }
  if (outcome.code == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED) return;
  JAX_W4A8_CHECK(outcome.code == XLA_FFI_Error_Code_OK, "handler %d, code %d: %s", kind,
                 outcome.code, outcome.message.c_str());
  const std::vector<uint8_t> second_bits = RunFilled(&call, kind, pool, 0xff, &second);
  JAX_W4A8_CHECK(second.code == XLA_FFI_Error_Code_OK, "handler %d", kind);
  JAX_W4A8_CHECK(first_bits == second_bits, "handler %d: result depends on what memory held", kind);
}

}  // namespace
}  // namespace jax_w4a8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  jax_w4a8::Bytes bytes(data, size);
  jax_w4a8::FuzzHandler(bytes);
  return 0;
}
