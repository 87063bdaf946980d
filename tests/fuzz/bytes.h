// A fuzzer's bytes as a stream of decisions; zeros once they are used up, so that every input means
// something.
#ifndef JAX_W4A8_TESTS_FUZZ_BYTES_H_
#define JAX_W4A8_TESTS_FUZZ_BYTES_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace jax_w4a8 {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  // The next n <= 8 bytes.
  uint64_t Take(int n) {
    uint64_t value = 0;
    for (int i = 0; i < n && size_ > 0; ++i, ++data_, --size_) {
      value |= static_cast<uint64_t>(*data_) << (8 * i);
    }
    return value;
  }

  // Of [low, high], at most 65536 of them.
  int64_t Int(int64_t low, int64_t high) {
    const uint64_t count = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(Take(count > 256 ? 2 : 1) % count);
  }
  bool Flag() { return Take(1) & 1; }
  // True once in n.
  bool Rarely(int n) { return Int(0, n - 1) == n - 1; }

  template <class T, size_t kCount>
  T Pick(const T (&choices)[kCount]) {
    return choices[Int(0, static_cast<int64_t>(kCount) - 1)];
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Contents of large arrays, which no fuzzer need spell out (xorshift64*).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>((Next() >> 20) % (static_cast<uint64_t>(high - low) + 1));
  }
  // Of [-1, 1).
  float Unit() { return static_cast<float>(static_cast<int64_t>(Next() >> 40)) * 0x1p-23f - 1; }

 private:
  uint64_t state_;
};

// How the floats of an array are chosen.
enum class Floats { kUnit, kWide, kSpecial, kAnyBits };
constexpr Floats kFloatKinds[] = {Floats::kUnit, Floats::kUnit, Floats::kWide, Floats::kSpecial,
                                  Floats::kAnyBits};

inline float FloatFromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float MakeFloat(Random& random, Floats kind) {
  constexpr float kInfinity = __builtin_inff();
  const float kSpecials[] = {0.0f,     -0.0f,     kInfinity, -kInfinity, __builtin_nanf(""),
                             1e-45f,   0x1p-126f, 3.4e38f,   -3.4e38f,   0x1p-100f,
                             65504.0f, 0x1p-24f,  127.5f,    -128.5f,    1.0f};
  constexpr int64_t kCount = sizeof(kSpecials) / sizeof(kSpecials[0]);
  switch (kind) {
    case Floats::kUnit:
      return random.Unit();
    case Floats::kWide: {
      const float exponent = FloatFromBits(static_cast<uint32_t>(random.Int(1, 254)) << 23);
      return random.Unit() * exponent;
    }
    case Floats::kSpecial:
      return random.Int(0, 3) ? random.Unit() : kSpecials[random.Int(0, kCount - 1)];
    case Floats::kAnyBits:
      break;
  }
  return FloatFromBits(static_cast<uint32_t>(random.Next()));
}

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_FUZZ_BYTES_H_
