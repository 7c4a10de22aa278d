// Threads for kernels. share(n, body) runs body(0) .. body(n - 1) for calls of tens of microseconds, many of them a
// millisecond apart or less (decoding); share_long does it for calls of a millisecond (prompts).
//
// share never waits for a thread that has not begun: the caller hands out pieces from a counter that it also draws from,
// and helpers give way at the end of a piece to whoever else wants their core. Measured beside one busy process, one-token
// products of 1.1 MB: 22 -> 12 GB/s, against 23 -> 5 for OpenMP (static or dynamic), whose barrier waits for every thread.
//
// share_long is an OpenMP loop while the machine is quiet, because around long calls torch's own loops run, whose threads
// spin for milliseconds afterwards on the cores that helpers would need. Beside other processes it is share: a 512-token
// attention beside four of them took 16 ms by OpenMP, 6 ms by share.
//
// The number of threads is OpenMP's, so torch.set_num_threads is followed. A child process after fork starts its own helpers.
#pragma once

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace opmux {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Pool {
 public:
  using Piece = void (*)(const void* body, int64_t index);

  static Pool& get() {
    // Never destroyed: helpers may outlive static destructors.
    static Pool* pool = [] {
      Pool* made = new Pool;
      pthread_atfork(nullptr, nullptr, [] { get().forget_helpers(); });
      return made;
    }();
    return *pool;
  }

  // Runs the pieces on at most `threads` threads. False if another thread is using the pool; then nothing was run.
  bool run(int64_t n, Piece piece, const void* body, int threads) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    resize(threads - 1);
    n_ = n;
    piece_ = piece;
    body_ = body;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1);
    if (sleeping_.load()) wake();
    work();
    // Closing the gate keeps late helpers out; those inside finish the piece they are at.
    if (gate_.fetch_and(~kOpen) & ~kOpen) wait_until_empty();
    taken_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr int kOpen = 1 << 30;
  // Longer than the Python between two kernels of a model, much shorter than a scheduler's time slice.
  static constexpr int64_t kSpinNs = 100'000;
  static constexpr int64_t kTurnNs = 50'000;

  // Polls `done` for a while, giving the core away whenever somebody else wants it. False: still not done.
  template <class Done>
  static bool spin(const Done& done) {
    const int64_t start = now_ns();
    do {
      for (int k = 0; k < 64; ++k) {
        if (done()) return true;
        pause_briefly();
      }
      sched_yield();
    } while (now_ns() - start < kSpinNs);
    return done();
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_;) piece_(body_, i);
  }

  // Pieces for a turn. True if there may be more.
  bool work_a_turn() {
    const int64_t end = now_ns() + kTurnNs;
    do {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= n_) return false;
      piece_(body_, i);
    } while (now_ns() < end);
    return true;
  }

  void wake() {
    pthread_mutex_lock(&mutex_);
    pthread_cond_broadcast(&changed_);
    pthread_mutex_unlock(&mutex_);
  }

  void wait_until_empty() {
    const auto empty = [&] { return gate_.load() == 0; };
    if (spin(empty)) return;
    // Asleep, the caller leaves its core to the helper that it waits for.
    pthread_mutex_lock(&mutex_);
    caller_sleeps_.store(true);
    while (!empty()) pthread_cond_wait(&changed_, &mutex_);
    caller_sleeps_.store(false);
    pthread_mutex_unlock(&mutex_);
  }

  struct Start {
    Pool* pool;
    int index;
    int seen;
  };

  static void* entry(void* argument) {
    const Start start = *static_cast<Start*>(argument);
    delete static_cast<Start*>(argument);
    start.pool->help(start.index, start.seen);
    return nullptr;
  }

  void help(int index, int seen) {
    const auto called = [&] { return round_.load() != seen; };
    for (;;) {
      if (!spin(called)) {
        pthread_mutex_lock(&mutex_);
        sleeping_.fetch_add(1);
        while (!called()) pthread_cond_wait(&changed_, &mutex_);
        sleeping_.fetch_sub(1);
        pthread_mutex_unlock(&mutex_);
      }
      seen = round_.load(std::memory_order_acquire);
      if (index >= wanted_.load(std::memory_order_acquire)) return;
      while (enter()) {
        const bool more = work_a_turn();
        if (gate_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake();
        if (!more) break;
        // Outside the gate nobody waits for this thread, so this is where it may lose its core.
        sched_yield();
      }
    }
  }

  bool enter() {
    int gate = gate_.load(std::memory_order_relaxed);
    while (gate & kOpen) {
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void resize(int wanted) {
    if (wanted == static_cast<int>(helpers_.size())) return;
    wanted_.store(wanted, std::memory_order_release);
    if (wanted < static_cast<int>(helpers_.size())) {
      round_.fetch_add(1);
      wake();
      for (size_t k = wanted; k < helpers_.size(); ++k) pthread_join(helpers_[k], nullptr);
      helpers_.resize(wanted);
    }
    while (static_cast<int>(helpers_.size()) < wanted) {
      auto* start = new Start{this, static_cast<int>(helpers_.size()), round_.load()};
      pthread_t thread;
      if (pthread_create(&thread, nullptr, entry, start) != 0) {
        delete start;
        break;  // no more threads to be had: the call runs on those there are
      }
      helpers_.push_back(thread);
    }
  }

  // In the child after fork: its helpers did not come along.
  void forget_helpers() {
    helpers_.clear();
    mutex_ = PTHREAD_MUTEX_INITIALIZER;
    changed_ = PTHREAD_COND_INITIALIZER;
    gate_.store(0);
    sleeping_.store(0);
    caller_sleeps_.store(false);
    taken_.store(false);
  }

  // Helpers read round_ all the time, everybody writes next_: one cache line each.
  alignas(64) std::atomic<int> round_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> gate_{0};  // helpers inside, plus kOpen while a call hands out pieces
  int64_t n_ = 0;
  Piece piece_ = nullptr;
  const void* body_ = nullptr;
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<int> wanted_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> taken_{false};
  std::vector<pthread_t> helpers_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

// Calls body(0) .. body(n - 1), in any order, on this thread and on helpers. Which thread runs a piece must not matter.
template <class Body>
void share(int64_t n, const Body& body) {
  const auto piece = [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); };
  const int threads = n <= 1 || omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads > 1 && Pool::get().run(n, piece, &body, threads)) return;
  for (int64_t i = 0; i < n; ++i) body(i);
}

inline std::atomic<int64_t> openmp_avoided_until{0};

template <class Body>
void share_long(int64_t n, const Body& body) {
  // A thread that is this late at the barrier was without a core: no piece is as long.
  constexpr int64_t kLateNs = 1'000'000, kAvoidNs = 200'000'000;
  const int threads = n <= 1 || omp_in_parallel() ? 1 : static_cast<int>(std::min<int64_t>(omp_get_max_threads(), n));
  if (threads == 1 || now_ns() < openmp_avoided_until.load(std::memory_order_relaxed)) return share(n, body);
  std::atomic<int64_t> next{0};
  int64_t done = 0;
#pragma omp parallel num_threads(threads)
  {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
    if (omp_get_thread_num() == 0) done = now_ns();
  }
  const int64_t end = now_ns();
  if (end - done > kLateNs) openmp_avoided_until.store(end + kAvoidNs, std::memory_order_relaxed);
}

}  // namespace opmux
