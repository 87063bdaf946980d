// FFI bindings: decode and check buffers, then call. Nothing past the checks can fail for its
// arguments.
#include "handlers.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "attention.h"
#include "float_env.h"
#include "kernels/kernels.h"
#include "layout.h"
#include "matmul.h"
#include "moe.h"
#include "parallel.h"

namespace jax_w4a8 {
namespace {

namespace ffi = ::xla::ffi;

using ffi::AnyBuffer;
using ffi::Error;

#define JAX_W4A8_RETURN_IF_ERROR(expression)                       \
  do {                                                             \
    if (Error error = (expression); error.failure()) return error; \
  } while (false)

constexpr int64_t kAnySize = -1;
// Of tokens' slots, and of channels and inputs of a matrix. Arrays with an axis of size 0 may claim
// any other sizes; up to this one, products of two sizes and a small factor fit 64 bits.
constexpr int64_t kMostOfAKind = std::numeric_limits<int32_t>::max();

std::string ShapeText(const AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::string ShapeText(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += size == kAnySize ? "*" : std::to_string(size);
  }
  return text + "]";
}

Error CheckShape(const char* name, const AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  bool fits = dims.size() == shape.size();
  size_t axis = 0;
  for (int64_t size : shape) {
    fits = fits && dims[axis] >= 0 && (size == kAnySize || dims[axis] == size);
    ++axis;
  }
  if (fits) return Error::Success();
  return Error::InvalidArgument(std::string(name) + " must have shape " + ShapeText(shape) +
                                ", got " + ShapeText(buffer));
}

Error CheckDType(const char* name, const AnyBuffer& buffer, ffi::DataType dtype,
                 const char* dtype_name) {
  if (buffer.element_type() == dtype) return Error::Success();
  return Error::InvalidArgument(std::string(name) + " must be " + dtype_name);
}

Error DecodeDType(const char* name, const AnyBuffer& buffer, DType* dtype) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return Error::Success();
    default:
      return Error::InvalidArgument(std::string(name) + " must be float32, bfloat16 or float16");
  }
}

// The four arrays of packed weights, as they follow each other among the operands.
struct WeightBuffers {
  const char* name;
  AnyBuffer codes;
  AnyBuffer scale;
  AnyBuffer scaled_sum;
  AnyBuffer bias;
};

