// Pieces of work for torch's threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "../tensors.h"

namespace memkern {

// Calls run(k) for each of [0, count) in up to `threads` threads. A thread begins with a part of its own, the
// same in every call, and then helps where another is held up: so what one pass left in a core's caches the
// next finds there. (Where two cores have a last-level cache each, a step of LAMB takes 0.8 of the time that
// it takes where pieces go to whoever comes first.)
template <class Run> void share(int64_t count, int64_t threads, Run&& run) {
  threads = std::min(threads, count);
  std::vector<std::atomic<int64_t>> next(threads);
  for (int64_t t = 0; t < threads; ++t) next[t] = count * t / threads;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t turn = 0; turn < threads; ++turn) {
        const int64_t owner = (t + turn) % threads, stop = count * (owner + 1) / threads;
        for (int64_t k; (k = next[owner].fetch_add(1)) < stop;) run(k);
      }
  });
}

}  // namespace memkern
