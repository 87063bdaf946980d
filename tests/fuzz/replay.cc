// Runs a fuzz target on the files it is given, for compilers without libFuzzer. Arguments that
// begin with a dash, which are libFuzzer's, are passed over.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

void RunFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in),
                                std::istreambuf_iterator<char>()};
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int count, char** arguments) {
  int runs = 0;
  for (int i = 1; i < count; ++i) {
    const std::filesystem::path path = arguments[i];
    if (arguments[i][0] == '-') continue;
    if (!std::filesystem::is_directory(path)) {
      RunFile(path);
      ++runs;
      continue;
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (!entry.is_regular_file()) continue;
      RunFile(entry.path());
      ++runs;
    }
  }
  fprintf(stderr, "Done %d runs\n", runs);
  return 0;
}
