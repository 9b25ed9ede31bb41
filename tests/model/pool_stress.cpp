// Rounds of random length on a pool of threads that now and then lose their core, and sleep between some of them. Every
// item must be done once, by a thread of the pool, and before its round is over. Compiled and run by test_native_pool.py.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"

int main(int, char** words) {
  const int threads = std::atoi(words[1]), rounds = std::atoi(words[2]);
  segue::Pool pool(threads);
  std::mt19937 random(7);
  std::vector<int> done;  // plain, so that whoever reads what another is still writing is found out
  for (int round = 0; round < rounds; round++) {
    const int total = static_cast<int>(random() % 40);
    done.assign(total, 0);
    const auto item = [&](int thread, int i) {
      if (thread < 0 || thread >= threads) std::abort();
      if (round % 15 == 0 && i % 7 == 0) std::this_thread::yield();
      done[i] += round + 1;
    };
    if (round % 2 == 0)
      pool.deal(total, item);
    else
      pool.share(total, [&](int thread, int begin, int end) {
        for (int i = begin; i < end; i++) item(thread, i);
      });
    for (int i = 0; i < total; i++)
      if (done[i] != round + 1) return std::printf("round %d: item %d of %d was done wrong\n", round, i, total), 1;
    if (round % 4096 == 0) std::this_thread::sleep_for(std::chrono::milliseconds{20});  // workers go to sleep
  }
  return 0;
}
