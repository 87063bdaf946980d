// Packing as Python calls it: checks arrays, then packs them without the interpreter's lock.
#ifndef JAX_W4A8_XLA_FFI_PACK_BINDING_H_
#define JAX_W4A8_XLA_FFI_PACK_BINDING_H_

#include <nanobind/nanobind.h>

namespace jax_w4a8 {

// Adds pack_codes, pack_words and pack_floats to the module.
void BindPacking(nanobind::module_& module);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_PACK_BINDING_H_
