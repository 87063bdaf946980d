// Threads of every kind that a pool may come with: late, in any order, too few, all busy with calls
// of their own. Results must be those of one thread. Meant to be run under ThreadSanitizer too,
// which sees whether a phase's writes are finished before the next one reads them.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "matmul.h"
#include "moe.h"
#include "operands.h"
#include "pack.h"
#include "parallel.h"
#include "scratch.h"

namespace jax_w4a8 {
namespace {

enum class Order { kFirstComes, kLastComes, kAnyOrder, kLate };
constexpr Order kOrders[] = {Order::kFirstComes, Order::kLastComes, Order::kAnyOrder, Order::kLate};
constexpr const char* kOrderNames[] = {"first come", "last come", "any order", "late"};

// A pool as XLA's is: tasks may schedule tasks, and nothing says when one starts.
class Pool {
 public:
  Pool(int threads, Order order) : order_(order), random_(7) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  // Runs what is left.
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void Add(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }
  Schedule schedule() {
    return [this](std::function<void()> task) { Add(std::move(task)); };
  }

 private:
  void Work() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = Take();
      }
      if (order_ == Order::kLate) std::this_thread::sleep_for(std::chrono::microseconds(300));
      task();
    }
  }

  std::function<void()> Take() {
    size_t index = 0;
    if (order_ == Order::kLastComes) index = tasks_.size() - 1;
    if (order_ == Order::kAnyOrder)
      index = static_cast<size_t>(random_.Int(0, static_cast<int64_t>(tasks_.size()) - 1));
    std::function<void()> task = std::move(tasks_[index]);
    tasks_.erase(tasks_.begin() + static_cast<int64_t>(index));
    return task;
  }

  Order order_;
  Random random_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

std::atomic<int> failures{0};

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "native_threads: %s\n", what.c_str());
}

// ---------------------------------------------------------------------------------------------------------

// Phases whose items read what other items of the phase before have written, with no other
// synchronisation than the phases' end.
void RunPhases(Team& team, int64_t items, int phases, const std::string& name) {
  std::vector<int64_t> values(static_cast<size_t>(items)), next(values.size());
  for (int phase = 0; phase < phases; ++phase) {
    team.ForEach(items, [&](int64_t item, int worker) {
      if (worker < 0 || worker >= team.threads()) Expect(false, name + ": worker out of range");
      next[static_cast<size_t>(item)] += values[static_cast<size_t>((item + 1) % items)] + 1;
    });
    values.swap(next);
  }
  int64_t one_before = 0, one = 0;  // every element goes the same way
  for (int phase = 0; phase < phases; ++phase) {
    one_before += one + 1;
    std::swap(one, one_before);
  }
  Expect(std::count(values.begin(), values.end(), one) == items, name + ": an item ran too often");
}

// A worker's number is one thread's at a time: plain counters of each would race otherwise.
void CountByWorker(Team& team, int64_t items, const std::string& name) {
  std::vector<int64_t> counts(static_cast<size_t>(team.threads()));
  for (int phase = 0; phase < 20; ++phase) {
    team.ForEach(items, [&](int64_t, int worker) { ++counts[static_cast<size_t>(worker)]; });
  }
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  Expect(total == 20 * items, name + ": items lost between workers");
}

void TestPhases(Pool& pool, const std::string& name) {
  for (int threads : {1, 2, 5}) {
    for (int64_t items : {1, 2, 3, 64, 1000}) {
      Team team(pool.schedule(), threads);
      RunPhases(team, items, 30, name);
      CountByWorker(team, items, name);
    }
  }
}