// Checks one packed matrix, or a stack of `stack` of them (kAnySize: none), and that it takes
// `inputs` (kAnySize: any number).
Error DecodeWeights(const WeightBuffers& buffers, int64_t stack, int64_t inputs,
                    PackedMatrix* out) {
  // Sums of so many products, up to 15 x 128 each with stored codes, fit 32 bits;
  // MOST_GROUP_INPUTS of quantization.py.
  constexpr int64_t kWidestGroup = int64_t{1} << 20;
  const std::string name = buffers.name;
  const auto dims = buffers.codes.dimensions();
  const bool stacked = stack != kAnySize;
  const size_t axis = stacked ? 1 : 0;
  JAX_W4A8_RETURN_IF_ERROR(
      CheckDType((name + ".codes").c_str(), buffers.codes, ffi::DataType::U8, "uint8"));
  if (dims.size() != axis + 3 || (stacked && dims[0] != stack)) {
    return Error::InvalidArgument(name + ".codes must have shape " + (stacked ? "[E, " : "[") +
                                  "blocks, groups, bytes], got " + ShapeText(buffers.codes));
  }
  out->blocks = dims[axis];
  out->groups = dims[axis + 1];
  out->group_width = dims[axis + 2] / (kRunBytes / kRunInputs);
  if (out->group_width > kWidestGroup) {
    return Error::InvalidArgument(name + ".codes has groups of " +
                                  std::to_string(out->group_width) + " inputs, more than the " +
                                  std::to_string(kWidestGroup) +
                                  " whose sums are exact in 32 bits: " + ShapeText(buffers.codes));
  }
  const bool fits = dims[axis + 2] > 0 &&
                    dims[axis + 2] % (kRunBytes / kRunInputs * kChunkInputs) == 0 &&
                    out->blocks > 0 && out->blocks <= kMostOfAKind / kBlockChannels &&
                    out->groups > 0 && out->groups <= kMostOfAKind / out->group_width &&
                    (inputs == kAnySize ||
                     (out->inputs() >= inputs && out->inputs() - out->group_width < inputs));
  if (!fits) {
    return Error::InvalidArgument(name + ".codes doesn't hold whole groups for its inputs, got " +
                                  ShapeText(buffers.codes));
  }
  JAX_W4A8_RETURN_IF_ERROR(
      DecodeDType((name + ".scale").c_str(), buffers.scale, &out->scale_dtype));
  if (out->scale_dtype == DType::kF16) {
    return Error::InvalidArgument(name + ".scale must be float32 or bfloat16");
  }
  for (const auto& [part, buffer] :
       {std::pair(".scaled_sum", &buffers.scaled_sum), std::pair(".bias", &buffers.bias)}) {
    const std::string full = name + part;
    JAX_W4A8_RETURN_IF_ERROR(CheckDType(full.c_str(), *buffer, ffi::DataType::F32, "float32"));
    JAX_W4A8_RETURN_IF_ERROR(
        stacked ? CheckShape(full.c_str(), *buffer, {stack, out->blocks, kBlockChannels})
                : CheckShape(full.c_str(), *buffer, {out->blocks, kBlockChannels}));
  }
  const std::string scale = name + ".scale";
  JAX_W4A8_RETURN_IF_ERROR(stacked ? CheckShape(scale.c_str(), buffers.scale,
                                                {stack, out->blocks, out->groups, kBlockChannels})
                                   : CheckShape(scale.c_str(), buffers.scale,
                                                {out->blocks, out->groups, kBlockChannels}));
  out->codes = static_cast<const uint8_t*>(buffers.codes.untyped_data());
  out->scale = buffers.scale.untyped_data();
  out->scaled_sum = static_cast<const float*>(buffers.scaled_sum.untyped_data());
  out->bias = static_cast<const float*>(buffers.bias.untyped_data());
  return Error::Success();
}

bool HoldsChannels(const PackedMatrix& weights, int64_t channels) {
  return channels / kBlockChannels + (channels % kBlockChannels > 0) == weights.blocks;
}

Error CheckIds(const int32_t* ids, int64_t tokens, int64_t top_k, int64_t experts) {
  for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
    if (ids[slot] >= -1 && ids[slot] < experts) continue;
    return Error::InvalidArgument("expert id " + std::to_string(ids[slot]) + " of token " +
                                  std::to_string(slot / top_k) + ", slot " +
                                  std::to_string(slot % top_k) + " is outside [-1, " +
                                  std::to_string(experts) + ")");
  }
  return Error::Success();
}

Error OutOfMemory() {
  return Error(ffi::ErrorCode::kResourceExhausted, "no memory for jax_w4a8's scratch");
}

// Below this many multiply-accumulates a call is over before a helper would wake up.
constexpr double kAloneWork = 200000;

double WorkOf(int64_t rows, const PackedMatrix& weights) {
  return static_cast<double>(rows) * static_cast<double>(weights.blocks * kBlockChannels) *
         static_cast<double>(weights.inputs());
}

int ThreadsFor(const ffi::ThreadPool& pool, double work) {
  if (work < kAloneWork) return 1;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int limit = ThreadLimit();
  return static_cast<int>(std::min<int64_t>(threads, limit > 0 ? limit : 1024));
}

