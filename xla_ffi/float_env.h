// The floating point state that kernels run in.
#ifndef JAX_W4A8_XLA_FFI_FLOAT_ENV_H_
#define JAX_W4A8_XLA_FFI_FLOAT_ENV_H_

#include <stdint.h>

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace jax_w4a8 {

// Rounds to nearest and keeps subnormal numbers while alive, then restores what was. XLA's threads
// flush subnormals and a caller's thread may not: results must not depend on which of them took a
// row.
class ScopedFloatEnv {
 public:
#if defined(__SSE2__) || defined(_M_X64)
  ScopedFloatEnv() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~ScopedFloatEnv() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatEnv() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ScopedFloatEnv() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ScopedFloatEnv() {}
#endif
  ScopedFloatEnv(const ScopedFloatEnv&) = delete;
  ScopedFloatEnv& operator=(const ScopedFloatEnv&) = delete;
};

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_FLOAT_ENV_H_
