// A parallel-for over phases that never waits for a task to start.
//
// XLA runs handlers on its intra-op pool, several at once. A handler that waits for tasks it
// scheduled there can wait for ever: every thread may be such a handler. Here the calling thread
// takes items itself and waits only for items that a helper has already taken; a helper that starts
// late finds the phases closed.
#ifndef JAX_W4A8_XLA_FFI_PARALLEL_H_
#define JAX_W4A8_XLA_FFI_PARALLEL_H_

#include <stdint.h>

#include <atomic>
#include <functional>
#include <memory>

namespace jax_w4a8 {

// Hands a task to some other thread, some time.
using Schedule = std::function<void(std::function<void()>)>;

// Most threads that a call may use, the calling one included; 0 for as many as the pool has. For
// tests.
void SetThreadLimit(int limit);
int ThreadLimit();

class Team {
 public:
  // `threads` includes the caller. Helpers are scheduled at the first phase that has work for them.
  Team(Schedule schedule, int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The caller is worker 0; items see workers of [0, threads()).
  int threads() const { return threads_; }
  // How often all were waited for: calls of ForEach with more than one item.
  int phases() const { return phases_; }

  // Calls body(item, worker) once for every item of [0, items), and returns when all are done. The
  // body must not throw.
  template <class Body>
  void ForEach(int64_t items, const Body& body) {
    if (items > 1) ++phases_;
    if (items <= 1 || threads_ == 1) {
      for (int64_t item = 0; item < items; ++item) body(item, 0);
      return;
    }
    Run(items, &Invoke<Body>, &body);
  }

 private:
  using Function = void (*)(const void* body, int64_t item, int worker);
  struct Shared;

  template <class Body>
  static void Invoke(const void* body, int64_t item, int worker) {
    (*static_cast<const Body*>(body))(item, worker);
  }

  void Run(int64_t items, Function function, const void* body);
  void ScheduleHelpers();
  static void Help(const std::shared_ptr<Shared>& shared, int worker);

  Schedule schedule_;
  int threads_;
  int phases_ = 0;
  std::shared_ptr<Shared> shared_;
};

}  // namespace jax_w4a8

#endif  // JAX_W4A8_XLA_FFI_PARALLEL_H_