// Runs body(team) in the kernels' floating point state; no exception leaves.
template <class Body>
Error WithTeam(ffi::ThreadPool& pool, double work, const Body& body) noexcept {
  try {
    const ScopedFloatEnv float_env;
    Team team([&pool](std::function<void()> task) { pool.Schedule(std::move(task)); },
              ThreadsFor(pool, work));
    return body(team);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

Error Experts(ffi::ThreadPool& pool, AnyBuffer x, AnyBuffer weights, AnyBuffer ids,
              const WeightBuffers& w13, const WeightBuffers& w2, int32_t activation, float alpha,
              float limit, bool symmetric, bool weight_on_input, AnyBuffer result, bool combined) {
  MoeCall call = {};
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("x", x, {kAnySize, kAnySize}));
  JAX_W4A8_RETURN_IF_ERROR(DecodeDType("x", x, &call.dtype));
  call.tokens = x.dimensions()[0];
  call.hidden = x.dimensions()[1];
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("ids", ids, ffi::DataType::S32, "int32"));
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("ids", ids, {call.tokens, kAnySize}));
  call.top_k = ids.dimensions()[1];
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("weights", weights, ffi::DataType::F32, "float32"));
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("weights", weights, {call.tokens, call.top_k}));
  if (w13.codes.dimensions().size() != 4) {
    return Error::InvalidArgument("w13.codes must have shape [E, blocks, groups, bytes], got " +
                                  ShapeText(w13.codes));
  }
  call.experts = w13.codes.dimensions()[0];
  JAX_W4A8_RETURN_IF_ERROR(DecodeWeights(w13, call.experts, call.hidden, &call.w13));
  JAX_W4A8_RETURN_IF_ERROR(DecodeWeights(w2, call.experts, kAnySize, &call.w2));
  const int64_t inner = call.w13.blocks / 2 * kBlockChannels;
  if (call.w13.blocks % 2 || call.w2.inputs() <= inner - kBlockChannels ||
      call.w2.inputs() - call.w2.group_width >= inner) {
    return Error::InvalidArgument("w13.codes " + ShapeText(w13.codes) +
                                  " doesn't produce what w2.codes " + ShapeText(w2.codes) +
                                  " takes");
  }
  if (!HoldsChannels(call.w2, call.hidden)) {
    return Error::InvalidArgument("w2.codes " + ShapeText(w2.codes) + " doesn't produce the " +
                                  std::to_string(call.hidden) + " columns of x");
  }
  if (activation < 0 || activation > static_cast<int32_t>(ActivationKind::kGeluTanh)) {
    return Error::InvalidArgument("unknown activation " + std::to_string(activation));
  }
  if (weight_on_input && call.top_k != 1) {
    return Error::InvalidArgument("router weights on the input need top_k = 1, got " +
                                  std::to_string(call.top_k));
  }
  if (call.top_k > 0 && call.tokens > kMostOfAKind / call.top_k) {
    return Error::InvalidArgument("x has too many tokens: " + ShapeText(x));
  }
  call.ids = static_cast<const int32_t*>(ids.untyped_data());
  JAX_W4A8_RETURN_IF_ERROR(CheckIds(call.ids, call.tokens, call.top_k, call.experts));
  call.x = x.untyped_data();
  call.weights = static_cast<const float*>(weights.untyped_data());
  call.activation = {static_cast<ActivationKind>(activation), alpha, limit};
  call.symmetric = symmetric;
  call.weight_on_input = weight_on_input;
  if (combined) {
    call.y = result.untyped_data();
  } else {
    call.slots = static_cast<float*>(result.untyped_data());
  }
  const int64_t slots = call.tokens * call.top_k;
  return WithTeam(pool, WorkOf(slots, call.w13) + WorkOf(slots, call.w2), [&](Team& team) {
    return RunMoe(call, ActiveKernels(), team) ? Error::Success() : OutOfMemory();
  });
}

Error FusedExperts(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer weights, AnyBuffer ids,
                   AnyBuffer w13_codes, AnyBuffer w13_scale, AnyBuffer w13_sum, AnyBuffer w13_bias,
                   AnyBuffer w2_codes, AnyBuffer w2_scale, AnyBuffer w2_sum, AnyBuffer w2_bias,
                   int32_t activation, float alpha, float limit, bool symmetric,
                   bool weight_on_input, ffi::Result<AnyBuffer> y) {
  const auto dims = x.dimensions();
  if (dims.size() == 2) JAX_W4A8_RETURN_IF_ERROR(CheckShape("y", *y, {dims[0], dims[1]}));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("y", *y, x.element_type(), "of the dtype of x"));
  return Experts(pool, x, weights, ids, {"w13", w13_codes, w13_scale, w13_sum, w13_bias},
                 {"w2", w2_codes, w2_scale, w2_sum, w2_bias}, activation, alpha, limit, symmetric,
                 weight_on_input, *y, /*combined=*/true);
}

