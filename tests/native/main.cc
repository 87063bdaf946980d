// Runs every case on one instruction set after the other and compares with the shared checksums.
//
//   native_tests                          every instruction set that is usable here
//   native_tests --instruction-set NAME   one of them, or `amx_model`, usable everywhere:
//                                         AMX on a model of its instructions
//   native_tests --checksums FILE         against another file of checksums
//   native_tests --record                 writes that file, with the portable set
//   native_tests --list                   names the cases
//   native_tests --instruction-sets       names the usable instruction sets, best first
//
// Prints a line `name checksum` for every case when one set runs.
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "cases.h"
#include "float_env.h"
#include "kernels/kernels.h"
#include "tile_operations.h"

namespace jax_w4a8 {
namespace {

using Recorded = std::map<std::string, std::string>;

std::string Hex(uint64_t value) {
  char text[17];
  snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string Run(const Case& one, const Kernels& kernels) {
  const ScopedFloatEnv float_env;
  Checksum checksum;
  one.run(kernels, checksum);
  return Hex(checksum.value());
}

Cases AllCases() {
  Cases cases;
  AddKernelCases(cases);
  AddLayerCases(cases);
  AddAttentionCases(cases);
  AddPackingCases(cases);
  return cases;
}

std::vector<std::string> UsableNames() {
  int count = 0;
  const Kernels* const* usable = UsableKernels(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(usable[i]->name);
  return names;
}

// One of the usable ones, in use from now on, or the model of one; null if there is none.
const Kernels* TablesOf(const std::string& name) {
  if (name == kAmxModelKernels.name) return &kAmxModelKernels;
  return ForceKernels(name.c_str()) ? &ActiveKernels() : nullptr;
}

Recorded Read(const char* file) {
  Recorded recorded;
  std::ifstream in(file);
  std::string name, checksum;
  while (in >> name >> checksum) recorded[name] = checksum;
  return recorded;
}

int Record(const char* file) {
  ForceKernels("portable");
  std::ofstream out(file, std::ios::binary);  // the same bytes on every system
  for (const Case& one : AllCases()) out << one.name << ' ' << Run(one, ActiveKernels()) << '\n';
  out.close();
  if (out) return 0;
  fprintf(stderr, "native_tests: can't write %s\n", file);
  return 2;
}

// The number of cases that differ from the recorded ones, or that one of the two lists lacks.
int Compare(const std::string& set, const char* file, bool print) {
  const Kernels* kernels = TablesOf(set);
  if (!kernels) {
    fprintf(stderr, "native_tests: instruction set %s isn't usable here\n", set.c_str());
    return 1;
  }
  Recorded recorded = Read(file);
  int differences = 0, cases = 0;
  for (const Case& one : AllCases()) {
    const std::string checksum = Run(one, *kernels);
    if (print) printf("%s %s\n", one.name.c_str(), checksum.c_str());
    ++cases;
    const auto found = recorded.find(one.name);
    if (found == recorded.end() || found->second != checksum) {
      ++differences;
      fprintf(stderr, "%s: %s is %s, recorded as %s\n", set.c_str(), one.name.c_str(),
              checksum.c_str(), found == recorded.end() ? "nothing" : found->second.c_str());
    }
    if (found != recorded.end()) recorded.erase(found);
  }
  for (const auto& left : recorded) {
    ++differences;
    fprintf(stderr, "%s: there is no case %s, which %s has\n", set.c_str(), left.first.c_str(),
            file);
  }
  fprintf(stderr, "%s: %d cases, %d differences\n", set.c_str(), cases, differences);
  return differences;
}

int Main(int count, char** arguments) {
  const char* file = CHECKSUMS_FILE;
  std::vector<std::string> sets;
  std::string action;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const bool has_value = i + 1 < count;
    if (argument == "--instruction-set" && has_value) {
      sets.push_back(arguments[++i]);
    } else if (argument == "--checksums" && has_value) {
      file = arguments[++i];
    } else if (argument == "--record" || argument == "--list" || argument == "--instruction-sets") {
      action = argument;
    } else {
      fprintf(stderr, "native_tests: can't make sense of %s\n", argument.c_str());
      return 2;
    }
  }
  if (action == "--record") return Record(file);
  if (action == "--list") {
    for (const Case& one : AllCases()) printf("%s\n", one.name.c_str());
    return 0;
  }
  if (action == "--instruction-sets") {
    for (const std::string& name : UsableNames()) printf("%s\n", name.c_str());
    return 0;
  }
  const bool print = sets.size() == 1;
  if (sets.empty()) sets = UsableNames();
  int differences = 0;
  for (const std::string& set : sets) differences += Compare(set, file, print);
  return differences ? 1 : 0;
}

}  // namespace

void Checksum::AddBytes(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
}

void Checksum::AddFloats(DType dtype, const void* data, size_t count) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  const size_t size = SizeOf(dtype);
  const uint32_t infinity = dtype == DType::kF32    ? 0x7f800000u
                            : dtype == DType::kBF16 ? 0x7f80u
                                                    : 0x7c00u;
  const uint32_t magnitude = dtype == DType::kF32 ? 0x7fffffffu : 0x7fffu;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    memcpy(&bits, bytes + i * size, size);
    if ((bits & magnitude) > infinity) bits = magnitude;
    AddBytes(&bits, size);
  }
}

void Checksum::AddFloats(const std::vector<float>& data) {
  AddFloats(DType::kF32, data.data(), data.size());
}

}  // namespace jax_w4a8

int main(int count, char** arguments) { return jax_w4a8::Main(count, arguments); }
