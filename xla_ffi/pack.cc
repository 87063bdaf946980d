#include "pack.h"

#include <string.h>

#include "float_env.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/weights.h"

namespace jax_w4a8 {
namespace {

constexpr uint64_t kBytes = 0x0101010101010101u;
constexpr uint32_t kZeroCodes = 0x88888888u;  // eight stored codes of value 0
// Inputs that one channel writes before the next has its turn: 4 KiB of a block.
constexpr int64_t kSegmentInputs = 512;

// Loads and stores of any alignment.
template <class T>
T Load(const void* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void Store(void* p, T value) {
  memcpy(p, &value, sizeof(T));
}

// Element `index` of an array at any address.
template <class T>
T At(const T* array, int64_t index) {
  return Load<T>(reinterpret_cast<const char*>(array) + index * static_cast<int64_t>(sizeof(T)));
}

template <class T>
const T* Offset(const T* array, int64_t elements) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(array) +
                                    elements * static_cast<int64_t>(sizeof(T)));
}

// Eight stored codes (0..15, the first in the lowest byte) as the four bytes of a run.
uint32_t Join(uint64_t stored) {
  return static_cast<uint32_t>(stored) | static_cast<uint32_t>(stored >> 28);
}

// Four codes of 4 bits to the low halves of four bytes.
uint32_t Spread(uint32_t nibbles) {
  const uint32_t pairs = (nibbles | (nibbles << 8)) & 0x00ff00ffu;
  return (pairs | (pairs << 4)) & 0x0f0f0f0fu;
}

// Writes the four bytes of each run that belong to one channel.
class ChannelWriter {
 public:
  explicit ChannelWriter(uint8_t* first) : next_(first) {}

  void Put(uint32_t run) {
    Store(next_, run);
    next_ += kRunBytes;
  }
  void Fill(int64_t runs) {
    for (int64_t run = 0; run < runs; ++run) Put(kZeroCodes);
  }

 private:
  uint8_t* next_;
};

int64_t Runs(int64_t inputs) { return (inputs + kRunInputs - 1) / kRunInputs; }

// Sources: Put(row, first, count, out) writes the runs of inputs [first, first + count) of a row
// and returns the sum of their codes. `first` is a multiple of kRunInputs.

class CodeSource {
 public:
  explicit CodeSource(const PackRows<int8_t>& rows) : rows_(rows) {}

  int32_t Put(int64_t row, int64_t first, int64_t count, ChannelWriter& out) {
    const int8_t* codes = rows_.data + row * rows_.stride + first;
    int32_t sum = 0;
    uint64_t seen = 0;
    const int64_t whole = count / kRunInputs * kRunInputs;
    for (int64_t i = 0; i < whole; i += kRunInputs) {
      sum += PutRun(Load<uint64_t>(codes + i), &seen, out);
    }
    if (whole < count) {
      uint64_t last = 0;
      memcpy(&last, codes + whole, static_cast<size_t>(count - whole));
      sum += PutRun(last, &seen, out);
    }
    seen_ |= seen;
    return sum - kCodeOffset * static_cast<int32_t>(Runs(count) * kRunInputs);
  }

  bool valid() const { return (seen_ & (0xf0 * kBytes)) == 0; }

 private:
  static int32_t PutRun(uint64_t codes, uint64_t* seen, ChannelWriter& out) {
    // Adds 8 to each byte, without carries between them.
    const uint64_t stored =
        ((codes & (0x7f * kBytes)) + kCodeOffset * kBytes) ^ (codes & (0x80 * kBytes));
    *seen |= stored;
    out.Put(Join(stored & (0x0f * kBytes)));
    return static_cast<int32_t>(((stored & (0x0f * kBytes)) * kBytes) >> 56);
  }

  PackRows<int8_t> rows_;
  uint64_t seen_ = 0;
};

class WordSource {
 public:
  explicit WordSource(const PackRows<int32_t>& rows) : rows_(rows) {}

