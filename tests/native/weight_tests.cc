// The quantisation of weights against plain divisions, where it is hardest: next to the quotients
// that lie halfway between two codes.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "float_env.h"
#include "kernels/kernels.h"
#include "kernels/weights.h"
#include "operands.h"
#include "units.h"

namespace jax_w4a8 {
namespace {

constexpr int kNeighbours = 1;  // floats on each side
constexpr int64_t kGroup = 128;

// All floats next to a half or whole multiple of `scale` that quantisation may meet.
std::vector<float> HardWeights(float scale) {
  std::vector<float> weights;
  for (int halves = -16; halves <= 16; ++halves) {
    float weight = static_cast<float>(halves) / 2 * scale;
    for (int i = 0; i < kNeighbours; ++i) weight = nextafterf(weight, -INFINITY);
    for (int i = -kNeighbours; i <= kNeighbours; ++i) {
      if (fabsf(weight) <= 8 * scale) weights.push_back(weight);
      weight = nextafterf(weight, INFINITY);
    }
  }
  return weights;
}

int CodeOf(float weight, float scale) {
  const float flushed = fabsf(weight) < 0x1p-126f ? 0.0f : weight;
  volatile float quotient = flushed / scale;
  return static_cast<int>(std::min(rintf(quotient), 7.0f));
}

// How many codes of groups of these scales differ, and sums of groups.
int Differences(const WeightKernels& kernels, const std::vector<float>& scales) {
  std::vector<float> weights;
  for (const float scale : scales) {
    std::vector<float> hard = HardWeights(scale);
    hard.resize(kGroup, 0.0f);
    weights.insert(weights.end(), hard.begin(), hard.end());
  }
  weights.resize(weights.size() - 5);  // the last group lacks some
  const auto count = static_cast<int64_t>(weights.size());
  std::vector<uint32_t> runs(weights.size() / kRunInputs + 1);
  std::vector<int32_t> sums(scales.size()), expected_sums(scales.size());
  kernels.quantize(DType::kF32, weights.data(), {count, kGroup, scales.data(), sums.data()},
                   runs.data());
  int differences = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Byte b of a run holds input b in its low half and input b + 4 in its high one.
    const int64_t place = i % kRunInputs, shift = place % 4 * 8 + place / 4 * 4;
    const auto run = static_cast<size_t>(i / kRunInputs), group = static_cast<size_t>(i / kGroup);
    const int code = static_cast<int>((runs[run] >> shift) & 15u) - kCodeOffset;
    const int expected = CodeOf(weights[static_cast<size_t>(i)], scales[group]);
    differences += code != expected;
    expected_sums[group] += expected;
  }
  for (size_t i = 0; i < sums.size(); ++i) differences += sums[i] != expected_sums[i];
  return differences;
}

}  // namespace

void TestWeights() {
  const ScopedFloatEnv float_env;
  const std::string active = ActiveKernels().name;
  int count = 0;
  const Kernels* const* usable = UsableKernels(&count);
  for (int i = 0; i < count; ++i) {
    ForceKernels(usable[i]->name);
    const WeightKernels& kernels = ActiveWeightKernels();
    Random random(11);
    int differences = 0;
    for (int order = -126; order <= 124; ++order) {
      differences += Differences(kernels, {ldexpf(1.0f, order)});
      for (int n = 0; n < 40; ++n) {
        // Of one order, so that a call doesn't always take the way of small scales, and far apart.
        std::vector<float> scales(kMostWeights / kGroup);
        for (float& scale : scales) scale = fabsf(random.Float(order, order));
        differences += Differences(kernels, scales);
        for (float& scale : scales) scale = fabsf(random.Float(-126, order));
        differences += Differences(kernels, scales);
      }
    }
    const float none[] = {0.0f, -1.0f};
    for (const float scale : none) {
      const float weight = 0x1p-124f;
      uint32_t run = 0;
      int32_t sum = 1;
      kernels.quantize(DType::kF32, &weight, {1, kGroup, &scale, &sum}, &run);
      differences += run != 0x88888888u || sum != 0;
    }
    Expect(differences == 0, std::string(usable[i]->name) + " (" + kernels.name + "): " +
                                 std::to_string(differences) + " codes differ from a division's");
  }
  ForceKernels(active.c_str());
}

}  // namespace jax_w4a8
