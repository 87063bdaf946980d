// Which x86-64 instruction sets may be used, apart from where the answer comes from.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_CPU_X86_H_
#define JAX_W4A8_XLA_FFI_KERNELS_CPU_X86_H_

#include <stdint.h>

namespace jax_w4a8 {

// What CPUID and XGETBV say; zero where the processor has no such leaf or register.
struct X86Words {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  // Register state that the operating system saves on a context switch. An instruction that the
  // processor has is illegal without it.
  uint64_t xcr0 = 0;
};

struct X86Sets {
  bool avx2 = false;
  bool avx_vnni = false;
  bool avx512_vnni = false;
  bool amx_int8 = false;
};

// `tiles_granted`: the operating system lets this process use tile registers.
X86Sets DecideX86(const X86Words& words, bool tiles_granted);

// Of this machine. Asks for tile registers where they are all that is missing.
X86Sets DetectX86();

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_CPU_X86_H_
