#include "pack.h"

#include <string.h>

#include <algorithm>

#include "float_env.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/weights.h"

namespace jax_w4a8 {
namespace {

constexpr uint64_t kBytes = 0x0101010101010101u;
constexpr uint32_t kZeroCodes = 0x88888888u;  // eight stored codes of value 0
// Inputs that one channel writes before the next has its turn: 16 KiB of a block.
constexpr int64_t kSpanInputs = 2048;

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

// Asks for memory that will be read or written soon. Channels and blocks are far apart: processors
// don't see by themselves what comes next.
template <bool kWrite>
void Fetch(const void* begin, int64_t bytes) {
#if defined(__GNUC__) || defined(__clang__)
  constexpr int64_t kLine = 64;
  const char* line = static_cast<const char*>(begin);
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(line + i, kWrite);
  __asm__ volatile("");  // GCC drops calls of functions that do nothing but prefetch
#endif
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

void FillRuns(int64_t runs, uint8_t* out) {
  for (int64_t run = 0; run < runs; ++run) Store(out + run * kRunBytes, kZeroCodes);
}

int64_t Runs(int64_t inputs) { return (inputs + kRunInputs - 1) / kRunInputs; }

// Sources: Put(row, first, groups, out) writes four bytes of each run of the inputs [first, first +
// groups.count) of a row, the first at `out`, and the sums of their groups' codes. `first` is a
// multiple of kRunInputs; groups.count is at most kMostWeights. Ahead(row, first, count) fetches
// what such a Put will read.

// Calls put(begin, count) for each group of inputs, which returns the sum of its codes.
template <class Put>
void ForGroups(const WeightGroups& groups, const Put& put) {
  for (int64_t begin = 0, group = 0; begin < groups.count; begin += groups.width, ++group) {
    groups.sums[group] = put(begin, std::min(groups.width, groups.count - begin));
  }
}

class CodeSource {
 public:
  explicit CodeSource(const PackRows<int8_t>& rows) : rows_(rows) {}

  void Put(int64_t row, int64_t first, const WeightGroups& groups, uint8_t* out) {
    const int8_t* codes = rows_.data + row * rows_.stride + first;
    ForGroups(groups, [&](int64_t begin, int64_t count) {
      return PutGroup(codes + begin, count, out + begin / kRunInputs * kRunBytes);
    });
  }

  void Ahead(int64_t row, int64_t first, int64_t count) const {
    Fetch<false>(rows_.data + row * rows_.stride + first, count);
  }

  bool valid() const { return (seen_ & (0xf0 * kBytes)) == 0; }

 private:
  int32_t PutGroup(const int8_t* codes, int64_t count, uint8_t* out) {
    int32_t sum = 0;
    uint64_t seen = 0;
    const int64_t whole = count / kRunInputs * kRunInputs;
    for (int64_t i = 0; i < whole; i += kRunInputs) {
      sum += PutRun(Load<uint64_t>(codes + i), &seen, out + i / kRunInputs * kRunBytes);
    }
    if (whole < count) {
      uint64_t last = 0;
      memcpy(&last, codes + whole, static_cast<size_t>(count - whole));
      sum += PutRun(last, &seen, out + whole / kRunInputs * kRunBytes);
    }
    seen_ |= seen;
    return sum - kCodeOffset * static_cast<int32_t>(Runs(count) * kRunInputs);
  }

  static int32_t PutRun(uint64_t codes, uint64_t* seen, uint8_t* out) {
    // Adds 8 to each byte, without carries between them.
    const uint64_t stored =
        ((codes & (0x7f * kBytes)) + kCodeOffset * kBytes) ^ (codes & (0x80 * kBytes));
    *seen |= stored;
    Store(out, Join(stored & (0x0f * kBytes)));
    return static_cast<int32_t>(((stored & (0x0f * kBytes)) * kBytes) >> 56);
  }

  PackRows<int8_t> rows_;
  uint64_t seen_ = 0;
};

class WordSource {
 public:
  explicit WordSource(const PackRows<int32_t>& rows) : rows_(rows) {}

  void Put(int64_t row, int64_t first, const WeightGroups& groups, uint8_t* out) {
    const int32_t* words = Offset(rows_.data, row * rows_.stride + first / kRunInputs);
    ForGroups(groups, [&](int64_t begin, int64_t count) {
      const int64_t run = begin / kRunInputs;
      return PutGroup(Offset(words, run), count, out + run * kRunBytes);
    });
  }

  void Ahead(int64_t row, int64_t first, int64_t count) const {
    Fetch<false>(Offset(rows_.data, row * rows_.stride + first / kRunInputs), count / 2);
  }

  static bool valid() { return true; }

 private:
  static int32_t PutGroup(const int32_t* words, int64_t count, uint8_t* out) {
    int32_t sum = 0;
    const int64_t whole = count / kRunInputs;
    for (int64_t i = 0; i < whole; ++i) sum += PutRun(Word(words, i), out + i * kRunBytes);
    if (whole * kRunInputs < count) {
      const uint32_t mask = (uint32_t{1} << (4 * (count - whole * kRunInputs))) - 1;
      sum += PutRun((Word(words, whole) & mask) | (kZeroCodes & ~mask), out + whole * kRunBytes);
    }
    return sum - kCodeOffset * static_cast<int32_t>(Runs(count) * kRunInputs);
  }

  static uint32_t Word(const int32_t* words, int64_t index) {
    return static_cast<uint32_t>(At(words, index));
  }
  static int32_t PutRun(uint32_t word, uint8_t* out) {
    const uint32_t low = Spread(word & 0xffffu);
    const uint32_t high = Spread(word >> 16);
    Store(out, low | (high << 4));
    return static_cast<int32_t>(((low + high) * 0x01010101u) >> 24);
  }

  PackRows<int32_t> rows_;
};

class FloatSource {
 public:
  FloatSource(DType dtype, const PackRows<void>& rows)
      : kernels_(ActiveWeightKernels()), dtype_(dtype), rows_(rows) {}

  // Scales of the groups [begin, begin + count) of a row, in the target's precision: the largest
  // magnitude over 7.5.
  void Scales(int64_t row, int64_t begin, int64_t count, const PackTarget& target,
              float* scale) const {
    const int64_t first = begin * target.group_width;
    const int64_t inputs = std::min(count * target.group_width, target.inputs - first);
    kernels_.largest(dtype_, Weights(row, first), inputs, target.group_width, scale);
    for (int64_t i = 0; i < count; ++i) {
      const float exact = scale[i] / 7.5f;
      scale[i] = exact < kLeastScale ? 0.0f : exact;
    }
    if (target.scale_dtype != DType::kBF16) return;
    for (int64_t i = 0; i < count; ++i) scale[i] = FloatOfBF16(BF16Of(scale[i]));
  }

  void Put(int64_t row, int64_t first, const WeightGroups& groups, uint8_t* out) {
    uint32_t packed[kMostWeights / kRunInputs];
    kernels_.quantize(dtype_, Weights(row, first), groups, packed);
    const int64_t count = Runs(groups.count);  // for all that the compiler knows, stores change it
    for (int64_t run = 0; run < count; ++run) Store(out + run * kRunBytes, packed[run]);
  }

  void Ahead(int64_t row, int64_t first, int64_t count) const {
    Fetch<false>(Weights(row, first), count * static_cast<int64_t>(SizeOf(dtype_)));
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

// Makers of scales: maker(row, begin, count, scale) gives those of the groups [begin, begin +
// count) of a row.
struct LoadedScales {
  const PackScales& scales;

  void operator()(int64_t row, int64_t begin, int64_t count, float* scale) const {
    for (int64_t i = 0; i < count; ++i) scale[i] = LoadScale(scales, row, begin + i);
  }
};

// One block: its channels take turns in filling a span of inputs, which is whole groups or part of
// one, so that reads are long and what is written stays in the first-level cache.
template <class Source, class MakeScales>
class BlockPacker {
 public:
  BlockPacker(Source& source, const MakeScales& make_scales, const PackTarget& target,
              int64_t block, int64_t channels)
      : source_(source),
        make_scales_(make_scales),
        target_(target),
        block_(block),
        channels_(channels) {}

  // False if a scale isn't finite.
  bool Run() {
    const int64_t width = target_.group_width;
    if (width <= kSpanInputs) {
      const int64_t step = kSpanInputs / width;
      for (int64_t group = 0; group < target_.groups; group += step) {
        const int64_t end = std::min(group + step, target_.groups);
        for (int64_t c = 0; c < kBlockChannels; ++c) FillGroups(c, group, end);
      }
    } else {
      for (int64_t group = 0; group < target_.groups; ++group) FillWideGroup(group);
    }
    memcpy(target_.scaled_sum + block_ * target_.sum_stride, total_, sizeof(total_));
    return finite_;
  }

 private:
  void FillGroups(int64_t channel, int64_t begin, int64_t end) {
    const int64_t width = target_.group_width;
    // All scales before all codes: neither has to wait for the other then.
    float scale[kSpanInputs / kChunkInputs];
    int32_t sum[kSpanInputs / kChunkInputs] = {};
    PutScales(channel, begin, end - begin, scale);
    PutCodes(channel, begin * width, end * width, scale, sum);
    for (int64_t i = 0; i < end - begin; ++i) Add(channel, sum[i], scale[i]);
  }

  void FillWideGroup(int64_t group) {
    const int64_t begin = group * target_.group_width;
    const int64_t end = begin + target_.group_width;
    float scale[kBlockChannels];
    int32_t sum[kBlockChannels] = {};
    for (int64_t c = 0; c < kBlockChannels; ++c) PutScales(c, group, 1, &scale[c]);
    for (int64_t i = begin; i < end; i += kSpanInputs) {
      for (int64_t c = 0; c < kBlockChannels; ++c) {
        PutCodes(c, i, std::min(i + kSpanInputs, end), &scale[c], &sum[c]);
      }
    }
    for (int64_t c = 0; c < kBlockChannels; ++c) Add(c, sum[c], scale[c]);
  }

  // Makes the scales of the groups [begin, begin + count), and stores them.
  void PutScales(int64_t channel, int64_t begin, int64_t count, float* scale) {
    if (channel < channels_) {
      make_scales_(block_ * kBlockChannels + channel, begin, count, scale);
    } else {
      std::fill(scale, scale + count, 0.0f);
    }
    for (int64_t i = 0; i < count; ++i) {
      finite_ = finite_ && (BitsOf(scale[i]) & 0x7f800000u) != 0x7f800000u;
      StoreScale(target_, block_, begin + i, channel, scale[i]);
    }
  }

  // Inputs [begin, end): whole groups, the first of which has scale[0], or part of one. Adds the
  // sums of their codes to `sum`.
  void PutCodes(int64_t channel, int64_t begin, int64_t end, const float* scale, int32_t* sum) {
    const int64_t width = target_.group_width;
    for (int64_t piece = begin; piece < end;) {
      const int64_t group = (piece - begin) / width;
      int64_t stop = std::min(piece + kMostWeights, begin + (group + 1) * width);
      if (width <= kMostWeights) stop = piece + kMostWeights / width * width;  // several groups
      stop = std::min(stop, end);
      PutPiece(channel, piece, stop, scale + group, sum + group);
      piece = stop;
    }
  }

  void PutPiece(int64_t channel, int64_t begin, int64_t end, const float* scale, int32_t* sum) {
    FetchAhead(channel, begin, end);
    uint8_t* out = target_.codes + block_ * target_.codes_stride + begin / kRunInputs * kRunBytes +
                   channel * (kRunBytes / kBlockChannels);
    const int64_t last = std::min(end, target_.inputs);
    const int64_t present = channel < channels_ && last > begin ? last - begin : 0;
    if (present > 0) {
      const int64_t width = std::min(target_.group_width, end - begin);
      int32_t sums[kMostWeights / kChunkInputs];
      source_.Put(block_ * kBlockChannels + channel, begin, {present, width, scale, sums}, out);
      for (int64_t i = 0; i * width < present; ++i) sum[i] += sums[i];
    }
    const int64_t filled = Runs(present);
    FillRuns((end - begin) / kRunInputs - filled, out + filled * kRunBytes);
  }

  // What the next channel reads, and a channel's share of what the next block writes.
  void FetchAhead(int64_t channel, int64_t begin, int64_t end) const {
    const int64_t last = std::min(end, target_.inputs);
    if (channel + 1 < channels_ && last > begin) {
      source_.Ahead(block_ * kBlockChannels + channel + 1, begin, last - begin);
    }
    if (block_ + 1 < target_.blocks) {
      const int64_t bytes = (end - begin) / 2;  // of a channel
      Fetch<true>(target_.codes + (block_ + 1) * target_.codes_stride + begin * kBlockChannels / 2 +
                      channel * bytes,
                  bytes);
    }
  }

  // Product and sum are rounded each (the file is compiled without contraction), as numpy does.
  void Add(int64_t channel, int32_t sum, float scale) {
    total_[channel] += static_cast<float>(sum) * scale;
  }

  Source& source_;
  const MakeScales& make_scales_;
  const PackTarget& target_;
  int64_t block_;
  int64_t channels_;  // that exist
  bool finite_ = true;
  float total_[kBlockChannels] = {};
};

// Fills all blocks.
template <class Source, class MakeScales>
bool Pack(Source& source, int64_t rows, const PackTarget& target, const MakeScales& make_scales) {
  const ScopedFloatEnv float_env;
  bool finite = true;
  for (int64_t block = 0; block < target.blocks; ++block) {
    const int64_t left = rows - block * kBlockChannels;
    const int64_t channels = left < kBlockChannels ? left : kBlockChannels;
    BlockPacker packer(source, make_scales, target, block, channels);
    finite = packer.Run() && finite;
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
  return Pack(source, codes.rows, target, LoadedScales{scales});
}

bool PackWords(const PackRows<int32_t>& words, const PackScales& scales, const PackTarget& target) {
  WordSource source(words);
  return Pack(source, words.rows, target, LoadedScales{scales});
}

bool PackFloats(DType dtype, const PackRows<void>& weights, const PackTarget& target) {
  FloatSource source(dtype, weights);
  return Pack(source, weights.rows, target,
              [&](int64_t row, int64_t begin, int64_t count, float* scale) {
                source.Scales(row, begin, count, target, scale);
              });
}

const WeightKernels& ActiveWeightKernels() {
  int count = 0;
  const auto* usable = UsableKernels(&count);
  int i = 0;
  while (usable[i] != &ActiveKernels() && i + 1 < count) ++i;
  // An instruction set without a table of its own takes the next lower one's.
  for (; i < count; ++i) {
    for (const WeightKernels* table : kWeightKernels) {
      if (strcmp(table->name, usable[i]->name) == 0) return *table;
    }
  }
  return kPortableWeightKernels;
}

}  // namespace jax_w4a8
