// Scalar conversions shared by every instruction set. `static inline`: each kernel file is compiled
// with its own flags, and the linker must not take one file's copy for another's.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_SCALAR_H_
#define JAX_W4A8_XLA_FFI_KERNELS_SCALAR_H_

#include <stdint.h>
#include <string.h>

namespace jax_w4a8 {

static inline uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float FloatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline float FloatOfBF16(uint16_t half) {
  return FloatOf(static_cast<uint32_t>(half) << 16);
}

// Halves to even; NaN stays NaN.
static inline uint16_t BF16Of(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float FloatOfF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0x1fu) {
    return FloatOf(sign | 0x7f800000u | (fraction ? 0x400000u : 0u) | (fraction << 13));
  }
  if (exponent) return FloatOf(sign | ((exponent + 112u) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // exact: zero or subnormal
  return FloatOf(sign | BitsOf(magnitude));
}

// Halves to even; too large becomes infinity; NaN stays NaN.
static inline uint16_t F16Of(float x) {
  const uint32_t bits = BitsOf(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the result, rounded by the addition, in the low bits.
    const uint32_t rounded = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_SCALAR_H_
