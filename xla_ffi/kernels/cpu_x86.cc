#include "kernels/cpu_x86.h"

#ifdef JAX_W4A8_X86_64

#include <cpuid.h>
#if defined(__linux__) && defined(JAX_W4A8_AMX)
#define JAX_W4A8_ASK_FOR_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_w4a8 {
namespace {

// Bits by Intel's manual, volume 2, CPUID; compilers' headers don't name them all.
constexpr uint32_t Bit(int number) { return uint32_t{1} << number; }

// Leaf 1, ecx. A compiler that may use AVX may use SSE3 to SSE4.2 and POPCNT.
constexpr uint32_t kSse = Bit(0) | Bit(9) | Bit(19) | Bit(20) | Bit(23);
constexpr uint32_t kFma = Bit(12), kOsxsave = Bit(27), kAvx = Bit(28), kF16c = Bit(29);
// Leaf 7.
constexpr uint32_t kAvx2 = Bit(5);                                   // ebx
constexpr uint32_t kAvx512 = Bit(16) | Bit(17) | Bit(30) | Bit(31);  // ebx: F, DQ, BW, VL
constexpr uint32_t kGfni = Bit(8), kAvx512Vnni = Bit(11);            // ecx
constexpr uint32_t kAmxTile = Bit(24), kAmxInt8 = Bit(25);           // edx
constexpr uint32_t kAvxVnni = Bit(4);                                // leaf 7.1, eax
// XCR0.
constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe0, kTileState = 0x60000;

template <class Word>
bool Has(Word word, Word bits) {
  return (word & bits) == bits;
}

uint64_t SavedState() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

X86Words ReadWords() {
  X86Words words;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return words;
  words.leaf1_ecx = c;
  if (Has(c, kOsxsave)) words.xcr0 = SavedState();  // itself illegal without the bit
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return words;
  words.leaf7_ebx = b;
  words.leaf7_ecx = c;
  words.leaf7_edx = d;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words.leaf7_1_eax = a;
  return words;
}

// Linux gives a process, with all its threads and forks, tile registers when it asks, which only
// kernels for them have reason to; elsewhere nothing is known to give them. That the request
// returns 0 is not enough: a sandbox may answer so for the kernel.
bool TilesGranted() {
#ifdef JAX_W4A8_ASK_FOR_TILES
  constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023;  // ARCH_*_XCOMP_PERM
  constexpr long kTileData = 18;                                        // XTILEDATA
  uint64_t permitted = 0;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 &&
         syscall(SYS_arch_prctl, kGetPermission, &permitted) == 0 &&
         Has(permitted, uint64_t{1} << kTileData);
#else
  return false;
#endif
}

}  // namespace

X86Sets DecideX86(const X86Words& words, bool tiles_granted) {
  X86Sets sets;
  sets.avx2 = Has(words.leaf1_ecx, kSse | kFma | kOsxsave | kAvx | kF16c) &&
              Has(words.xcr0, kYmmState) && Has(words.leaf7_ebx, kAvx2);
  sets.avx_vnni = sets.avx2 && Has(words.leaf7_1_eax, kAvxVnni);
  sets.avx512_vnni = sets.avx2 && Has(words.xcr0, kZmmState) && Has(words.leaf7_ebx, kAvx512) &&
                     Has(words.leaf7_ecx, kAvx512Vnni);
  sets.amx_int8 = sets.avx512_vnni && Has(words.xcr0, kTileState) && Has(words.leaf7_ecx, kGfni) &&
                  Has(words.leaf7_edx, kAmxTile | kAmxInt8) && tiles_granted;
  return sets;
}

X86Sets DetectX86() {
  const X86Words words = ReadWords();
  const bool could_use_tiles = DecideX86(words, true).amx_int8;
  return DecideX86(words, could_use_tiles && TilesGranted());
}

}  // namespace jax_w4a8

#endif  // JAX_W4A8_X86_64
