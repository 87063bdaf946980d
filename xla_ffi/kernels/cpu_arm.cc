#include "kernels/cpu_arm.h"

#if defined(__aarch64__) || defined(_M_ARM64)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
#endif

namespace jax_w4a8 {
namespace {

#if defined(__aarch64__) || defined(_M_ARM64)
#if defined(__linux__)

// Bits of the kernel's interface, which older headers lack.
bool HasDotprod() { return (getauxval(AT_HWCAP) & (1UL << 20)) != 0; }  // HWCAP_ASIMDDP
bool HasI8mm() { return (getauxval(AT_HWCAP2) & (1UL << 13)) != 0; }    // HWCAP2_I8MM

#elif defined(__APPLE__)

bool IsSet(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool HasDotprod() { return IsSet("hw.optional.arm.FEAT_DotProd"); }
bool HasI8mm() { return IsSet("hw.optional.arm.FEAT_I8MM"); }

#elif defined(_WIN32)

// Numbers of PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE and PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE, which
// older headers lack.
bool HasDotprod() { return IsProcessorFeaturePresent(43) != 0; }
bool HasI8mm() { return IsProcessorFeaturePresent(66) != 0; }

#else

bool HasDotprod() { return false; }
bool HasI8mm() { return false; }

#endif
#endif

}  // namespace

ArmFeatures DetectArmFeatures() {
  ArmFeatures features;
#if defined(__aarch64__) || defined(_M_ARM64)
  features.dotprod = HasDotprod();
  features.i8mm = features.dotprod && HasI8mm();
#endif
  return features;
}

}  // namespace jax_w4a8
