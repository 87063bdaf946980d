// Chooses a table from what the processor has and the operating system saves.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "kernels/cpu_arm.h"
#include "kernels/kernels.h"
#include "kernels/tables.h"

#ifdef JAX_W4A8_X86_64
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace jax_w4a8 {
namespace {

#ifdef JAX_W4A8_X86_64
struct CpuFeatures {
  bool avx2 = false;
  bool avx512_vnni = false;
  bool amx_int8 = false;
};

// Bits of XCR0: the register state that the operating system saves on a context switch.
uint64_t SavedState() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives a process tile registers when it asks; elsewhere nothing is known to give them.
bool TilesGranted() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures Detect() {
  CpuFeatures features;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  constexpr uint32_t kNeeded = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  if ((c & kNeeded) != kNeeded) return features;
  const uint64_t saved = SavedState();
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
  if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = (b & bit_AVX2) != 0;
  constexpr uint32_t kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  features.avx512_vnni = features.avx2 && (saved & kZmm) == kZmm && (b & kAvx512) == kAvx512 &&
                         (c & bit_AVX512VNNI) != 0;
  constexpr uint64_t kTiles = 0x60000;
  constexpr uint32_t kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  features.amx_int8 = features.avx512_vnni && (saved & kTiles) == kTiles && (c & bit_GFNI) != 0 &&
                      (d & kAmxTile) != 0 && (d & kAmxInt8) != 0 && TilesGranted();
  return features;
}
#endif

struct Usable {
  const Kernels* tables[4];
  int count = 0;

  Usable() {
#ifdef JAX_W4A8_X86_64
    const CpuFeatures features = Detect();
#ifdef JAX_W4A8_AMX
    if (features.amx_int8) tables[count++] = &kAmxKernels;
#endif
    if (features.avx512_vnni) tables[count++] = &kAvx512Kernels;
    if (features.avx2) tables[count++] = &kAvx2Kernels;
#endif
#ifdef JAX_W4A8_AARCH64
    const ArmFeatures features = DetectArmFeatures();
    if (features.i8mm) tables[count++] = &kNeonI8mmKernels;
    if (features.dotprod) tables[count++] = &kNeonDotprodKernels;
    tables[count++] = &kNeonKernels;
#endif
    tables[count++] = &kPortableKernels;
  }
};

const Usable& GetUsable() {
  static const Usable usable;
  return usable;
}

const Kernels* Find(const char* name) {
  const Usable& usable = GetUsable();
  for (int i = 0; i < usable.count; ++i) {
    if (strcmp(usable.tables[i]->name, name) == 0) return usable.tables[i];
  }
  return nullptr;
}

// The first table in use: the best, or the one that the environment asks for where it is usable.
const Kernels* Initial() {
  const char* asked = getenv("JAX_W4A8_INSTRUCTION_SET");
  const Kernels* found = asked ? Find(asked) : nullptr;
  return found ? found : GetUsable().tables[0];
}

std::atomic<const Kernels*>& Active() {
  static std::atomic<const Kernels*> active{Initial()};
  return active;
}

}  // namespace

const Kernels* const* UsableKernels(int* count) {
  *count = GetUsable().count;
  return GetUsable().tables;
}

const Kernels& ActiveKernels() { return *Active().load(std::memory_order_acquire); }

bool ForceKernels(const char* name) {
  const Kernels* found = Find(name);
  if (found) Active().store(found, std::memory_order_release);
  return found != nullptr;
}

}  // namespace jax_w4a8
