// As much of XLA's side of the FFI as a handler sees: call frames, errors and a thread pool, with
// no jaxlib behind them.
#ifndef JAX_W4A8_TESTS_FUZZ_FAKE_XLA_H_
#define JAX_W4A8_TESTS_FUZZ_FAKE_XLA_H_

#include <stdint.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_w4a8 {

// An operand or result. Memory is as large as its elements need and not a byte larger.
struct Tensor {
  // Larger ones have no memory at all: a handler has to refuse them by their shape.
  static constexpr int64_t kMostBytes = 1 << 20;

  XLA_FFI_DataType dtype = XLA_FFI_DataType_F32;
  std::vector<int64_t> dims;
  std::unique_ptr<uint8_t[]> data;
  int64_t bytes = 0;
  bool ghost = false;  // its elements need more memory than it has

  // To be called once dtype and dims are final. Null data where there is nothing to point to, or a
  // pointer to nothing.
  void Allocate(bool null_if_empty);
};

int64_t ByteWidth(XLA_FFI_DataType dtype);

struct Attribute {
  std::string name;
  XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_INVALID;
  uint64_t value = 0;
};

struct Outcome {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
};

// What a pool of that many threads does with a task.
struct FakePool {
  int64_t threads = 1;
  bool available = true;  // false: calls return errors
  // Null: tasks start when the call is over.
  std::function<void(std::function<void()>)> schedule;
};

struct Call {
  std::vector<Tensor> args;
  std::vector<Tensor> rets;
  std::vector<Attribute> attrs;  // ascending by name, as XLA gives them
  XLA_FFI_ExecutionStage stage = XLA_FFI_ExecutionStage_EXECUTE;

  Outcome Run(XLA_FFI_Handler* handler, const FakePool& pool);
};

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_FUZZ_FAKE_XLA_H_
