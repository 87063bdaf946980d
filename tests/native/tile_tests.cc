// The model of the tile instructions against their definition, and the processor's against the
// model.
#include <string.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "operands.h"
#include "tile_operations.h"
#include "units.h"

#ifdef JAX_W4A8_AMX
#include "kernels/cpu_x86.h"
#ifdef __linux__
#include <sys/wait.h>
#include <unistd.h>
#endif
#endif

namespace jax_w4a8 {
namespace {
#include "amx_instructions-inl.h"

struct NamedTile {
  int number, rows, row_bytes;
};

TileConfig ConfigOf(const std::vector<NamedTile>& tiles) {
  TileConfig config = {};
  config.palette = 1;
  for (const NamedTile& tile : tiles) {
    config.rows[tile.number] = static_cast<uint8_t>(tile.rows);
    config.row_bytes[tile.number] = static_cast<uint16_t>(tile.row_bytes);
  }
  return config;
}

void Configure(const std::vector<NamedTile>& tiles) {
  const TileConfig config = ConfigOf(tiles);
  _tile_loadconfig(&config);
}

// That `run` faults, with a message that says `what`.
void ExpectFault(const std::string& what, const std::function<void()>& run) {
  std::string message = "no fault";
  try {
    run();
  } catch (const std::logic_error& fault) {
    message = fault.what();
  }
  Expect(message.find(what) != std::string::npos, "a fault about " + what + ": " + message);
  _tile_release();
}

void ExpectConfigFault(const std::string& what, const std::function<void(TileConfig*)>& change) {
  ExpectFault(what, [&] {
    TileConfig config = ConfigOf({{0, 16, 64}});
    change(&config);
    _tile_loadconfig(&config);
  });
}

void TestConfigFaults() {
  ExpectConfigFault("palette", [](TileConfig* c) { c->palette = 2; });
  ExpectConfigFault("start row", [](TileConfig* c) { c->start_row = 1; });
  ExpectConfigFault("reserved", [](TileConfig* c) { c->reserved[13] = 1; });
  ExpectConfigFault("16 rows of 64 bytes", [](TileConfig* c) { c->rows[0] = 17; });
  ExpectConfigFault("16 rows of 64 bytes", [](TileConfig* c) { c->row_bytes[0] = 68; });
  ExpectConfigFault("rows or columns alone", [](TileConfig* c) { c->rows[3] = 1; });
  ExpectConfigFault("rows or columns alone", [](TileConfig* c) { c->row_bytes[0] = 0; });
  ExpectConfigFault("8 tiles", [](TileConfig* c) { c->rows[8] = 1, c->row_bytes[8] = 1; });
}

void TestUseFaults() {
  uint8_t memory[kTileBytes] = {};
  ExpectFault("aren't configured", [] { _tile_zero(0); });
  ExpectFault("aren't configured", [&] { _tile_loadd(0, memory, 64); });
  ExpectFault("aren't configured", [&] {
    Configure({{0, 1, 4}});
    const TileConfig none = {};
    _tile_loadconfig(&none);  // palette 0 releases
    _tile_stored(0, memory, 64);
  });
  ExpectFault("isn't configured", [] {
    Configure({{0, 1, 4}});
    _tile_zero(1);
  });
  const auto product = [](const std::vector<NamedTile>& tiles, int sum, int a, int b) {
    Configure(tiles);
    _tile_dpbssd(sum, a, b);
  };
  const std::vector<NamedTile> good = {{0, 3, 20}, {1, 3, 8}, {2, 2, 20}};
  ExpectFault("no fault", [&] {
    product(good, 0, 1, 2);
    throw std::logic_error("no fault");
  });
  ExpectFault("one tile twice", [&] { product(good, 0, 1, 1); });
  ExpectFault("one tile twice", [&] { product(good, 0, 0, 2); });
  ExpectFault("whole words", [&] { product({{0, 3, 20}, {1, 3, 6}, {2, 2, 20}}, 0, 1, 2); });
  ExpectFault("differ in rows", [&] { product({{0, 4, 20}, {1, 3, 8}, {2, 2, 20}}, 0, 1, 2); });
  ExpectFault("differ in columns", [&] { product({{0, 3, 24}, {1, 3, 8}, {2, 2, 20}}, 0, 1, 2); });
  ExpectFault("fit each other", [&] { product({{0, 3, 20}, {1, 3, 8}, {2, 3, 20}}, 0, 1, 2); });
}

// One row of 8 inputs and one column, all extremes.
void TestProduct() {
  const int8_t a[8] = {-128, 127, 3, 0, -128, 1, 2, 5},
               b[2][4] = {{-128, -128, 7, 9}, {127, 1, 1, 1}};
  int32_t sum = 2147483647 - 100;
  uint32_t expected = static_cast<uint32_t>(sum);
  for (int i = 0; i < 8; ++i) expected += static_cast<uint32_t>(a[i] * b[i / 4][i % 4]);
  Configure({{0, 1, 4}, {1, 1, 8}, {2, 2, 4}});
  _tile_loadd(0, &sum, 4);
  _tile_loadd(1, a, 8);
  _tile_loadd(2, b, 4);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, &sum, 4);
  _tile_release();
  Expect(static_cast<uint32_t>(sum) == expected, "a product of one element");
}

// Every stored code, in both halves of a byte, becomes the code that it stands for.
void TestDecoding() {
  uint8_t packed[64], out[128];
  bool right = true;
  for (int first = 0; first < 256; first += 64) {
    for (int i = 0; i < 64; ++i) packed[i] = static_cast<uint8_t>(first + i);
    kModelTiles.decode(packed, out);
    for (int i = 0; i < 64; ++i) {
      right = right && static_cast<int8_t>(out[i]) == (packed[i] & 15) - kCodeOffset;
      right = right && static_cast<int8_t>(out[64 + i]) == (packed[i] >> 4) - kCodeOffset;
    }
  }
  Expect(right, "decoding of packed weights");
}

#ifdef JAX_W4A8_AMX

// Random operands of every shape: the number of shapes in which `tiles` and the model differ.
int DifferencesFromModel(const TileOperations& tiles) {
  Random random(1);
  int differences = 0;
  const auto fill = [&](std::vector<uint8_t>& bytes) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Word());
  };
  std::vector<uint8_t> a(kTileBytes), b(kTileBytes), start(kTileBytes);
  for (int rows = 1; rows <= 16; ++rows) {
    for (int inputs = 4; inputs <= 64; inputs += 4) {
      const TileShape shape = {rows, inputs, static_cast<int>(random.Int(1, 16))};
      fill(a);
      fill(b);
      fill(start);
      std::vector<uint8_t> sums[2] = {start, start}, zeros[2] = {start, start};
      tiles.product(shape, sums[0].data(), a.data(), b.data(), zeros[0].data());
      kModelTiles.product(shape, sums[1].data(), a.data(), b.data(), zeros[1].data());
      differences += sums[0] != sums[1] || zeros[0] != zeros[1] || sums[0] == start;
      uint8_t decoded[2][128];
      tiles.decode(a.data(), decoded[0]);
      kModelTiles.decode(a.data(), decoded[1]);
      differences += memcmp(decoded[0], decoded[1], sizeof(decoded[0])) != 0;
    }
  }
  return differences;
}

