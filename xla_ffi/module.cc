// The extension module: hands out handlers and settings; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "handlers.h"
#include "kernels/kernels.h"
#include "pack_binding.h"
#include "parallel.h"
#include "probes.h"
#include "scratch.h"

namespace nb = nanobind;

namespace {

template <class Handler>
nb::capsule Encapsulate(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict handlers;
  handlers["fused_experts"] = Encapsulate(JaxW4A8FusedExperts);
  handlers["apply_experts"] = Encapsulate(JaxW4A8ApplyExperts);
  handlers["combine"] = Encapsulate(JaxW4A8Combine);
  handlers["linear"] = Encapsulate(JaxW4A8Linear);
  handlers["grouped_linear"] = Encapsulate(JaxW4A8GroupedLinear);
  handlers["attend"] = Encapsulate(JaxW4A8Attend);
  return handlers;
}

std::vector<std::string> InstructionSets() {
  int count = 0;
  const auto* tables = jax_w4a8::UsableKernels(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(tables[i]->name);
  return names;
}

int64_t PeakProbe(int64_t iterations) {
  int32_t sink = static_cast<int32_t>(iterations);
  return jax_w4a8::ActiveKernels().peak_probe(iterations, &sink);
}

int32_t ReadProbe(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
  const nb::gil_scoped_release release;
  int32_t sink = 0;
  jax_w4a8::ActiveKernels().read_probe(data.data(), static_cast<int64_t>(data.size()), &sink);
  return sink;
}

// (matrix, first row, rows, first block, end of blocks) of every item of work.
std::vector<std::vector<int64_t>> PlanProbe(int64_t blocks, int64_t groups, int64_t group_width,
                                            const std::vector<int64_t>& counts, int threads) {
  std::vector<std::vector<int64_t>> items;
  for (const auto& item : jax_w4a8::PlanProbe(blocks, groups, group_width, counts, threads)) {
    items.push_back(
        {item.run.index, item.run.begin, item.run.count, item.block_begin, item.block_end});
  }
  return items;
}

int MoeProbe(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate,
             int64_t group_width, int threads) {
  return jax_w4a8::RunMoeProbe(
      {tokens, top_k, experts, hidden, intermediate, group_width, threads});
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("registrations", &Registrations);
  m.def("ffi_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("instruction_sets", &InstructionSets);
  m.def("instruction_set", [] { return std::string(jax_w4a8::ActiveKernels().name); });
  m.def("force_instruction_set",
        [](const std::string& name) { return jax_w4a8::ForceKernels(name.c_str()); });
  m.def("set_thread_limit", &jax_w4a8::SetThreadLimit);
  m.def("thread_limit", &jax_w4a8::ThreadLimit);
  m.def("release_scratch", &jax_w4a8::ReleaseScratch);
  m.def("peak_probe", &PeakProbe, nb::call_guard<nb::gil_scoped_release>());
  m.def("read_probe", &ReadProbe);
  m.def("plan_probe", &PlanProbe);
  m.def("moe_probe", &MoeProbe);
#if defined(__VERSION__)
  m.attr("compiler") = __VERSION__;
#else
  m.attr("compiler") = "unknown";
#endif
  jax_w4a8::BindPacking(m);
}
