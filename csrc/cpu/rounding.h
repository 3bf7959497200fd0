// What the power codec's unsigned codes add before they round down, for each place in a block.
#pragma once
#include <map>
#include <memory>

#include "../core/power.h"

namespace memkern {

// Tensors of one age and block size share theirs.
class Rounding {
 public:
  const float* at(int64_t block, uint64_t step) {
    auto& u = found_[{block, step}];
    if (!u) {
      u.reset(new float[block + 16]());
      for (int64_t j = 0; j < block; ++j)
        u[j] = dither(static_cast<uint32_t>(j), static_cast<uint32_t>(step));
    }
    return u.get();
  }

 private:
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<float[]>> found_;
};

}  // namespace memkern
