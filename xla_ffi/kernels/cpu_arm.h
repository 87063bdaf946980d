// What a 64-bit Arm processor has beyond NEON.
#ifndef JAX_W4A8_XLA_FFI_KERNELS_CPU_ARM_H_
#define JAX_W4A8_XLA_FFI_KERNELS_CPU_ARM_H_

namespace jax_w4a8 {

struct ArmFeatures {
  bool dotprod = false;  // sdot
  bool i8mm = false;     // smmla, and sdot
};

// As the operating system tells it; none on other processors.
ArmFeatures DetectArmFeatures();

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_KERNELS_CPU_ARM_H_