  int32_t Put(int64_t row, int64_t first, int64_t count, ChannelWriter& out) {
    const int32_t* words = Offset(rows_.data, row * rows_.stride + first / kRunInputs);
    int32_t sum = 0;
    const int64_t whole = count / kRunInputs;
    for (int64_t i = 0; i < whole; ++i) sum += PutRun(Word(words, i), out);
    if (whole * kRunInputs < count) {
      const uint32_t mask = (uint32_t{1} << (4 * (count - whole * kRunInputs))) - 1;
      sum += PutRun((Word(words, whole) & mask) | (kZeroCodes & ~mask), out);
    }
    return sum - kCodeOffset * static_cast<int32_t>(Runs(count) * kRunInputs);
  }

  static bool valid() { return true; }

 private:
  static uint32_t Word(const int32_t* words, int64_t index) {
    return static_cast<uint32_t>(At(words, index));
  }
  static int32_t PutRun(uint32_t word, ChannelWriter& out) {
    const uint32_t low = Spread(word & 0xffffu);
    const uint32_t high = Spread(word >> 16);
    out.Put(low | (high << 4));
    return static_cast<int32_t>(((low + high) * 0x01010101u) >> 24);
  }

  PackRows<int32_t> rows_;
};

class FloatSource {
 public:
  FloatSource(DType dtype, const PackRows<void>& rows)
      : kernels_(ActiveWeightKernels()), dtype_(dtype), rows_(rows) {}

  // The scale of inputs [first, first + count) of a row, in the target's precision: the largest
  // magnitude over 7.5. The next Put calls for this row's channel quantise by it.
  float Scale(int64_t row, int64_t first, int64_t count, DType target) {
    const float largest = kernels_.largest(dtype_, Weights(row, first), count);
    float scale = largest / 7.5f;
    if (scale < kLeastScale) scale = 0;
    if (target == DType::kBF16) scale = FloatOfBF16(BF16Of(scale));
    scale_[row % kBlockChannels] = scale;
    return scale;
  }

  int32_t Put(int64_t row, int64_t first, int64_t count, ChannelWriter& out) {
    const float scale = scale_[row % kBlockChannels];
    const int64_t runs = Runs(count);
    if (!(scale > 0)) {
      out.Fill(runs);
      return 0;
    }
    alignas(64) uint8_t stored[kSegmentInputs];
    kernels_.quantize(dtype_, Weights(row, first), count, scale, stored);
    for (int64_t i = count; i < runs * kRunInputs; ++i) stored[i] = kCodeOffset;
    int32_t sum = 0;
    for (int64_t run = 0; run < runs; ++run) {
      const uint64_t eight = Load<uint64_t>(stored + run * kRunInputs);
      out.Put(Join(eight));
      sum += static_cast<int32_t>((eight * kBytes) >> 56);
    }
    return sum - kCodeOffset * static_cast<int32_t>(runs * kRunInputs);
  }

  static bool valid() { return true; }  // what isn't finite shows in the scales

 private:
  static constexpr float kLeastScale = 0x1p-126f;

  const void* Weights(int64_t row, int64_t first) const {
    return static_cast<const char*>(rows_.data) +
           (row * rows_.stride + first) * static_cast<int64_t>(SizeOf(dtype_));
  }

