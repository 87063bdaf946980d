// The tables that the kernel files define; which exist depends on the target architecture.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_TABLES_H_
#define JAX_W4A8_XLA_FFI_KERNELS_TABLES_H_

#include "kernels/kernels.h"

namespace jax_w4a8 {

extern const Kernels kPortableKernels;
#ifdef JAX_W4A8_X86_64
extern const Kernels kAvx2Kernels;
#ifdef JAX_W4A8_AVX_VNNI
extern const Kernels kAvxVnniKernels;
#endif
extern const Kernels kAvx512Kernels;
#ifdef JAX_W4A8_AMX
extern const Kernels kAmxKernels;
#endif
#endif
#ifdef JAX_W4A8_AARCH64
extern const Kernels kNeonKernels;
extern const Kernels kNeonDotprodKernels;
extern const Kernels kNeonI8mmKernels;
#endif

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_TABLES_H_
