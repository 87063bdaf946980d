// Cases of linear maps and whole expert calls.
#include <math.h>

#include "cases.h"
#include "matmul.h"
#include "moe.h"
#include "operands.h"
#include "team.h"

namespace jax_w4a8 {
namespace {

std::vector<int32_t> RandomIds(Random& random, int64_t count, int64_t experts) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.Int(-1, experts - 1));
  return ids;
}

// Tokens of ordinary magnitudes, and among them one of zeros, one with a NaN, one of subnormals.
std::vector<uint8_t> RandomTokens(Random& random, DType dtype, int64_t tokens, int64_t features) {
  std::vector<float> x;
  for (int64_t token = 0; token < tokens; ++token) {
    std::vector<float> row =
        token % 11 == 5 ? random.Floats(features, -127, -127) : random.Floats(features, -5, 1);
    if (token % 11 == 3) row.assign(row.size(), 0.0f);
    if (token % 11 == 7) row[0] = NAN;
    x.insert(x.end(), row.begin(), row.end());
  }
  return Rounded(dtype, x);
}

struct Layer {
  int64_t experts, top_k, hidden, intermediate, group_size;
  DType scale_dtype, dtype;
  bool symmetric;
  Activation activation;
  bool weight_on_input;

  std::string Name() const {
    const MatrixShape w13 = {2 * intermediate, hidden, group_size, scale_dtype};
    return w13.Name() + "." + NameOf(dtype) + "." + NameOf(activation.kind) +
           (symmetric ? ".symmetric" : ".asymmetric") + (weight_on_input ? ".on_input" : "");
  }
};

// `slots`: each slot's output instead of the combined one.
void RunLayer(const Layer& layer, int64_t tokens, int threads, bool slots, const Kernels& kernels,
              Checksum& out) {
  const MatrixShape gate = {layer.intermediate, layer.hidden, layer.group_size, layer.scale_dtype};
  const MatrixShape down = {layer.hidden, layer.intermediate, layer.group_size, layer.scale_dtype};
  const RandomMatrices w13(1, gate, layer.experts, 2 * gate.blocks());
  const RandomMatrices w2(2, down, layer.experts);
  Random random(static_cast<uint64_t>(tokens));
  const auto x = RandomTokens(random, layer.dtype, tokens, layer.hidden);
  const auto weights = random.Floats(tokens * layer.top_k, -3, -1);
  const auto ids = RandomIds(random, tokens * layer.top_k, layer.experts);
  const int64_t outputs = slots ? tokens * layer.top_k * layer.hidden : tokens * layer.hidden;
  const DType dtype = slots ? DType::kF32 : layer.dtype;
  std::vector<uint8_t> y(static_cast<size_t>(outputs) * SizeOf(dtype), 0x55);
  MoeCall call = {};
  call.dtype = layer.dtype;
  call.x = x.data();
  call.weights = weights.data();
  call.ids = ids.data();
  call.tokens = tokens;
  call.top_k = layer.top_k;
  call.hidden = layer.hidden;
  call.experts = layer.experts;
  call.w13 = w13.first();
  call.w2 = w2.first();
  call.activation = layer.activation;
  call.symmetric = layer.symmetric;
  call.weight_on_input = layer.weight_on_input;
  if (slots) {
    call.slots = reinterpret_cast<float*>(y.data());
  } else {
    call.y = y.data();
  }
  WithTeam(threads, [&](Team& team) { out.AddInt(RunMoe(call, kernels, team)); });
  out.AddFloats(dtype, y.data(), static_cast<size_t>(outputs));
}

void AddLayer(Cases& cases, const Layer& layer, int64_t tokens, int threads = 1,
              bool slots = false) {
  const std::string name = "moe." + layer.Name() + (slots ? ".slots" : "") + ".tokens" +
                           std::to_string(tokens) +
                           (threads > 1 ? ".threads" + std::to_string(threads) : "");
  cases.push_back({name, [=](const Kernels& k, Checksum& out) {
                     RunLayer(layer, tokens, threads, slots, k, out);
                   }});
}

