// Cases of the native test program: named computations on made-up operands, whose results every
// instruction set of every architecture must have bit for bit.
#ifndef JAX_W4A8_TESTS_NATIVE_CASES_H_
#define JAX_W4A8_TESTS_NATIVE_CASES_H_

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "layout.h"

namespace jax_w4a8 {

// 64-bit FNV-1a of what is added. The contract says which results are NaN, not which NaN they are:
// processors make different ones, and all count as the same.
class Checksum {
 public:
  void AddBytes(const void* data, size_t size);
  void AddInt(int64_t value) { AddBytes(&value, sizeof(value)); }
  void AddFloats(DType dtype, const void* data, size_t count);
  void AddFloats(const std::vector<float>& data);
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

struct Case {
  std::string name;  // without spaces
  // Adds the results of `kernels`, which are the ones in use, too.
  std::function<void(const Kernels& kernels, Checksum& out)> run;
};

using Cases = std::vector<Case>;

void AddKernelCases(Cases& cases);     // every member of Kernels
void AddLayerCases(Cases& cases);      // linear maps and whole expert calls
void AddAttentionCases(Cases& cases);  // attention over a cache
void AddPackingCases(Cases& cases);    // weights to the packed layout

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_NATIVE_CASES_H_
