// How thread blocks, warps and lanes share the blocks of a tensor.
//
// A thread block takes a tile: whole blocks of one tensor, about kTileElements. A block is held by a group of
// lanes of one warp, eight consecutive elements each; blocks of more than 256 elements take several turns.
#pragma once
#include "common/layout.h"
#include "lanes.cuh"

namespace memkern {

constexpr int kTileElements = 1 << 14;

// A tensor's blocks, as kernels and the table hold them.
struct Blocks {
  int64_t segment, blocks;
  int32_t blocks_per_segment, block, tile_blocks, unused;
};

inline Blocks blocks_of(const BlockLayout& l) {
  const int32_t block = static_cast<int32_t>(l.block);
  return {l.segment,
          l.blocks,
          static_cast<int32_t>(l.blocks_per_segment),
          block,
          block < kTileElements ? kTileElements / block : 1,
          0};
}

inline int64_t tiles_of(const Blocks& b) { return (b.blocks + b.tile_blocks - 1) / b.tile_blocks; }

// The tensor that a tile belongs to: the last whose first tile is not after it. A warp looks at 32 at once.
MEMKERN_DEVICE int find_tensor(const uint32_t* first_tiles, int count, uint32_t tile) {
  const int lane = threadIdx.x % kWarp;
  int found = 0;
  while (count > 1) {
    const int stride = (count + kWarp - 1) / kWarp, i = lane * stride;
    const unsigned before = __ballot_sync(kAllLanes, i < count && first_tiles[found + i] <= tile);
    const int last = 31 - __clz(before);
    found += last * stride;
    count -= last * stride;
    if (count > stride) count = stride;
  }
  return found;
}

// The lanes that hold a block together: 2^shift of them, two at least, eight elements each.
struct Group {
  int shift;
  int turns;  // for all elements of a block

  MEMKERN_DEVICE explicit Group(int block) {
    const int eights = (block + kEight - 1) / kEight;
    shift = eights >= kWarp ? 5 : eights > 2 ? 32 - __clz(eights - 1) : 1;
    turns = (eights + (1 << shift) - 1) >> shift;
  }
  MEMKERN_DEVICE constexpr Group(int shift_, int turns_) : shift(shift_), turns(turns_) {}
  MEMKERN_DEVICE int width() const { return 1 << shift; }
  MEMKERN_DEVICE int groups() const { return kThreads >> shift; }  // of the thread block
  // This thread's lane in its group, and its group in the thread block.
  MEMKERN_DEVICE int lane() const { return threadIdx.x & (width() - 1); }
  MEMKERN_DEVICE int index() const { return threadIdx.x >> shift; }
  // The first group of this thread's warp.
  MEMKERN_DEVICE int first_of_warp() const { return threadIdx.x / kWarp * kWarp >> shift; }
};

// The group of a block of 65 to 128 elements, as something that the compiler knows.
struct Sixteen {
  MEMKERN_DEVICE operator Group() const { return Group(4, 1); }
};

// A tile as all its threads see it: kept in shared memory, not in every thread's registers.
struct Walk {
  int64_t first;  // block of the tensor
  int64_t base;   // where that block's segment starts
  int64_t base_step;
  int32_t within, within_step;  // blocks from there; and what a thread block's groups are ahead the next time
  int32_t here;                 // blocks in the tile

  // Divisions once a tile.
  MEMKERN_DEVICE void start(const Blocks& b, int64_t tile, const Group& group) {
    first = tile * b.tile_blocks;
    here = static_cast<int>(b.blocks - first < b.tile_blocks ? b.blocks - first : b.tile_blocks);
    const int64_t row = first / b.blocks_per_segment;
    base = row * b.segment;
    within = static_cast<int>(first - row * b.blocks_per_segment);
    const int rows = group.groups() / b.blocks_per_segment;
    base_step = rows * b.segment;
    within_step = group.groups() - rows * b.blocks_per_segment;
  }
};

// A block as a group sees it. A group that has none left while others of its warp have sees the tile's first,
// of n = 0 elements.
struct Place {
  int64_t block, start;
  int n;
};

// Calls visit(place) for each block of a tile that falls to this lane's group. All lanes of a warp call it
// equally often.
template <class Visit>
MEMKERN_DEVICE void for_places(const Blocks& b, const Walk& walk, const Group& group, Visit&& visit) {
  const unsigned ahead = static_cast<unsigned>(walk.within) + group.index();
  const unsigned row = ahead / static_cast<unsigned>(b.blocks_per_segment);
  int within = static_cast<int>(ahead - row * b.blocks_per_segment);
  int64_t base = walk.base + row * b.segment;
  for (int i = 0; group.first_of_warp() + i < walk.here; i += group.groups()) {
    const int64_t offset = static_cast<int64_t>(within) * b.block, left = b.segment - offset;
    const int length = left < b.block ? static_cast<int>(left) : b.block;
    const int index = group.index() + i;
    const bool is_there = index < walk.here;
    visit(Place{walk.first + (is_there ? index : 0), base + offset, is_there ? length : 0});
    within += walk.within_step;
    base += walk.base_step;
    if (within >= b.blocks_per_segment) {
      within -= b.blocks_per_segment;
      base += b.segment;
    }
  }
}

}  // namespace memkern
