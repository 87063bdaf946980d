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

constexpr int kNeighbours = 5;  // floats on each side

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

// How many codes differ, and 1 if their sum does.
int Differences(const WeightKernels& kernels, float scale) {
  const std::vector<float> weights = HardWeights(scale);
  const auto count = static_cast<int64_t>(weights.size());
  std::vector<uint32_t> runs(weights.size() / kRunInputs + 1);
  const int32_t sum = kernels.quantize(DType::kF32, weights.data(), count, scale, runs.data());
  int differences = 0;
  int32_t expected_sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Byte b of a run holds input b in its low half and input b + 4 in its high one.
    const int64_t place = i % kRunInputs, shift = place % 4 * 8 + place / 4 * 4;
    const auto run = static_cast<size_t>(i / kRunInputs);
    const int code = static_cast<int>((runs[run] >> shift) & 15u) - kCodeOffset;
    const int expected = CodeOf(weights[static_cast<size_t>(i)], scale);
    differences += code != expected;
    expected_sum += expected;
  }
  return differences + (sum != expected_sum);
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
      for (int n = 0; n < 40; ++n) differences += Differences(kernels, fabsf(random.Float(order, order)));
      differences += Differences(kernels, ldexpf(1.0f, order));
    }
    Expect(differences == 0, std::string(usable[i]->name) + " (" + kernels.name + "): " +
                                 std::to_string(differences) + " codes differ from a division's");
  }
  ForceKernels(active.c_str());
}

}  // namespace jax_w4a8