#ifdef __linux__
int DifferencesInFork() {
  const pid_t child = fork();
  if (child == 0) _exit(DifferencesFromModel(kSiliconTiles) ? 1 : 0);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}
#endif

// Tiles are asked for once, by one thread; all have them then, and forks have them, too.
void TestSilicon() {
  std::mutex mutex;
  std::condition_variable changed;
  bool asked = false, usable = false;
  int before = 0, after = 0;
  std::thread early([&] {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return asked; });
    if (usable) before = DifferencesFromModel(kSiliconTiles);
  });
  {
    const std::lock_guard<std::mutex> lock(mutex);
    usable = DetectX86().amx_int8;
    asked = true;
  }
  changed.notify_all();
  early.join();
  if (!usable) return;
  std::thread late([&] { after = DifferencesFromModel(kSiliconTiles); });
  late.join();
  Expect(before == 0, "tiles in a thread from before the request");
  Expect(after == 0, "tiles in a thread from after the request");
  Expect(DifferencesFromModel(kSiliconTiles) == 0, "tiles in the thread that asked");
#ifdef __linux__
  Expect(DifferencesInFork() == 0, "tiles in a fork");
#endif
}

#endif  // JAX_W4A8_AMX

}  // namespace

void TestTileModel() {
  TestConfigFaults();
  TestUseFaults();
  TestProduct();
  TestDecoding();
}

void TestTilesOfProcessor() {
#ifdef JAX_W4A8_AMX
  TestSilicon();
#endif
}

}  // namespace jax_w4a8
