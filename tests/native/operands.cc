#include "operands.h"

#include <string.h>

#include "kernels/scalar.h"

namespace jax_w4a8 {

float FloatOfWord(uint32_t word) { return FloatOf(word); }

float Random::Float(int low, int high) {
  const uint32_t bits = Word();
  const uint32_t exponent = static_cast<uint32_t>(Int(low, high) + 127);
  return FloatOf((bits & 0x80000000u) | (exponent << 23) | (bits & 0x7fffffu));
}

std::vector<float> Random::Floats(int64_t count, int low, int high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = Float(low, high);
  return values;
}

std::vector<uint8_t> Rounded(DType dtype, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
  if (dtype == DType::kF32) {
    if (!bytes.empty()) memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::kBF16 ? BF16Of(values[i]) : F16Of(values[i]);
    memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

const char* NameOf(DType dtype) {
  return dtype == DType::kF32 ? "f32" : dtype == DType::kBF16 ? "bf16" : "f16";
}

const char* NameOf(ActivationKind kind) {
  constexpr const char* kNames[] = {"silu", "swigluoai", "gelu", "gelu_tanh"};
  return kNames[static_cast<int32_t>(kind)];
}

std::string MatrixShape::Name() const {
  const std::string group =
      group_size == kChannelWise ? "channelwise" : "g" + std::to_string(group_size);
  return std::to_string(channels) + "x" + std::to_string(inputs) + "." + group + "." +
         NameOf(scale_dtype);
}

RandomMatrices::RandomMatrices(uint64_t seed, const MatrixShape& shape, int64_t count,
                               int64_t blocks) {
  Random random(seed);
  if (blocks == 0) blocks = shape.blocks();
  const int64_t channels = count * blocks * kBlockChannels;
  const int64_t width = shape.groups() * shape.group_width();
  codes_.resize(static_cast<size_t>(channels * width / 2));
  for (uint8_t& byte : codes_) byte = static_cast<uint8_t>(random.Word());
  scale_ = Rounded(shape.scale_dtype, random.Floats(channels * shape.groups(), -9, -6));
  scaled_sum_ = random.Floats(channels, -4, 0);
  bias_ = random.Floats(channels, -6, 0);
  matrix_ = {codes_.data(), scale_.data(), shape.scale_dtype, scaled_sum_.data(),
             bias_.data(),  blocks,        shape.groups(),    shape.group_width()};
}

RowStorage::RowStorage(int64_t count, int64_t groups, int64_t group_width)
    : codes(static_cast<size_t>(count * groups * group_width), 0x55),
      start(static_cast<size_t>(count * groups), 0x55555555),
      zero(static_cast<size_t>(count), 0x1.8p+100f),
      scale(static_cast<size_t>(count), 0x1.8p+100f) {
  rows_ = {codes.data(), start.data(), zero.data(), scale.data(), groups, group_width};
}

void RowStorage::Fill(Random& random, int64_t inputs, int low, int high) {
  const int64_t width = rows_.inputs();
  for (size_t row = 0; row < zero.size(); ++row) {
    int8_t* row_codes = codes.data() + row * static_cast<size_t>(width);
    for (int64_t i = 0; i < width; ++i) {
      row_codes[i] = static_cast<int8_t>(i < inputs ? random.Int(-128, 127) : 0);
    }
    for (int64_t group = 0; group < rows_.groups; ++group) {
      int32_t sum = 0;
      for (int64_t i = 0; i < rows_.group_width; ++i) {
        sum += row_codes[group * rows_.group_width + i];
      }
      start[row * static_cast<size_t>(rows_.groups) + static_cast<size_t>(group)] =
          -kCodeOffset * sum;
    }
    zero[row] = static_cast<float>(random.Int(-128, 127));
    scale[row] = random.Float(low, high);
  }
}

}  // namespace jax_w4a8
