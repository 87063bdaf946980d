// Which instruction sets processors give, by what CPUID says of them, and systems, by what they
// save: [E6] of the known faults.
#include "units.h"

#ifndef JAX_W4A8_X86_64

void jax_w4a8::TestCpuDecisions() {}

#else

#include "kernels/cpu_x86.h"
#include "kernels/kernels.h"

namespace jax_w4a8 {
namespace {

constexpr uint32_t Bit(int number) { return uint32_t{1} << number; }

// Leaf 1, ecx.
constexpr uint32_t kSse3 = Bit(0), kPclmul = Bit(1), kSsse3 = Bit(9), kFma = Bit(12),
                   kCx16 = Bit(13), kSse41 = Bit(19), kSse42 = Bit(20), kMovbe = Bit(22),
                   kPopcnt = Bit(23), kAes = Bit(25), kXsave = Bit(26), kOsxsave = Bit(27),
                   kAvx = Bit(28), kF16c = Bit(29), kRdrand = Bit(30);
// Leaf 7, ebx.
constexpr uint32_t kBmi = Bit(3) | Bit(8), kAvx2 = Bit(5), kAvx512f = Bit(16), kAvx512dq = Bit(17),
                   kAdx = Bit(19), kAvx512ifma = Bit(21), kAvx512pf = Bit(26), kAvx512er = Bit(27),
                   kAvx512cd = Bit(28), kSha = Bit(29), kAvx512bw = Bit(30), kAvx512vl = Bit(31);
// Leaf 7, ecx.
constexpr uint32_t kVbmi = Bit(1), kVbmi2 = Bit(6), kGfni = Bit(8), kVaes = Bit(9) | Bit(10),
                   kVnni = Bit(11), kBitalg = Bit(12) | Bit(14);
// Leaf 7, edx.
constexpr uint32_t kAmxBf16 = Bit(22), kFp16 = Bit(23), kAmxTile = Bit(24), kAmxInt8 = Bit(25);
// Leaf 7.1, eax.
constexpr uint32_t kAvxVnni = Bit(4), kAvx512Bf16 = Bit(5);
// XCR0: x87 and SSE; and ymm; and mask and zmm registers; and tiles.
constexpr uint64_t kSseState = 0x3, kYmmState = 0x7, kZmmState = 0xe7, kTileState = 0x600e7;

constexpr X86Words kNehalem = {kSse3 | kSsse3 | kCx16 | kSse41 | kSse42 | kPopcnt, 0, 0, 0, 0, 0};
constexpr uint32_t kSandyBridge1 = kNehalem.leaf1_ecx | kPclmul | kAes | kXsave | kOsxsave | kAvx;
constexpr X86Words kSandyBridge = {kSandyBridge1, 0, 0, 0, 0, kYmmState};
constexpr X86Words kIvyBridge = {kSandyBridge1 | kF16c | kRdrand, 0, 0, 0, 0, kYmmState};
constexpr X86Words kPiledriver = {kSandyBridge1 | kF16c | kFma, Bit(3), 0, 0, 0, kYmmState};
constexpr uint32_t kHaswell1 = kSandyBridge1 | kF16c | kRdrand | kFma | kMovbe;
constexpr X86Words kHaswell = {kHaswell1, kBmi | kAvx2, 0, 0, 0, kYmmState};
constexpr X86Words kZen2 = {kHaswell1, kBmi | kAvx2 | kAdx | kSha, 0, 0, 0, kYmmState};
constexpr X86Words kZen3 = {kHaswell1, kBmi | kAvx2 | kAdx | kSha, kVaes, 0, 0, kYmmState};
constexpr X86Words kKnightsLanding = {
    kHaswell1, kBmi | kAvx2 | kAdx | kAvx512f | kAvx512pf | kAvx512er | kAvx512cd, 0, 0, 0,
    kZmmState};
constexpr uint32_t kSkylakeX7 =
    kBmi | kAvx2 | kAdx | kAvx512f | kAvx512dq | kAvx512cd | kAvx512bw | kAvx512vl;
constexpr X86Words kSkylakeX = {kHaswell1, kSkylakeX7, 0, 0, 0, kZmmState};
constexpr X86Words kCascadeLake = {kHaswell1, kSkylakeX7, kVnni, 0, 0, kZmmState};
constexpr uint32_t kIceLake7c = kVbmi | kVbmi2 | kGfni | kVaes | kVnni | kBitalg;
constexpr X86Words kIceLake = {kHaswell1, kSkylakeX7 | kAvx512ifma | kSha, kIceLake7c, 0, 0,
                               kZmmState};
constexpr X86Words kAlderLake = {kHaswell1, kBmi | kAvx2 | kAdx | kSha, kGfni | kVaes, 0, kAvxVnni,
                                 kYmmState};
constexpr X86Words kZen4 = {kHaswell1, kSkylakeX7 | kAvx512ifma | kSha, kIceLake7c, 0, kAvx512Bf16,
                            kZmmState};
constexpr X86Words kZen5 = {kHaswell1, kSkylakeX7 | kAvx512ifma | kSha, kIceLake7c,
                            0,         kAvx512Bf16 | kAvxVnni,          kZmmState};
constexpr X86Words kSapphireRapids = {kHaswell1,
                                      kSkylakeX7 | kAvx512ifma | kSha,
                                      kIceLake7c,
                                      kAmxBf16 | kFp16 | kAmxTile | kAmxInt8,
                                      kAvxVnni | kAvx512Bf16,
                                      kTileState};

// `words` without some bits, as hypervisors and boot options mask them, and with another XCR0.
constexpr X86Words Masked(X86Words words, uint32_t leaf1_ecx, uint32_t leaf7_ebx = 0,
                          uint32_t leaf7_ecx = 0, uint32_t leaf7_edx = 0) {
  words.leaf1_ecx &= ~leaf1_ecx;
  words.leaf7_ebx &= ~leaf7_ebx;
  words.leaf7_ecx &= ~leaf7_ecx;
  words.leaf7_edx &= ~leaf7_edx;
  return words;
}
constexpr X86Words Saving(X86Words words, uint64_t xcr0) {
  words.xcr0 = xcr0;
  return words;
}

std::string Names(const X86Sets& sets) {
  std::string names;
  if (sets.amx_int8) names += "amx_int8 ";
  if (sets.avx512_vnni) names += "avx512_vnni ";
  if (sets.avx_vnni) names += "avx_vnni ";
  if (sets.avx2) names += "avx2 ";
  return names + "portable";
}

struct Decision {
  const char* machine;
  X86Words words;
  bool granted;
  const char* names;
};

const Decision kDecisions[] = {
    {"no leaf at all", {}, true, "portable"},
    {"Nehalem", kNehalem, true, "portable"},
    {"Sandy Bridge", kSandyBridge, true, "portable"},
    {"Ivy Bridge", kIvyBridge, true, "portable"},
    {"Piledriver", kPiledriver, true, "portable"},
    {"Haswell", kHaswell, true, "avx2 portable"},
    {"Zen 2", kZen2, true, "avx2 portable"},
    {"Zen 3", kZen3, true, "avx2 portable"},
    {"Knights Landing", kKnightsLanding, true, "avx2 portable"},
    {"Skylake-X", kSkylakeX, true, "avx2 portable"},
    {"Cascade Lake", kCascadeLake, true, "avx512_vnni avx2 portable"},
    {"Ice Lake", kIceLake, true, "avx512_vnni avx2 portable"},
    {"Alder Lake", kAlderLake, true, "avx_vnni avx2 portable"},
    {"Zen 4", kZen4, true, "avx512_vnni avx2 portable"},
    {"Zen 5", kZen5, true, "avx512_vnni avx_vnni avx2 portable"},
    {"Sapphire Rapids", kSapphireRapids, true, "amx_int8 avx512_vnni avx_vnni avx2 portable"},

    // What the system saves, or gives.
    {"tiles not granted", kSapphireRapids, false, "avx512_vnni avx_vnni avx2 portable"},
    {"no tile state", Saving(kSapphireRapids, kZmmState), true,
     "avx512_vnni avx_vnni avx2 portable"},
    {"tiles' shapes without their data", Saving(kSapphireRapids, kZmmState | Bit(17)), true,
     "avx512_vnni avx_vnni avx2 portable"},
    {"no zmm state", Saving(kSapphireRapids, kYmmState), true, "avx_vnni avx2 portable"},
    {"tile state without zmm state", Saving(kSapphireRapids, kYmmState | 0x60000), true,
     "avx_vnni avx2 portable"},
    {"masks without zmm state", Saving(kCascadeLake, kYmmState | Bit(5)), true, "avx2 portable"},
    {"half of the zmm registers", Saving(kCascadeLake, kYmmState | Bit(5) | Bit(6)), true,
     "avx2 portable"},
    {"no ymm state", Saving(kSapphireRapids, kSseState), true, "portable"},
    {"zmm state without ymm state", Saving(kSapphireRapids, kSseState | 0xe0), true, "portable"},
    {"no XGETBV", Saving(Masked(kSapphireRapids, kOsxsave), 0), true, "portable"},

    // What a hypervisor hides.
    {"AVX2 without FMA", Masked(kHaswell, kFma), true, "portable"},
    {"AVX2 without F16C", Masked(kHaswell, kF16c), true, "portable"},
    {"AVX2 without AVX", Masked(kHaswell, kAvx), true, "portable"},
    {"AVX2 without POPCNT", Masked(kHaswell, kPopcnt), true, "portable"},
    {"AVX-VNNI without AVX2", Masked(kAlderLake, 0, kAvx2), true, "portable"},
    {"AVX-512 without AVX2", Masked(kSapphireRapids, 0, kAvx2), true, "portable"},
    {"AVX-512 without VL", Masked(kIceLake, 0, kAvx512vl), true, "avx2 portable"},
    {"AVX-512 without BW", Masked(kIceLake, 0, kAvx512bw), true, "avx2 portable"},
    {"AVX-512 without DQ", Masked(kIceLake, 0, kAvx512dq), true, "avx2 portable"},
    {"VNNI without F", Masked(kIceLake, 0, kAvx512f), true, "avx2 portable"},
    {"AMX without AVX-512", Masked(kSapphireRapids, 0, kAvx512f), true, "avx_vnni avx2 portable"},
    {"AMX without VNNI", Masked(kSapphireRapids, 0, 0, kVnni), true, "avx_vnni avx2 portable"},
    {"AMX without GFNI", Masked(kSapphireRapids, 0, 0, kGfni), true,
     "avx512_vnni avx_vnni avx2 portable"},
    {"AMX without INT8", Masked(kSapphireRapids, 0, 0, 0, kAmxInt8), true,
     "avx512_vnni avx_vnni avx2 portable"},
    {"AMX without tiles", Masked(kSapphireRapids, 0, 0, 0, kAmxTile), true,
     "avx512_vnni avx_vnni avx2 portable"},
};

}  // namespace

void TestCpuDecisions() {
  for (const Decision& one : kDecisions) {
    const std::string names = Names(DecideX86(one.words, one.granted));
    Expect(names == one.names, std::string(one.machine) + ": " + names);
  }
  // Of this machine: the compiled ones of what is detected, in the same order.
  std::string usable;
  int count = 0;
  const Kernels* const* tables = UsableKernels(&count);
  for (int i = 0; i < count; ++i) usable += std::string(i ? " " : "") + tables[i]->name;
  X86Sets sets = DetectX86();
#ifndef JAX_W4A8_AMX
  sets.amx_int8 = false;
#endif
#ifndef JAX_W4A8_AVX_VNNI
  sets.avx_vnni = false;
#endif
  Expect(usable == Names(sets), "usable here are " + usable);
}

}  // namespace jax_w4a8

#endif  // JAX_W4A8_X86_64
