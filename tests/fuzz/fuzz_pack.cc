// Packing of codes, words and floats, from rows at any address and stride into blocks with gaps
// between them, against the layout and the quantisation rule stated plainly.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bytes.h"
#include "check.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "layout.h"
#include "pack.h"

namespace jax_w4a8 {
namespace {

enum Source { kCodes, kWords, kFloats, kSources };

// Memory of exactly that many bytes, at an address that is a multiple of 16 plus `offset`.
class Exact {
 public:
  Exact(int64_t bytes, int64_t offset)
      : memory_(new uint8_t[static_cast<size_t>(bytes + offset)]), offset_(offset) {}
  uint8_t* data() const { return memory_.get() + offset_; }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  int64_t offset_;
};

struct Sizes {
  int64_t rows, inputs, group_width, groups, blocks;
  int64_t gap;  // between blocks of the target, in elements
};

// Rows whose elements are neighbours, the last as long as it need be and no longer.
struct Rows {
  int64_t stride;
  Exact memory;

  Rows(Bytes& bytes, int64_t rows, int64_t columns, int64_t size)
      : stride(columns + bytes.Int(0, 3)),
        memory(size * ((rows - 1) * stride + columns), bytes.Rarely(2) ? bytes.Int(1, 15) : 0) {}
};

struct Packed {
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scale_bits;
  std::vector<float> sums;
  bool valid;
};

// The rule in the plainest words.
class Expected {
 public:
  Expected(const Sizes& sizes, DType scale_dtype) : s_(sizes), scale_dtype_(scale_dtype) {
    const size_t channels = static_cast<size_t>(s_.blocks * kBlockChannels);
    const size_t inputs = static_cast<size_t>(s_.groups * s_.group_width);
    packed_.codes.assign(channels * inputs / 2, kCodeOffset * 0x11);
    packed_.scale_bits.assign(channels * static_cast<size_t>(s_.groups), 0);
    packed_.sums.assign(channels, 0.0f);
    packed_.valid = true;
  }

  void Put(int64_t row, int64_t input, int code) {
    if (code < -8 || code > 7) {
      packed_.valid = false;
      return;
    }
    const int64_t block = row / kBlockChannels, channel = row % kBlockChannels;
    const int64_t run = input / kRunInputs, place = input % kRunInputs;
    const int64_t byte = block * s_.groups * s_.group_width * kBlockChannels / 2 + run * kRunBytes +
                         4 * channel + place % 4;
    uint8_t& pair = packed_.codes[static_cast<size_t>(byte)];
    const int stored = code + kCodeOffset;
    pair = static_cast<uint8_t>(place < 4 ? (pair & 0xf0) | stored : (pair & 0x0f) | stored << 4);
  }

  void PutScale(int64_t row, int64_t group, float scale, int code_sum) {
    if (!isfinite(scale)) packed_.valid = false;
    const int64_t block = row / kBlockChannels, channel = row % kBlockChannels;
    const int64_t index = (block * s_.groups + group) * kBlockChannels + channel;
    packed_.scale_bits[static_cast<size_t>(index)] =
        scale_dtype_ == DType::kF32 ? BitsOf(scale) : BF16Of(scale);
    float& sum = packed_.sums[static_cast<size_t>(row)];
    const float product = static_cast<float>(code_sum) * scale;
    sum += product;
  }

  const Packed& packed() const { return packed_; }

 private:
  Sizes s_;
  DType scale_dtype_;
  Packed packed_;
};

// What a packing function filled.
class Target {
 public:
  Target(const Sizes& s, DType scale_dtype, int filling)
      : s_(s),
        scale_dtype_(scale_dtype),
        code_bytes_(s.groups * s.group_width * kBlockChannels / 2),
        scales_(s.groups * kBlockChannels),
        codes_((s.blocks - 1) * (code_bytes_ + s.gap) + code_bytes_, 0),
        scale_(static_cast<int64_t>(SizeOf(scale_dtype)) *
                   ((s.blocks - 1) * (scales_ + s.gap) + scales_),
               0),
        sums_(4 * ((s.blocks - 1) * (kBlockChannels + s.gap) + kBlockChannels), 0),
        filling_(filling) {
    memset(codes_.data(), filling, static_cast<size_t>(CodeBytes()));
    target_.codes = codes_.data();
    target_.scale = scale_.data();
    target_.scale_dtype = scale_dtype;
    target_.scaled_sum = reinterpret_cast<float*>(sums_.data());
    target_.codes_stride = code_bytes_ + s.gap;
    target_.scale_stride = scales_ + s.gap;
    target_.sum_stride = kBlockChannels + s.gap;
    target_.blocks = s.blocks;
    target_.groups = s.groups;
    target_.group_width = s.group_width;
    target_.inputs = s.inputs;
  }

