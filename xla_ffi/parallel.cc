#include "parallel.h"

#include <thread>
#include <utility>

#include "float_env.h"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#endif

namespace jax_w4a8 {
namespace {

std::atomic<int> thread_limit{0};

void Pause() {
#if defined(__SSE2__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits a little longer each time it is asked: a few hundred pauses (some microseconds), then the
// processor is offered to others. False once it has been asked for so long that a helper had better
// go home.
class Patience {
 public:
  bool Wait() {
    ++asked_;
    if (asked_ < kPauses) {
      Pause();
    } else {
      std::this_thread::yield();
    }
    return asked_ < kPauses + kYields;
  }

 private:
  static constexpr int kPauses = 2000;
  static constexpr int kYields = 2000;
  int asked_ = 0;
};

// Phase, number of items and next item in one word, so that a helper which comes late can't mistake
// one phase's items for another's.
constexpr int kItemBits = 24;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;
constexpr uint64_t kClosed = ~uint64_t{0} << (2 * kItemBits);

uint64_t NextOf(uint64_t ticket) { return ticket & kItemMask; }
uint64_t ItemsOf(uint64_t ticket) { return (ticket >> kItemBits) & kItemMask; }
bool IsClosed(uint64_t ticket) { return ticket >= kClosed; }

}  // namespace

void SetThreadLimit(int limit) { thread_limit.store(limit, std::memory_order_relaxed); }
int ThreadLimit() { return thread_limit.load(std::memory_order_relaxed); }

// Outlives the call: helpers that start late still look at it.
struct Team::Shared {
  // On a cache line of its own: every thread writes it.
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int64_t> finished{0};
  std::atomic<int> helpers{0};  // scheduled and not yet gone
  // Of the open phase; written before its ticket, stable until all its items are finished.
  Function function = nullptr;
  const void* body = nullptr;
  int64_t grain = 1;
  int64_t total = 0;

  // Takes an item of the open phase and runs it; false when none is left.
  bool RunOne(int worker) {
    uint64_t ticket = this->ticket.load(std::memory_order_acquire);
    if (NextOf(ticket) >= ItemsOf(ticket)) return false;
    ticket = this->ticket.fetch_add(1, std::memory_order_acq_rel);
    if (NextOf(ticket) >= ItemsOf(ticket)) return false;
    const int64_t begin = static_cast<int64_t>(NextOf(ticket)) * grain;
    const int64_t end = begin + grain < total ? begin + grain : total;
    for (int64_t item = begin; item < end; ++item) function(body, item, worker);
    finished.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
};

Team::Team(Schedule schedule, int threads)
    : schedule_(std::move(schedule)),
      threads_(threads < 1 ? 1 : threads),
      shared_(threads_ > 1 ? std::make_shared<Shared>() : nullptr) {}

Team::~Team() {
  if (shared_) shared_->ticket.store(kClosed, std::memory_order_release);
}

void Team::Help(const std::shared_ptr<Shared>& shared, int worker) {
  const ScopedFloatEnv float_env;
  Patience patience;
  while (!IsClosed(shared->ticket.load(std::memory_order_acquire))) {
    if (shared->RunOne(worker)) {
      patience = Patience();
    } else if (!patience.Wait()) {
      break;
    }
  }
  shared->helpers.fetch_sub(1, std::memory_order_acq_rel);
}

void Team::ScheduleHelpers() {
  // Helpers leave while the caller is busy with a long item; workers' numbers are theirs again only
  // when all have left, since two helpers must not share one.
  int none = 0;
  if (!shared_->helpers.compare_exchange_strong(none, threads_ - 1, std::memory_order_acq_rel))
    return;
  for (int worker = 1; worker < threads_; ++worker) {
    schedule_([shared = shared_, worker] { Help(shared, worker); });
  }
}

void Team::Run(int64_t items, Function function, const void* body) {
  Shared& shared = *shared_;
  shared.function = function;
  shared.body = body;
  shared.total = items;
  shared.grain = 1 + (items - 1) / (static_cast<int64_t>(kItemMask) / 2);
  shared.finished.store(0, std::memory_order_relaxed);
  const uint64_t tickets = static_cast<uint64_t>((items + shared.grain - 1) / shared.grain);
  // Wraps round well below kClosed.
  const uint64_t phase =
      ((shared.ticket.load(std::memory_order_relaxed) >> (2 * kItemBits)) + 1) & 0x7fff;
  shared.ticket.store((phase << (2 * kItemBits)) | (tickets << kItemBits),
                      std::memory_order_release);
  ScheduleHelpers();
  while (shared.RunOne(0)) {
  }
  Patience patience;
  while (shared.finished.load(std::memory_order_acquire) < static_cast<int64_t>(tickets)) {
    patience.Wait();
  }
}

}  // namespace jax_w4a8
