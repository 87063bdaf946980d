// Made-up operands, the same on every machine: integers of one generator, and floats of their bits.
#ifndef JAX_W4A8_TESTS_NATIVE_OPERANDS_H_
#define JAX_W4A8_TESTS_NATIVE_OPERANDS_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "layout.h"

namespace jax_w4a8 {

// SplitMix64 (Steele, Lea and Flood 2014). No distributions of the standard library, which differ
// between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t Word() { return static_cast<uint32_t>(Bits() >> 32); }
  // Of [low, high].
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }
  // Of either sign, with magnitudes of [2^low, 2^(high + 1)), all binary orders alike.
  float Float(int low, int high);
  std::vector<float> Floats(int64_t count, int low, int high);

 private:
  uint64_t state_;
};

// A float by its bits.
float FloatOfWord(uint32_t word);

// n floats rounded to `dtype`, as bytes.
std::vector<uint8_t> Rounded(DType dtype, const std::vector<float>& values);

const char* NameOf(DType dtype);
const char* NameOf(ActivationKind kind);
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

constexpr int64_t kChannelWise = -1;

// How a matrix is cut into blocks and groups, as jax_w4a8/weights.py does it.
struct MatrixShape {
  int64_t channels;
  int64_t inputs;
  int64_t group_size;  // or kChannelWise
  DType scale_dtype;

  int64_t blocks() const { return (channels + kBlockChannels - 1) / kBlockChannels; }
  int64_t group_width() const {
    if (group_size != kChannelWise) return group_size;
    return (inputs + kChunkInputs - 1) / kChunkInputs * kChunkInputs;
  }
  int64_t groups() const { return (inputs + group_width() - 1) / group_width(); }
  std::string Name() const;
};

// A stack of packed matrices of random codes, scales, sums and biases. Inputs and channels that
// only fill groups and blocks up have random codes, too: no result may depend on them.
class RandomMatrices {
 public:
  // `columns` is a number of blocks to have instead of those of `shape`, 0 for them.
  RandomMatrices(uint64_t seed, const MatrixShape& shape, int64_t count = 1, int64_t blocks = 0);
  RandomMatrices(const RandomMatrices&) = delete;
  RandomMatrices& operator=(const RandomMatrices&) = delete;

  const PackedMatrix& first() const { return matrix_; }

 private:
  std::vector<uint8_t> codes_;
  std::vector<uint8_t> scale_;
  std::vector<float> scaled_sum_, bias_;
  PackedMatrix matrix_;
};

// Memory for quantised rows, full of a pattern that any use of stale contents would show.
class RowStorage {
 public:
  RowStorage(int64_t rows, const PackedMatrix& weights)
      : RowStorage(rows, weights.groups, weights.group_width) {}
  RowStorage(int64_t rows, int64_t groups, int64_t group_width);
  RowStorage(const RowStorage&) = delete;
  RowStorage& operator=(const RowStorage&) = delete;

  const QuantizedRows& rows() const { return rows_; }
  // Codes of [-128, 127], the starts that belong to them, and scales of [2^low, 2^(high + 1)).
  void Fill(Random& random, int64_t inputs, int low, int high);

  std::vector<int8_t> codes;
  std::vector<int32_t> start;
  std::vector<float> zero, scale;

 private:
  QuantizedRows rows_;
};

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_NATIVE_OPERANDS_H_