  const PackTarget& target() const { return target_; }

  Packed Read(bool valid) const {
    Packed out;
    out.valid = valid;
    for (int64_t block = 0; block < s_.blocks; ++block) {
      const uint8_t* codes = codes_.data() + block * target_.codes_stride;
      out.codes.insert(out.codes.end(), codes, codes + code_bytes_);
      for (int64_t i = 0; i < scales_; ++i) {
        const int64_t index = block * target_.scale_stride + i;
        const int64_t size = static_cast<int64_t>(SizeOf(scale_dtype_));
        uint32_t bits = 0;
        memcpy(&bits, scale_.data() + index * size, SizeOf(scale_dtype_));
        out.scale_bits.push_back(bits);
      }
      const float* sums = target_.scaled_sum + block * target_.sum_stride;
      out.sums.insert(out.sums.end(), sums, sums + kBlockChannels);
      for (int64_t i = 0; i < s_.gap && block + 1 < s_.blocks; ++i) {
        JAX_W4A8_CHECK(codes[code_bytes_ + i] == static_cast<uint8_t>(filling_), "gap written");
      }
    }
    return out;
  }

 private:
  int64_t CodeBytes() const { return (s_.blocks - 1) * (code_bytes_ + s_.gap) + code_bytes_; }

  Sizes s_;
  DType scale_dtype_;
  int64_t code_bytes_, scales_;  // of a block
  Exact codes_, scale_, sums_;
  int filling_;
  PackTarget target_ = {};
};

void CheckEqual(const Packed& got, const Packed& wanted, const char* set) {
  JAX_W4A8_CHECK(got.valid == wanted.valid, "%s says %d", set, got.valid);
  if (!wanted.valid) return;  // what is then in the target means nothing
  JAX_W4A8_CHECK(got.codes == wanted.codes, "%s", set);
  JAX_W4A8_CHECK(got.scale_bits == wanted.scale_bits, "%s", set);
  // Sums of large scales may overflow to infinities and NaN.
  for (size_t i = 0; i < wanted.sums.size(); ++i) {
    const float a = got.sums[i], b = wanted.sums[i];
    JAX_W4A8_CHECK(BitsOf(a) == BitsOf(b) || (isnan(a) && isnan(b)), "%s: sum %zu", set, i);
  }
}

float ValueOf(DType dtype, const uint8_t* p) {
  if (dtype == DType::kF32) {
    float value;
    memcpy(&value, p, 4);
    return value;
  }
  uint16_t half;
  memcpy(&half, p, 2);
  return dtype == DType::kBF16 ? FloatOfBF16(half) : FloatOfF16(half);
}

void StoreFloat(DType dtype, float value, uint8_t* p) {
  if (dtype == DType::kF32) {
    memcpy(p, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::kBF16 ? BF16Of(value) : F16Of(value);
  memcpy(p, &half, 2);
}

float Flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.0f : x; }

Sizes MakeSizes(Bytes& bytes) {
  constexpr int64_t kWidths[] = {32, 64, 96, 256, 2048, 2080, 4096};
  Sizes s = {};
  s.rows = bytes.Rarely(8) ? bytes.Int(1, 40) : bytes.Int(1, 18);
  s.group_width = bytes.Rarely(16) ? bytes.Pick(kWidths) : 32 * bytes.Int(1, 5);
  s.groups = s.group_width > 512 || !bytes.Rarely(4) ? bytes.Int(1, 2) : bytes.Int(1, 6);
  s.inputs = (s.groups - 1) * s.group_width + bytes.Int(1, s.group_width);
  s.blocks = (s.rows + kBlockChannels - 1) / kBlockChannels;
  s.gap = bytes.Rarely(3) ? 16 * bytes.Int(1, 3) : 0;
  return s;
}

// Codes or words with scales.
void FuzzIntegers(Bytes& bytes, bool words) {
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const Sizes s = MakeSizes(bytes);
  const DType from = bytes.Pick(kDTypes);
  const DType to = from == DType::kBF16 ? DType::kBF16 : DType::kF32;
  const int64_t columns = words ? (s.inputs + kRunInputs - 1) / kRunInputs : s.inputs;
  Rows rows(bytes, s.rows, columns, words ? 4 : 1);
  Rows scales(bytes, s.rows, s.groups, static_cast<int64_t>(SizeOf(from)));
  const bool wild = !words && bytes.Rarely(6);
  const Floats kind = bytes.Pick(kFloatKinds);
  Random random(bytes.Take(4));

  Expected expected(s, to);
  for (int64_t row = 0; row < s.rows; ++row) {
    std::vector<int> sums(static_cast<size_t>(s.groups), 0);
    for (int64_t column = 0; column < columns; ++column) {
      const uint64_t bits = random.Next() >> 32;
      uint8_t* at = rows.memory.data() + (row * rows.stride + column) * (words ? 4 : 1);
      const int8_t code = static_cast<int8_t>(
          wild && bits % 64 == 0 ? bits >> 8 : static_cast<uint64_t>((bits >> 8) % 16) - 8);
      if (words) {
        memcpy(at, &bits, 4);
      } else {
        memcpy(at, &code, 1);
      }
      for (int64_t i = 0; i < (words ? kRunInputs : 1); ++i) {
        const int64_t input = words ? column * kRunInputs + i : column;
        if (input >= s.inputs) break;
        const int value = words ? static_cast<int>(bits >> (4 * i) & 15) - 8 : code;
        expected.Put(row, input, value);
        sums[static_cast<size_t>(input / s.group_width)] += value;
      }
    }
    for (int64_t group = 0; group < s.groups; ++group) {
      uint8_t* at =
          scales.memory.data() + (row * scales.stride + group) * static_cast<int64_t>(SizeOf(from));
      StoreFloat(from, MakeFloat(random, kind), at);
      expected.PutScale(row, group, ValueOf(from, at), sums[static_cast<size_t>(group)]);
    }
  }

  const Target target(s, to, 0x5a);
  const PackScales with = {scales.memory.data(), from, scales.stride};
  // Rows may start at any address; their type only says what they hold.
  const void* data = rows.memory.data();
  const bool valid = words ? PackWords({static_cast<const int32_t*>(data), rows.stride, s.rows},
                                       with, target.target())
                           : PackCodes({static_cast<const int8_t*>(data), rows.stride, s.rows},
                                       with, target.target());
  CheckEqual(target.Read(valid), expected.packed(), words ? "words" : "codes");
}

void FuzzFloats(Bytes& bytes) {
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const Sizes s = MakeSizes(bytes);
  const DType dtype = bytes.Pick(kDTypes);
  const DType scale_dtype = bytes.Flag() ? DType::kF32 : DType::kBF16;
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  Rows rows(bytes, s.rows, s.inputs, size);
  const Floats kind = bytes.Pick(kFloatKinds);
  const bool keep_finite = !bytes.Rarely(4);
  Random random(bytes.Take(4));

  Expected expected(s, scale_dtype);
  for (int64_t row = 0; row < s.rows; ++row) {
    uint8_t* at = rows.memory.data() + row * rows.stride * size;
    for (int64_t input = 0; input < s.inputs; ++input) {
      const float value = MakeFloat(random, kind);
      StoreFloat(dtype, value, at + input * size);
      // Rounding to half precision can make an infinity, too.
      if (keep_finite && !isfinite(ValueOf(dtype, at + input * size)))
        StoreFloat(dtype, 1.0f, at + input * size);
    }
    for (int64_t group = 0; group < s.groups; ++group) {
      const int64_t begin = group * s.group_width;
      const int64_t end = std::min(begin + s.group_width, s.inputs);
      float largest = 0;
      for (int64_t input = begin; input < end; ++input) {
        const float value = ValueOf(dtype, at + input * size);
        if (!isfinite(value)) largest = INFINITY;
        largest = fmaxf(largest, fabsf(Flushed(value)));
      }
      float scale = Flushed(largest / 7.5f);
      if (scale_dtype == DType::kBF16) scale = FloatOfBF16(BF16Of(scale));
      int sum = 0;
      for (int64_t input = begin; input < end && isfinite(scale); ++input) {
        const float value = Flushed(ValueOf(dtype, at + input * size));
        const int code = scale > 0 ? static_cast<int>(fminf(rintf(value / scale), 7)) : 0;
        expected.Put(row, input, code);
        sum += code;
      }
      expected.PutScale(row, group, scale, sum);
    }
  }

  int count = 0;
  const Kernels* const* usable = UsableKernels(&count);
  for (int i = 0; i < count; ++i) {
    ForceKernels(usable[i]->name);
    const Target target(s, scale_dtype, 0xa5);
    const bool valid =
        PackFloats(dtype, {rows.memory.data(), rows.stride, s.rows}, target.target());
    CheckEqual(target.Read(valid), expected.packed(), usable[i]->name);
  }
}

}  // namespace
}  // namespace jax_w4a8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_w4a8;
  Bytes bytes(data, size);
  const Source source = static_cast<Source>(bytes.Int(0, kSources - 1));
  if (source == kFloats) {
    FuzzFloats(bytes);
  } else {
    FuzzIntegers(bytes, source == kWords);
  }
  return 0;
}
