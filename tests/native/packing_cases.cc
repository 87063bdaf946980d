// Cases of packing: codes, words of eight codes, and floats that are quantised on the way.
#include <math.h>
#include <string.h>

#include "cases.h"
#include "operands.h"
#include "pack.h"

namespace jax_w4a8 {
namespace {

// What packing fills, full of a pattern.
class Packed {
 public:
  explicit Packed(const MatrixShape& shape)
      : codes_(static_cast<size_t>(shape.blocks() * shape.groups() * shape.group_width() *
                                   kBlockChannels / 2),
               0x55),
        scale_(static_cast<size_t>(shape.blocks() * shape.groups() * kBlockChannels) *
                   SizeOf(shape.scale_dtype),
               0x55),
        scaled_sum_(static_cast<size_t>(shape.blocks() * kBlockChannels), 0x1.8p+100f),
        scale_dtype_(shape.scale_dtype) {
    target_.codes = codes_.data();
    target_.scale = scale_.data();
    target_.scale_dtype = shape.scale_dtype;
    target_.scaled_sum = scaled_sum_.data();
    target_.blocks = shape.blocks();
    target_.groups = shape.groups();
    target_.group_width = shape.group_width();
    target_.inputs = shape.inputs;
    target_.codes_stride = target_.groups * target_.group_width * kBlockChannels / 2;
    target_.scale_stride = target_.groups * kBlockChannels;
    target_.sum_stride = kBlockChannels;
  }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const PackTarget& target() const { return target_; }

  void AddTo(Checksum& out) const {
    out.AddBytes(codes_.data(), codes_.size());
    out.AddFloats(scale_dtype_, scale_.data(), scale_.size() / SizeOf(scale_dtype_));
    out.AddFloats(scaled_sum_);
  }

 private:
  std::vector<uint8_t> codes_, scale_;
  std::vector<float> scaled_sum_;
  DType scale_dtype_;
  PackTarget target_ = {};
};

// Scales for every row and group of `shape`, in `dtype`.
struct RandomScales {
  std::vector<uint8_t> bytes;
  PackScales scales;

  RandomScales(Random& random, const MatrixShape& shape, DType dtype)
      : bytes(Rounded(dtype, random.Floats(shape.channels * shape.groups(), -9, -2))),
        scales({bytes.data(), dtype, shape.groups()}) {}
  RandomScales(const RandomScales&) = delete;
  RandomScales& operator=(const RandomScales&) = delete;
};

// A result that packing says is good counts in full, another only as that.
void AddResult(bool good, const Packed& packed, Checksum& out) {
  out.AddInt(good);
  if (good) packed.AddTo(out);
}

void PackRandomCodes(const MatrixShape& shape, DType scales_dtype, int8_t highest, Checksum& out) {
  Random random(6);
  const int64_t stride = shape.inputs + 5;
  std::vector<int8_t> codes(static_cast<size_t>(shape.channels * stride) + 3);
  for (int8_t& code : codes) code = static_cast<int8_t>(random.Int(-8, 7));
  codes[codes.size() / 2] = highest;
  const RandomScales scales(random, shape, scales_dtype);
  const Packed packed(shape);
  const PackRows<int8_t> rows = {codes.data() + 3, stride, shape.channels};
  AddResult(PackCodes(rows, scales.scales, packed.target()), packed, out);
}

void PackRandomWords(const MatrixShape& shape, DType scales_dtype, Checksum& out) {
  Random random(7);
  const int64_t stride = (shape.inputs + 7) / 8 + 1;
  std::vector<int32_t> words(static_cast<size_t>(shape.channels * stride));
  for (int32_t& word : words) word = static_cast<int32_t>(random.Word());
  const RandomScales scales(random, shape, scales_dtype);
  const Packed packed(shape);
  const PackRows<int32_t> rows = {words.data(), stride, shape.channels};
  AddResult(PackWords(rows, scales.scales, packed.target()), packed, out);
}

// Weights of binary orders [low, high], with a group of zeros, and `one` among them.
void PackRandomFloats(const MatrixShape& shape, DType dtype, int low, int high, float one,
                      Checksum& out) {
  Random random(8);
  const int64_t stride = shape.inputs + 3;
  std::vector<float> weights = random.Floats(shape.channels * stride, low, high);
  for (int64_t i = 0; i < shape.group_width() && i < shape.inputs; ++i) {
    weights[static_cast<size_t>(stride + i)] = 0;
  }
  weights[static_cast<size_t>(3 * stride + 1)] = one;
  const std::vector<uint8_t> rounded = Rounded(dtype, weights);
  std::vector<uint8_t> bytes(rounded.size() + 1);  // at an odd address
  memcpy(bytes.data() + 1, rounded.data(), rounded.size());
  const Packed packed(shape);
  const PackRows<void> rows = {bytes.data() + 1, stride, shape.channels};
  AddResult(PackFloats(dtype, rows, packed.target()), packed, out);
}

}  // namespace

void AddPackingCases(Cases& cases) {
  const MatrixShape shapes[] = {
      {32, 64, 32, DType::kBF16},
      {21, 101, 32, DType::kF32},
      {17, 300, 128, DType::kBF16},
      {40, 77, kChannelWise, DType::kF32},
      {18, 2500, kChannelWise, DType::kBF16},
      {5, 4200, 2080, DType::kF32},
  };
  const auto add = [&](const std::string& name, const std::function<void(Checksum&)>& run) {
    cases.push_back({name, [run](const Kernels&, Checksum& out) { run(out); }});
  };
  for (const MatrixShape& shape : shapes) {
    const std::string name = shape.Name();
    add("pack_codes." + name,
        [=](Checksum& out) { PackRandomCodes(shape, shape.scale_dtype, 7, out); });
    add("pack_words." + name,
        [=](Checksum& out) { PackRandomWords(shape, shape.scale_dtype, out); });
    for (const DType dtype : kDTypes) {
      const std::string end = name + ".from_" + NameOf(dtype);
      add("pack_floats." + end,
          [=](Checksum& out) { PackRandomFloats(shape, dtype, -8, 0, 1, out); });
      add("pack_floats.all_exponents." + end, [=](Checksum& out) {
        PackRandomFloats(shape, dtype, dtype == DType::kF16 ? -24 : -127, 15, 1, out);
      });
      add("pack_floats.tiny." + end, [=](Checksum& out) {
        const int order = dtype == DType::kF16 ? -22 : -125;
        PackRandomFloats(shape, dtype, order, order + 3, 0, out);
      });
    }
  }
  const MatrixShape& small = shapes[1];
  add("pack_codes.f16_scales", [=](Checksum& out) { PackRandomCodes(small, DType::kF16, 7, out); });
  add("pack_words.f16_scales", [=](Checksum& out) { PackRandomWords(small, DType::kF16, out); });
  add("pack_codes.outside", [=](Checksum& out) { PackRandomCodes(small, DType::kF32, 8, out); });
  for (const DType dtype : kDTypes) {
    const std::string end = NameOf(dtype);
    add("pack_floats.nan." + end,
        [=](Checksum& out) { PackRandomFloats(small, dtype, -8, 0, NAN, out); });
    add("pack_floats.infinity." + end,
        [=](Checksum& out) { PackRandomFloats(small, dtype, -8, 0, -INFINITY, out); });
  }
}

}  // namespace jax_w4a8
