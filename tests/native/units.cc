// Runs the unit tests; prints what fails, and the number of checks.
#include "units.h"

#include <stdio.h>

namespace jax_w4a8 {
namespace {

int checks = 0, failures = 0;

}  // namespace

void Expect(bool so, const std::string& what) {
  ++checks;
  if (so) return;
  ++failures;
  fprintf(stderr, "failed: %s\n", what.c_str());
}

}  // namespace jax_w4a8

int main() {
  using namespace jax_w4a8;
  TestTileModel();
  TestTilesOfProcessor();
  TestCpuDecisions();
  TestWeights();
  printf("%d checks, %d failures\n", checks, failures);
  return failures ? 1 : 0;
}