Error ApplyExperts(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer weights, AnyBuffer ids,
                   AnyBuffer w13_codes, AnyBuffer w13_scale, AnyBuffer w13_sum, AnyBuffer w13_bias,
                   AnyBuffer w2_codes, AnyBuffer w2_scale, AnyBuffer w2_sum, AnyBuffer w2_bias,
                   int32_t activation, float alpha, float limit, bool symmetric,
                   bool weight_on_input, ffi::Result<AnyBuffer> slots) {
  const auto x_dims = x.dimensions(), id_dims = ids.dimensions();
  if (x_dims.size() == 2 && id_dims.size() == 2) {
    JAX_W4A8_RETURN_IF_ERROR(CheckShape("slots", *slots, {id_dims[0], id_dims[1], x_dims[1]}));
  }
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("slots", *slots, ffi::DataType::F32, "float32"));
  return Experts(pool, x, weights, ids, {"w13", w13_codes, w13_scale, w13_sum, w13_bias},
                 {"w2", w2_codes, w2_scale, w2_sum, w2_bias}, activation, alpha, limit, symmetric,
                 weight_on_input, *slots, /*combined=*/false);
}

Error CombineSlots(ffi::ThreadPool pool, AnyBuffer slots, AnyBuffer weights,
                   ffi::Result<AnyBuffer> y) {
  CombineCall call = {};
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("slots", slots, {kAnySize, kAnySize, kAnySize}));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("slots", slots, ffi::DataType::F32, "float32"));
  call.tokens = slots.dimensions()[0];
  call.top_k = slots.dimensions()[1];
  call.hidden = slots.dimensions()[2];
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("weights", weights, {call.tokens, call.top_k}));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("weights", weights, ffi::DataType::F32, "float32"));
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("y", *y, {call.tokens, call.hidden}));
  JAX_W4A8_RETURN_IF_ERROR(DecodeDType("y", *y, &call.dtype));
  // Nothing to write, of however many tokens, or from however many slots.
  if (call.tokens == 0 || call.hidden == 0) return Error::Success();
  call.slots = static_cast<const float*>(slots.untyped_data());
  call.weights = static_cast<const float*>(weights.untyped_data());
  call.y = y->untyped_data();
  const double work = static_cast<double>(call.tokens * call.top_k * call.hidden);
  return WithTeam(pool, work, [&](Team& team) {
    RunCombine(call, ActiveKernels(), team);
    return Error::Success();
  });
}

// Decodes what the linear map and its grouped kind have in common. `stack` is as for DecodeWeights.
Error DecodeLinear(AnyBuffer x, const WeightBuffers& weights, int64_t stack, bool symmetric,
                   AnyBuffer y, LinearCall* call) {
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("x", x, {kAnySize, kAnySize}));
  JAX_W4A8_RETURN_IF_ERROR(DecodeDType("x", x, &call->dtype));
  call->rows = x.dimensions()[0];
  call->features = x.dimensions()[1];
  JAX_W4A8_RETURN_IF_ERROR(DecodeWeights(weights, stack, call->features, &call->weights));
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("y", y, {call->rows, kAnySize}));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("y", y, x.element_type(), "of the dtype of x"));
  call->out_features = y.dimensions()[1];
  if (!HoldsChannels(call->weights, call->out_features)) {
    return Error::InvalidArgument("weights.codes " + ShapeText(weights.codes) +
                                  " doesn't produce the " + std::to_string(call->out_features) +
                                  " columns of y");
  }
  if (call->rows > kMostOfAKind) {
    return Error::InvalidArgument("x has too many rows: " + ShapeText(x));
  }
  call->x = x.untyped_data();
  call->y = y.untyped_data();
  call->symmetric = symmetric;
  return Error::Success();
}

