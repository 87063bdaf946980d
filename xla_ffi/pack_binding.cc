#include "pack_binding.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "layout.h"
#include "pack.h"

namespace jax_w4a8 {
namespace {

namespace nb = nanobind;

template <class T>
using Rows = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;
// float32, or the bits of bfloat16 and float16 as uint16.
using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using CodeBlocks = nb::ndarray<uint8_t, nb::ndim<3>, nb::device::cpu>;
using ScaleBlocks = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using SumBlocks = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

void Require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

int64_t Size(size_t size) { return static_cast<int64_t>(size); }

// Whether elements of an axis are neighbours.
template <class Array>
bool IsDense(const Array& array, size_t axis, int64_t stride) {
  return array.shape(axis) <= 1 || array.stride(axis) == stride;
}

template <class Array>
bool Holds(const Array& array, DType dtype) {
  return array.dtype() == (dtype == DType::kF32 ? nb::dtype<float>() : nb::dtype<uint16_t>());
}

DType DTypeOf(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  Require(name == "float16", "dtype must be float32, bfloat16 or float16");
  return DType::kF16;
}

PackTarget TargetOf(const CodeBlocks& codes, const ScaleBlocks& scale, const std::string& dtype,
                    const SumBlocks& scaled_sum, int64_t inputs) {
  PackTarget target = {};
  target.codes = codes.data();
  target.scale = scale.data();
  target.scale_dtype = DTypeOf(dtype);
  target.scaled_sum = scaled_sum.data();
  target.codes_stride = codes.stride(0);
  target.scale_stride = scale.stride(0);
  target.sum_stride = scaled_sum.stride(0);
  target.blocks = Size(codes.shape(0));
  target.groups = Size(codes.shape(1));
  target.group_width = Size(codes.shape(2)) / kRunInputs;
  target.inputs = inputs;
  const int64_t group_bytes = target.group_width * kRunInputs;
  Require(target.groups > 0 && group_bytes > 0 && Size(codes.shape(2)) == group_bytes &&
              target.group_width % kChunkInputs == 0,
          "codes must be [blocks, groups, 8 * group_width]");
  Require(inputs > (target.groups - 1) * target.group_width &&
              inputs <= target.groups * target.group_width,
          "inputs must end in the last group");
  Require(target.scale_dtype != DType::kF16 && Holds(scale, target.scale_dtype),
          "scale must be float32 or bfloat16");
  Require(scale.shape(0) == codes.shape(0) && scale.shape(1) == codes.shape(1) &&
              scale.shape(2) == kBlockChannels && scaled_sum.shape(0) == codes.shape(0) &&
              scaled_sum.shape(1) == kBlockChannels,
          "scale and scaled_sum must have the blocks and groups of codes");
  Require(IsDense(codes, 2, 1) && IsDense(codes, 1, group_bytes) && IsDense(scale, 2, 1) &&
              IsDense(scale, 1, kBlockChannels) && IsDense(scaled_sum, 1, 1),
          "blocks must have no gaps inside");
  return target;
}

template <class T, class Array>
PackRows<T> RowsOf(const Array& rows, int64_t columns, const PackTarget& target) {
  const int64_t count = Size(rows.shape(0));
  Require(Size(rows.shape(1)) == columns && IsDense(rows, 1, 1), "rows must hold all inputs");
  Require((count + kBlockChannels - 1) / kBlockChannels == target.blocks,
          "rows must fill the blocks");
  return {static_cast<const T*>(rows.data()), rows.stride(0), count};
}

PackScales ScalesOf(const AnyRows& scales, const std::string& name, size_t rows,
                    const PackTarget& target) {
  const DType dtype = DTypeOf(name);
  Require(Holds(scales, dtype) && scales.shape(0) == rows &&
              Size(scales.shape(1)) == target.groups && IsDense(scales, 1, 1),
          "scales must be [rows, groups]");
  Require(dtype == DType::kF16 ? target.scale_dtype == DType::kF32 : dtype == target.scale_dtype,
          "scales must keep their dtype");
  return {scales.data(), dtype, scales.stride(0)};
}

bool Codes(const Rows<int8_t>& rows, const AnyRows& scales, const std::string& scales_dtype,
           int64_t inputs, const CodeBlocks& codes, const ScaleBlocks& scale,
           const std::string& scale_dtype, const SumBlocks& scaled_sum) {
  const PackTarget target = TargetOf(codes, scale, scale_dtype, scaled_sum, inputs);
  const auto source = RowsOf<int8_t>(rows, inputs, target);
  const PackScales from = ScalesOf(scales, scales_dtype, rows.shape(0), target);
  const nb::gil_scoped_release release;
  return PackCodes(source, from, target);
}

bool Words(const Rows<int32_t>& rows, const AnyRows& scales, const std::string& scales_dtype,
           int64_t inputs, const CodeBlocks& codes, const ScaleBlocks& scale,
           const std::string& scale_dtype, const SumBlocks& scaled_sum) {
  const PackTarget target = TargetOf(codes, scale, scale_dtype, scaled_sum, inputs);
  const auto source = RowsOf<int32_t>(rows, (inputs + kRunInputs - 1) / kRunInputs, target);
  const PackScales from = ScalesOf(scales, scales_dtype, rows.shape(0), target);
  const nb::gil_scoped_release release;
  return PackWords(source, from, target);
}

bool Floats(const AnyRows& rows, const std::string& dtype, int64_t inputs, const CodeBlocks& codes,
            const ScaleBlocks& scale, const std::string& scale_dtype, const SumBlocks& scaled_sum) {
  const PackTarget target = TargetOf(codes, scale, scale_dtype, scaled_sum, inputs);
  const DType from = DTypeOf(dtype);
  Require(Holds(rows, from), "rows must be of their dtype");
  const auto source = RowsOf<void>(rows, inputs, target);
  const nb::gil_scoped_release release;
  return PackFloats(from, source, target);
}

}  // namespace

void BindPacking(nb::module_& module) {
  module.def("pack_codes", &Codes);
  module.def("pack_words", &Words);
  module.def("pack_floats", &Floats);
}

}  // namespace jax_w4a8
