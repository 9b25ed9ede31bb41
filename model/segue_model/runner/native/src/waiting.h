// A number that threads wait for. Waiting spins briefly, yields for about a millisecond, then sleeps: on a quiet machine
// the wait is over before that; on a busy one a thread that spun on would use up the time slice it needs when its turn
// comes. To yield costs others nothing, and to be woken takes longer than what another thread usually waits for: the
// event loop that sends a token on its core.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <chrono>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace segue {

class Signal {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }

  // Before any thread can be waiting.
  void reset(uint32_t value) { value_.store(value, std::memory_order_relaxed); }

  // Adds and wakes who sleeps. Sequentially consistent, as is sleep(): either the sleeper sees the new value, or its
  // presence is seen here.
  void add(int32_t delta) {
    value_.fetch_add(static_cast<uint32_t>(delta));
    if (sleepers_.load() > 0) wake();
  }

  template <class Done>
  void wait(Done done) {
    for (int spin = 0; spin < kSpins; spin++) {
      if (done(load())) return;
      pause();
    }
    for (int yield = 0; yield < kYields; yield++) {
      if (done(load())) return;
      std::this_thread::yield();
    }
    sleepers_.fetch_add(1);
    for (uint32_t seen; !done(seen = value_.load());) sleep(seen);
    sleepers_.fetch_sub(1);
  }

 private:
  static constexpr int kSpins = 1000;  // some tens of microseconds
  static constexpr int kYields = 3000;  // about a millisecond, if nobody else wants the core

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == 4);
  void sleep(uint32_t seen) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds{200}); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace segue
