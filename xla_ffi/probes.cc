#include "probes.h"

#include "kernels/kernels.h"
#include "moe.h"

namespace {

using jax_w4a8::kBlockChannels;

// A stack of matrices with their memory.
struct Stack {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scale;
  std::vector<float> sums;
  jax_w4a8::PackedMatrix matrix;

  Stack(int64_t experts, int64_t channels, int64_t inputs, int64_t group_width) {
    const int64_t blocks = channels / kBlockChannels, groups = inputs / group_width;
    codes.resize(static_cast<size_t>(experts * channels * inputs / 2));
    uint32_t state = 1;
    for (uint8_t& byte : codes) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<uint8_t>(state >> 24);
    }
    constexpr uint16_t kSmall = 0x3c00;  // bfloat16 2^-7
    scale.assign(static_cast<size_t>(experts * channels * groups), kSmall);
    sums.assign(static_cast<size_t>(experts * channels), 0.0f);
    matrix = {codes.data(), scale.data(), jax_w4a8::DType::kBF16, sums.data(), sums.data(), blocks,
              groups,       group_width};
  }
};

}  // namespace

// By name, so that a profiler finds it; its symbol survives stripping.
#if defined(_MSC_VER)
#define JAX_W4A8_EXPORT __declspec(dllexport) __declspec(noinline)
#else
#define JAX_W4A8_EXPORT __attribute__((visibility("default"), noinline))
#endif

extern "C" JAX_W4A8_EXPORT bool jax_w4a8_counted_call(const jax_w4a8::MoeCall* call,
                                                      const jax_w4a8::Kernels* kernels,
                                                      jax_w4a8::Team* team) {
  return jax_w4a8::RunMoe(*call, *kernels, *team);
}

namespace jax_w4a8 {

std::vector<WorkItem> PlanProbe(int64_t blocks, int64_t groups, int64_t group_width,
                                const std::vector<int64_t>& counts, int threads) {
  PackedMatrix weights = {};
  weights.blocks = blocks;
  weights.groups = groups;
  weights.group_width = group_width;
  std::vector<RowRun> runs;
  int64_t begin = 0;
  for (size_t index = 0; index < counts.size(); ++index) {
    if (counts[index] > 0) runs.push_back({static_cast<int64_t>(index), begin, counts[index]});
    begin += counts[index];
  }
  std::vector<WorkItem> items;
  PlanWork(weights, runs, threads, &items);
  return items;
}

int RunMoeProbe(const MoeProbe& probe) {
  const Stack w13(probe.experts, 2 * probe.intermediate, probe.hidden, probe.group_width);
  const Stack w2(probe.experts, probe.hidden, probe.intermediate, probe.group_width);
  std::vector<float> x(static_cast<size_t>(probe.tokens * probe.hidden));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 255) - 127.0f;
  const size_t slots = static_cast<size_t>(probe.tokens * probe.top_k);
  const std::vector<float> weights(slots, 1.0f);
  std::vector<int32_t> ids(slots);
  for (size_t slot = 0; slot < slots; ++slot) {
    ids[slot] = static_cast<int32_t>(slot % static_cast<size_t>(probe.experts));
  }
  std::vector<float> y(x.size());
  MoeCall call = {};
  call.dtype = DType::kF32;
  call.x = x.data();
  call.weights = weights.data();
  call.ids = ids.data();
  call.tokens = probe.tokens;
  call.top_k = probe.top_k;
  call.hidden = probe.hidden;
  call.experts = probe.experts;
  call.w13 = w13.matrix;
  call.w2 = w2.matrix;
  call.activation.kind = ActivationKind::kSilu;
  call.y = y.data();
  Team team([](std::function<void()>) {}, probe.threads);
  return jax_w4a8_counted_call(&call, &ActiveKernels(), &team) ? team.phases() : -1;
}

}  // namespace jax_w4a8