Error Linear(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer codes, AnyBuffer scale,
             AnyBuffer scaled_sum, AnyBuffer bias, bool symmetric, ffi::Result<AnyBuffer> y) {
  LinearCall call = {};
  JAX_W4A8_RETURN_IF_ERROR(
      DecodeLinear(x, {"weights", codes, scale, scaled_sum, bias}, kAnySize, symmetric, *y, &call));
  return WithTeam(pool, WorkOf(call.rows, call.weights), [&](Team& team) {
    return RunLinear(call, ActiveKernels(), team) ? Error::Success() : OutOfMemory();
  });
}

Error GroupedLinear(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer ids, AnyBuffer codes,
                    AnyBuffer scale, AnyBuffer scaled_sum, AnyBuffer bias, bool symmetric,
                    ffi::Result<AnyBuffer> y) {
  LinearCall call = {};
  if (codes.dimensions().size() != 4) {
    return Error::InvalidArgument("weights.codes must have shape [E, blocks, groups, bytes], got " +
                                  ShapeText(codes));
  }
  call.matrices = codes.dimensions()[0];
  JAX_W4A8_RETURN_IF_ERROR(DecodeLinear(x, {"weights", codes, scale, scaled_sum, bias},
                                        call.matrices, symmetric, *y, &call));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("ids", ids, ffi::DataType::S32, "int32"));
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("ids", ids, {call.rows}));
  call.ids = static_cast<const int32_t*>(ids.untyped_data());
  JAX_W4A8_RETURN_IF_ERROR(CheckIds(call.ids, call.rows, 1, call.matrices));
  return WithTeam(pool, WorkOf(call.rows, call.weights), [&](Team& team) {
    return RunLinear(call, ActiveKernels(), team) ? Error::Success() : OutOfMemory();
  });
}

Error CheckSpans(const AttendCall& call) {
  for (int64_t row = 0; row < call.batch; ++row) {
    const int64_t start = call.starts[row], length = call.lengths[row];
    if (start >= 0 && length >= 0 && length <= call.tokens && start + length <= call.slots)
      continue;
    return Error::InvalidArgument("row " + std::to_string(row) + " has " + std::to_string(length) +
                                  " of " + std::to_string(call.tokens) + " tokens from position " +
                                  std::to_string(start) + ", and the cache has " +
                                  std::to_string(call.slots) + " slots");
  }
  return Error::Success();
}