  const WeightKernels& kernels_;
  DType dtype_;
  PackRows<void> rows_;
  float scale_[kBlockChannels] = {};
};

void StoreScale(const PackTarget& target, int64_t block, int64_t group, int64_t channel,
                float scale) {
  const int64_t index = block * target.scale_stride + group * kBlockChannels + channel;
  if (target.scale_dtype == DType::kF32) {
    static_cast<float*>(target.scale)[index] = scale;
  } else {
    static_cast<uint16_t*>(target.scale)[index] = BF16Of(scale);
  }
}

float LoadScale(const PackScales& scales, int64_t row, int64_t group) {
  const int64_t index = row * scales.stride + group;
  if (scales.dtype == DType::kF32) return At(static_cast<const float*>(scales.data), index);
  const uint16_t half = At(static_cast<const uint16_t*>(scales.data), index);
  return scales.dtype == DType::kBF16 ? FloatOfBF16(half) : FloatOfF16(half);
}

// Fills the codes of one group of a block, and adds scale x sum of codes to each channel's total.
// Product and sum are rounded each (the file is compiled without contraction), as numpy does.
template <class Source>
void PackGroup(Source& source, const PackTarget& target, int64_t block, int64_t group,
               int64_t channels, const float* scale, float* total) {
  int32_t sums[kBlockChannels] = {};
  const int64_t first = group * target.group_width;
  const int64_t count = target.GroupInputs(group);
  uint8_t* codes = target.codes + block * target.codes_stride +
                   first / kRunInputs * static_cast<int64_t>(kRunBytes);
  for (int64_t begin = 0; begin < target.group_width; begin += kSegmentInputs) {
    const int64_t room = target.group_width - begin;
    const int64_t width = room < kSegmentInputs ? room : kSegmentInputs;
    const int64_t left = count > begin ? count - begin : 0;
    const int64_t present = left < width ? left : width;
    for (int64_t c = 0; c < kBlockChannels; ++c) {
      ChannelWriter out(codes + begin / kRunInputs * kRunBytes + 4 * c);
      const bool exists = c < channels;
      if (exists) sums[c] += source.Put(block * kBlockChannels + c, first + begin, present, out);
      out.Fill(width / kRunInputs - (exists ? Runs(present) : 0));
    }
  }
  for (int64_t c = 0; c < channels; ++c) total[c] += static_cast<float>(sums[c]) * scale[c];
}

// Fills all blocks; make_scale(row, group) gives each scale just before its codes are put.
template <class Source, class MakeScale>
bool Pack(Source& source, int64_t rows, const PackTarget& target, const MakeScale& make_scale) {
  const ScopedFloatEnv float_env;
  bool finite = true;
  for (int64_t block = 0; block < target.blocks; ++block) {
    const int64_t left = rows - block * kBlockChannels;
    const int64_t channels = left < kBlockChannels ? left : kBlockChannels;
    float total[kBlockChannels] = {};
    for (int64_t group = 0; group < target.groups; ++group) {
      float scale[kBlockChannels] = {};
      for (int64_t c = 0; c < channels; ++c) {
        scale[c] = make_scale(block * kBlockChannels + c, group);
        finite = finite && (BitsOf(scale[c]) & 0x7f800000u) != 0x7f800000u;
      }
      for (int64_t c = 0; c < kBlockChannels; ++c) StoreScale(target, block, group, c, scale[c]);
      PackGroup(source, target, block, group, channels, scale, total);
    }
    memcpy(target.scaled_sum + block * target.sum_stride, total, sizeof(total));
  }
  return finite && source.valid();
}

const WeightKernels* const kWeightKernels[] = {
    &kPortableWeightKernels,
#ifdef JAX_W4A8_X86_64
    &kAvx2WeightKernels,
    &kAvx512WeightKernels,
#endif
};

}  // namespace

bool PackCodes(const PackRows<int8_t>& codes, const PackScales& scales, const PackTarget& target) {
  CodeSource source(codes);
  return Pack(source, codes.rows, target,
              [&](int64_t row, int64_t group) { return LoadScale(scales, row, group); });
}

bool PackWords(const PackRows<int32_t>& words, const PackScales& scales, const PackTarget& target) {
  WordSource source(words);
  return Pack(source, words.rows, target,
              [&](int64_t row, int64_t group) { return LoadScale(scales, row, group); });
}

bool PackFloats(DType dtype, const PackRows<void>& weights, const PackTarget& target) {
  FloatSource source(dtype, weights);
  return Pack(source, weights.rows, target, [&](int64_t row, int64_t group) {
    return source.Scale(row, group * target.group_width, target.GroupInputs(group),
                        target.scale_dtype);
  });
}

const WeightKernels& ActiveWeightKernels() {
  const char* name = ActiveKernels().name;
  for (const WeightKernels* table : kWeightKernels) {
    if (strcmp(table->name, name) == 0) return *table;
  }
  return kPortableWeightKernels;
}

}  // namespace jax_w4a8
