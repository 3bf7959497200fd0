// Many tensors as one run of blocks, spread over torch's threads.
#pragma once
#include <algorithm>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "share.h"

namespace memkern {

// Fewer blocks than this for each thread, and waking it costs more than it saves.
constexpr int64_t kGrainElements = 1 << 15;
constexpr int64_t kChunksPerThread = 32;

template <class J> void run_jobs(const std::vector<J>& jobs) {
  if (jobs.empty()) return;
  std::vector<int64_t> first(jobs.size() + 1, 0);
  int64_t elements = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    first[i + 1] = first[i] + jobs[i].layout.blocks;
    elements += jobs[i].layout.numel;
  }
  const int64_t blocks = first.back();
  if (blocks == 0) return;
  const auto run = [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (; begin < end; ++i) {
      const int64_t stop = std::min(end, first[i + 1]);
      if (begin < stop) jobs[i].run(jobs[i], begin - first[i], stop - first[i]);
      begin = std::max(begin, stop);
    }
  };
  // More chunks than threads, so that one that is held up does not hold up the step.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t grain = std::max<int64_t>(1, kGrainElements * blocks / elements);
  const int64_t chunk = std::max(grain, blocks / (kChunksPerThread * threads));
  const int64_t chunks = (blocks + chunk - 1) / chunk;
  share(chunks, threads, [&](int64_t k) { run(k * chunk, std::min(blocks, (k + 1) * chunk)); });
}

}  // namespace memkern
