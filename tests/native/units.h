// Unit tests of the native code's smaller parts, which no checksum shows.
#ifndef JAX_W4A8_TESTS_NATIVE_UNITS_H_
#define JAX_W4A8_TESTS_NATIVE_UNITS_H_

#include <string>

namespace jax_w4a8 {

// Prints `what` and counts it where it isn't so.
void Expect(bool so, const std::string& what);

void TestTileModel();         // against its definition: what faults, and a product written out
void TestTilesOfProcessor();  // against the model, in threads and forks
void TestCpuDecisions();      // which instruction sets a processor and a system give
void TestWeights();           // codes of float weights, against divisions

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_NATIVE_UNITS_H_
