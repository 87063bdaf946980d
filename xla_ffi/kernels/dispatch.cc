// Chooses a table from those that this machine can run.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "kernels/cpu_arm.h"
#include "kernels/cpu_x86.h"
#include "kernels/kernels.h"
#include "kernels/tables.h"

namespace jax_w4a8 {
namespace {

struct Usable {
  const Kernels* tables[5];
  int count = 0;

  Usable() {
#ifdef JAX_W4A8_X86_64
    const X86Sets sets = DetectX86();
#ifdef JAX_W4A8_AMX
    if (sets.amx_int8) tables[count++] = &kAmxKernels;
#endif
    if (sets.avx512_vnni) tables[count++] = &kAvx512Kernels;
#ifdef JAX_W4A8_AVX_VNNI
    if (sets.avx_vnni) tables[count++] = &kAvxVnniKernels;
#endif
    if (sets.avx2) tables[count++] = &kAvx2Kernels;
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