Error Attend(ffi::ThreadPool pool, AnyBuffer queries, AnyBuffer keys, AnyBuffer values,
             AnyBuffer starts, AnyBuffer lengths, AnyBuffer sinks, float scale, int32_t window,
             ffi::Result<AnyBuffer> out) {
  for (const auto& [name, buffer] : {std::pair("queries", &queries), std::pair("keys", &keys),
                                     std::pair("values", &values), std::pair("sinks", &sinks)}) {
    JAX_W4A8_RETURN_IF_ERROR(CheckDType(name, *buffer, ffi::DataType::F32, "float32"));
  }
  constexpr int64_t kAny = kAnySize;
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("queries", queries, {kAny, kAny, kAny, kAny}));
  const auto query_dims = queries.dimensions();
  AttendCall call = {};
  call.batch = query_dims[0];
  call.tokens = query_dims[1];
  call.heads = query_dims[2];
  call.dim = query_dims[3];
  JAX_W4A8_RETURN_IF_ERROR(CheckShape("keys", keys, {call.batch, kAny, call.dim, kAny}));
  call.kv_heads = keys.dimensions()[1];
  call.slots = keys.dimensions()[3];
  JAX_W4A8_RETURN_IF_ERROR(
      CheckShape("values", values, {call.batch, call.kv_heads, call.slots, kAny}));
  call.width = values.dimensions()[3];
  JAX_W4A8_RETURN_IF_ERROR(
      CheckShape("out", *out, {call.batch, call.tokens, call.heads, call.width}));
  JAX_W4A8_RETURN_IF_ERROR(CheckDType("out", *out, ffi::DataType::F32, "float32"));
  for (const auto& [name, buffer] :
       {std::pair("starts", &starts), std::pair("lengths", &lengths)}) {
    JAX_W4A8_RETURN_IF_ERROR(CheckDType(name, *buffer, ffi::DataType::S32, "int32"));
    JAX_W4A8_RETURN_IF_ERROR(CheckShape(name, *buffer, {call.batch}));
  }
  // Not by their number: sizes of an array without elements may overflow when they are multiplied.
  const auto sink_dims = sinks.dimensions();
  if (std::find(sink_dims.begin(), sink_dims.end(), 0) == sink_dims.end()) {
    JAX_W4A8_RETURN_IF_ERROR(CheckShape("sinks", sinks, {call.heads}));
    call.sinks = static_cast<const float*>(sinks.untyped_data());
  }
  if (call.kv_heads < 1 || call.heads % call.kv_heads || call.slots % kAttendStep ||
      call.width % kBlockChannels || window < 0) {
    return Error::InvalidArgument("attention can't be over keys " + ShapeText(keys) +
                                  " and values " + ShapeText(values) + " by queries " +
                                  ShapeText(queries));
  }
  call.queries = static_cast<const float*>(queries.untyped_data());
  call.keys = static_cast<const float*>(keys.untyped_data());
  call.values = static_cast<const float*>(values.untyped_data());
  call.starts = static_cast<const int32_t*>(starts.untyped_data());
  call.lengths = static_cast<const int32_t*>(lengths.untyped_data());
  call.scale = scale;
  call.window = window;
  call.out = static_cast<float*>(out->untyped_data());
  JAX_W4A8_RETURN_IF_ERROR(CheckSpans(call));
  // Arrays without elements may claim any sizes: whole numbers could overflow.
  double work = 0;
  for (int64_t row = 0; row < call.batch; ++row) {
    const double start = call.starts[row], length = call.lengths[row];
    work += length * static_cast<double>(call.heads) * (start + length) *
            (static_cast<double>(call.dim) + static_cast<double>(call.width));
  }
  return WithTeam(pool, work, [&](Team& team) {
    return RunAttend(call, ActiveKernels(), team) ? Error::Success() : OutOfMemory();
  });
}

// Operands and attributes that both expert calls share.
auto ExpertsBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<AnyBuffer>()  // x
      .Arg<AnyBuffer>()  // weights
      .Arg<AnyBuffer>()  // ids
      .Arg<AnyBuffer>()  // w13: codes, scale, scaled_sum, bias
      .Arg<AnyBuffer>()
      .Arg<AnyBuffer>()
      .Arg<AnyBuffer>()
      .Arg<AnyBuffer>()  // w2: codes, scale, scaled_sum, bias
      .Arg<AnyBuffer>()
      .Arg<AnyBuffer>()
      .Arg<AnyBuffer>()
      .Attr<int32_t>("activation")
      .Attr<float>("alpha")
      .Attr<float>("limit")
      .Attr<bool>("symmetric")
      .Attr<bool>("weight_on_input")
      .Ret<AnyBuffer>();
}

}  // namespace
}  // namespace jax_w4a8

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8FusedExperts, jax_w4a8::FusedExperts,
                              jax_w4a8::ExpertsBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8ApplyExperts, jax_w4a8::ApplyExperts,
                              jax_w4a8::ExpertsBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8Combine, jax_w4a8::CombineSlots,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()    // slots
                                  .Arg<xla::ffi::AnyBuffer>()    // weights
                                  .Ret<xla::ffi::AnyBuffer>());  // y
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8Linear, jax_w4a8::Linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // scaled_sum
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Attr<bool>("symmetric")
                                  .Ret<xla::ffi::AnyBuffer>());  // y
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8GroupedLinear, jax_w4a8::GroupedLinear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // ids
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // scaled_sum
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Attr<bool>("symmetric")
                                  .Ret<xla::ffi::AnyBuffer>());  // y
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxW4A8Attend, jax_w4a8::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // queries
                                  .Arg<xla::ffi::AnyBuffer>()  // keys
                                  .Arg<xla::ffi::AnyBuffer>()  // values
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // lengths
                                  .Arg<xla::ffi::AnyBuffer>()  // sinks; none if empty
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Ret<xla::ffi::AnyBuffer>());  // out