void AddMoeCases(Cases& cases) {
  constexpr Activation kSilu = {ActivationKind::kSilu, 0, 0};
  constexpr Activation kSwigluOai = {ActivationKind::kSwigluOai, 1.702f, 7};
  constexpr Activation kGelu = {ActivationKind::kGelu, 0, 0};
  constexpr Activation kGeluTanh = {ActivationKind::kGeluTanh, 0, 0};
  const Layer every_count[] = {
      {3, 2, 64, 48, 32, DType::kBF16, DType::kF32, false, kSilu, false},
      {2, 2, 70, 36, kChannelWise, DType::kF32, DType::kBF16, true, kSwigluOai, false},
  };
  for (const Layer& layer : every_count) {
    for (int64_t tokens = 0; tokens <= 40; ++tokens) AddLayer(cases, layer, tokens);
    for (const int64_t tokens : {256, 257}) AddLayer(cases, layer, tokens);
    for (const int64_t tokens : {1, 33}) AddLayer(cases, layer, tokens, 1, true);
    for (const int64_t tokens : {1, 40, 257}) AddLayer(cases, layer, tokens, 3);
  }
  const Layer others[] = {
      {4, 3, 100, 34, 32, DType::kF32, DType::kF16, true, kGelu, false},
      {4, 1, 130, 80, 64, DType::kBF16, DType::kF32, false, kGeluTanh, true},
      {2, 1, 600, 40, 128, DType::kBF16, DType::kBF16, false, kSilu, true},
      {2, 2, 40, 550, kChannelWise, DType::kF32, DType::kF16, false, kGelu, false},
  };
  for (const Layer& layer : others) {
    for (const int64_t tokens : {1, 2, 5, 13, 40}) AddLayer(cases, layer, tokens);
    AddLayer(cases, layer, 40, 2);
    AddLayer(cases, layer, 13, 1, true);
  }
}

struct Linear {
  MatrixShape shape;
  DType dtype;
  bool symmetric;
  int64_t matrices;  // 0: one, which every row meets
};

void RunLinearCase(const Linear& linear, int64_t rows, int threads, const Kernels& kernels,
                   Checksum& out) {
  const int64_t matrices = linear.matrices ? linear.matrices : 1;
  const RandomMatrices weights(3, linear.shape, matrices);
  Random random(static_cast<uint64_t>(rows));
  const auto x = RandomTokens(random, linear.dtype, rows, linear.shape.inputs);
  const auto ids = RandomIds(random, rows, matrices);
  const size_t outputs = static_cast<size_t>(rows * linear.shape.channels);
  std::vector<uint8_t> y(outputs * SizeOf(linear.dtype), 0x55);
  LinearCall call = {};
  call.dtype = linear.dtype;
  call.x = x.data();
  call.rows = rows;
  call.features = linear.shape.inputs;
  call.symmetric = linear.symmetric;
  call.weights = weights.first();
  call.y = y.data();
  call.out_features = linear.shape.channels;
  call.ids = linear.matrices ? ids.data() : nullptr;
  call.matrices = matrices;
  WithTeam(threads, [&](Team& team) { out.AddInt(RunLinear(call, kernels, team)); });
  out.AddFloats(linear.dtype, y.data(), outputs);
}

void AddLinearCases(Cases& cases) {
  const Linear linears[] = {
      {{50, 64, 32, DType::kF32}, DType::kF32, false, 0},
      {{33, 100, kChannelWise, DType::kBF16}, DType::kBF16, true, 0},
      {{24, 140, 128, DType::kF32}, DType::kF16, false, 3},
  };
  for (const Linear& linear : linears) {
    const std::string base = "linear." + linear.shape.Name() + "." + NameOf(linear.dtype) +
                             (linear.symmetric ? ".symmetric" : ".asymmetric") +
                             (linear.matrices ? ".grouped" : "") + ".rows";
    const auto add = [&](int64_t rows, int threads) {
      const std::string end = threads > 1 ? ".threads" + std::to_string(threads) : "";
      cases.push_back({base + std::to_string(rows) + end, [=](const Kernels& k, Checksum& out) {
                         RunLinearCase(linear, rows, threads, k, out);
                       }});
    };
    for (int64_t rows = 0; rows <= 40; ++rows) add(rows, 1);
    for (const int64_t rows : {256, 257}) {
      add(rows, 1);
      add(rows, 3);
    }
  }
}

}  // namespace

void AddLayerCases(Cases& cases) {
  AddLinearCases(cases);
  AddMoeCases(cases);
}

}  // namespace jax_w4a8
