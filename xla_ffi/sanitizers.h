// What AddressSanitizer is told about memory that is cut up by hand; nothing in other builds.
#ifndef JAX_W4A8_XLA_FFI_SANITIZERS_H_
#define JAX_W4A8_XLA_FFI_SANITIZERS_H_

#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define JAX_W4A8_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define JAX_W4A8_ADDRESS_SANITIZER
#endif

#ifdef JAX_W4A8_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace jax_w4a8 {

#ifdef JAX_W4A8_ADDRESS_SANITIZER
// Left free behind every part of a block, so that running out of a part shows.
constexpr size_t kZoneBytes = 64;
inline void ForbidAccess(char* data, size_t bytes) { __asan_poison_memory_region(data, bytes); }
inline void AllowAccess(char* data, size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
constexpr size_t kZoneBytes = 0;
inline void ForbidAccess(char*, size_t) {}
inline void AllowAccess(char*, size_t) {}
#endif

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_SANITIZERS_H_