// Helpers go home while the caller is busy, and new ones must not share their numbers.
void TestImpatience(Pool& pool, const std::string& name) {
  Team team(pool.schedule(), 3);
  std::vector<int64_t> counts(3);
  for (int phase = 0; phase < 3; ++phase) {
    team.ForEach(4, [&](int64_t item, int worker) {
      ++counts[static_cast<size_t>(worker)];
      if (item == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    });
  }
  Expect(counts[0] + counts[1] + counts[2] == 12, name + ": items lost while waiting");
}

// ---------------------------------------------------------------------------------------------------------

// Large enough for every phase to have several items.
struct Layer {
  static constexpr int64_t kTokens = 48, kTopK = 2, kExperts = 5, kHidden = 2048, kInner = 64;

  RandomMatrices w13{1, {2 * kInner, kHidden, 32, DType::kBF16}, kExperts};
  RandomMatrices w2{2, {kHidden, kInner, 32, DType::kF32}, kExperts};
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

  Layer() {
    Random random(3);
    x = random.Floats(kTokens * kHidden, -5, 1);
    weights = random.Floats(kTokens * kTopK, -3, -1);
    for (int64_t i = 0; i < kTokens * kTopK; ++i)
      ids.push_back(static_cast<int32_t>(random.Int(-1, kExperts - 1)));
  }

  std::vector<float> Run(const Schedule& schedule, int threads) const {
    std::vector<float> y(x.size());
    MoeCall call = {};
    call.dtype = DType::kF32;
    call.x = x.data();
    call.weights = weights.data();
    call.ids = ids.data();
    call.tokens = kTokens;
    call.top_k = kTopK;
    call.hidden = kHidden;
    call.experts = kExperts;
    call.w13 = w13.first();
    call.w2 = w2.first();
    call.activation = {ActivationKind::kSilu, 0, 0};
    call.y = y.data();
    Team team(schedule, threads);
    Expect(RunMoe(call, ActiveKernels(), team), "no memory");
    return y;
  }
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Calls that run on the pool itself, more than it has threads, each asking it for helpers.
void TestNestedLayers(Pool& pool, const Layer& layer, const std::vector<float>& wanted,
                      const std::string& name) {
  constexpr int kCalls = 12;
  std::mutex mutex;
  std::condition_variable done;
  int left = kCalls;
  for (int i = 0; i < kCalls; ++i) {
    pool.Add([&, i] {
      Expect(SameBits(layer.Run(pool.schedule(), 1 + i % 4), wanted), name + ": other bits");
      const std::lock_guard<std::mutex> lock(mutex);
      if (--left == 0) done.notify_one();
    });
  }
  std::unique_lock<std::mutex> lock(mutex);
  done.wait(lock, [&] { return left == 0; });
}

// What a process may do beside running calls: free scratch, limit threads, choose kernels.
void TestSettings(Pool& pool, const Layer& layer, const std::vector<float>& wanted) {
  std::atomic<bool> stop{false};
  int count = 0;
  const Kernels* const* usable = UsableKernels(&count);
  std::thread changes([&] {
    for (int i = 0; !stop; ++i) {
      ReleaseScratch();
      SetThreadLimit(i % 3);
      ForceKernels(usable[i % count]->name);
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 6; ++i) {
    Expect(SameBits(layer.Run(pool.schedule(), 3), wanted), "settings: other bits");
  }
  stop = true;
  changes.join();
  SetThreadLimit(0);
  ForceKernels(usable[0]->name);
}

// Blocks of one matrix packed by several threads.
void TestPacking() {
  constexpr int64_t kRows = 80, kInputs = 96, kGroups = 3, kBlocks = kRows / kBlockChannels;
  Random random(5);
  const std::vector<float> w = random.Floats(kRows * kInputs, -6, 0);
  struct Packed {
    std::vector<uint8_t> codes = std::vector<uint8_t>(kRows * kInputs / 2);
    std::vector<float> scale = std::vector<float>(kRows * kGroups);
    std::vector<float> sums = std::vector<float>(kRows);
  };
  const auto pack = [&](Packed* out, int64_t block, int64_t blocks) {
    PackTarget target = {};
    target.codes_stride = kInputs * kBlockChannels / 2;
    target.scale_stride = kGroups * kBlockChannels;
    target.sum_stride = kBlockChannels;
    target.codes = out->codes.data() + block * target.codes_stride;
    target.scale = out->scale.data() + block * target.scale_stride;
    target.scale_dtype = DType::kF32;
    target.scaled_sum = out->sums.data() + block * target.sum_stride;
    target.blocks = blocks;
    target.groups = kGroups;
    target.group_width = kInputs / kGroups;
    target.inputs = kInputs;
    const void* rows = w.data() + block * kBlockChannels * kInputs;
    Expect(PackFloats(DType::kF32, {rows, kInputs, blocks * kBlockChannels}, target), "packing");
  };
  Packed wanted, got;
  pack(&wanted, 0, kBlocks);
  std::vector<std::thread> threads;
  for (int64_t block = 0; block < kBlocks; ++block) {
    threads.emplace_back([&, block] { pack(&got, block, 1); });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(got.codes == wanted.codes && SameBits(got.scale, wanted.scale) &&
             SameBits(got.sums, wanted.sums),
         "packing: other bits");
}

int Main() {
  const Layer layer;
  const Schedule nobody = [](std::function<void()>) {};
  const std::vector<float> wanted = layer.Run(nobody, 1);
  Expect(SameBits(layer.Run(nobody, 4), wanted), "helpers that never come: other bits");
  for (size_t order = 0; order < std::size(kOrders); ++order) {
    for (int threads : {1, 2, 4}) {
      const std::string name =
          std::string(kOrderNames[order]) + ", " + std::to_string(threads) + " threads";
      // Tasks that are left run when everything that they were for is gone.
      Pool pool(threads, kOrders[order]);
      TestPhases(pool, name);
      TestImpatience(pool, name);
      Expect(SameBits(layer.Run(pool.schedule(), 4), wanted), name + ": other bits");
      TestNestedLayers(pool, layer, wanted, name);
    }
  }
  Pool pool(3, Order::kAnyOrder);
  TestSettings(pool, layer, wanted);
  TestPacking();
  fprintf(stderr, "native_threads: %d failures\n", failures.load());
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace jax_w4a8

int main() { return jax_w4a8::Main(); }
