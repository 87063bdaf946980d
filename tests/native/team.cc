#include "team.h"

#include <stdint.h>

#include <thread>
#include <utility>
#include <vector>

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace jax_w4a8 {
namespace {

void FlushSubnormals() {
#if defined(__SSE2__) || defined(_M_X64)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
#endif
}

// A thread for each task; all have ended when it ends.
class Threads {
 public:
  ~Threads() {
    for (std::thread& thread : threads_) thread.join();
  }
  Schedule schedule() {
    return [this](std::function<void()> task) {
      threads_.emplace_back([task = std::move(task)] {
        FlushSubnormals();
        task();
      });
    };
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace

void WithTeam(int threads, const std::function<void(Team& team)>& run) {
  Threads helpers;
  Team team(helpers.schedule(), threads);
  run(team);
}

}  // namespace jax_w4a8
