// How thread blocks, warps and lanes share the blocks of a tensor.
//
// A thread block takes a tile: whole blocks of one tensor, about kTileElements. A block is held by a group of lanes of
// one warp, eight consecutive elements each; blocks of more than 256 elements take several turns.
#pragma once
#include "../core/layout.h"
#include "lanes.cuh"

namespace memkern {

constexpr int kTileElements = 1 << 14;

// A tensor's blocks, as kernels and the table hold them: 32 bits where they suffice.
struct Blocks {
  int64_t segment, blocks_per_segment, blocks;
  int32_t block, tile_blocks;
};

inline Blocks blocks_of(const BlockLayout& l) {
  const int32_t block = static_cast<int32_t>(l.block);
  return {l.segment, l.blocks_per_segment, l.blocks, block, block < kTileElements ? kTileElements / block : 1};
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

// The lanes that hold a block together.
struct Group {
  int width;           // lanes, a power of two
  int lane;            // this one's place among them
  int index, groups;   // this group's place among those of the thread block
  int turns;           // for all elements of a block

  MEMKERN_DEVICE explicit Group(int block) {
    const int eights = (block + kEight - 1) / kEight;
    width = eights >= kWarp ? kWarp : eights > 1 ? 1 << (32 - __clz(eights - 1)) : 1;
    const int shift = 31 - __clz(width);
    lane = threadIdx.x & (width - 1);
    index = threadIdx.x >> shift;
    groups = kThreads >> shift;
    turns = (eights + width - 1) >> shift;
  }
};

// A block as a group sees it; n is 0 for a group that has none left while others of its warp have.
struct Place {
  int64_t block, start;
  int n;
};

// Calls visit(place) for each block of a tile that falls to this lane's group. All lanes of a warp call it equally
// often.
template <class Visit>
MEMKERN_DEVICE void for_places(const Blocks& b, int64_t tile, const Group& group, Visit&& visit) {
  const int64_t first = tile * b.tile_blocks;
  const int here = static_cast<int>(b.blocks - first < b.tile_blocks ? b.blocks - first : b.tile_blocks);
  const int groups = group.groups, warp_first = group.index & ~(kWarp / group.width - 1);
  // Divisions once a tile: 64 bits wide only where they must be.
  const int64_t start = first + group.index, per_segment = b.blocks_per_segment;
  int64_t row, within;
  if (start < (int64_t{1} << 32) && per_segment < (int64_t{1} << 32)) {
    const uint32_t quotient = static_cast<uint32_t>(start) / static_cast<uint32_t>(per_segment);
    row = quotient;
    within = start - row * per_segment;
  } else {
    row = start / per_segment;
    within = start - row * per_segment;
  }
  const int64_t row_step = groups >= per_segment ? groups / static_cast<int>(per_segment) : 0;
  const int64_t within_step = groups - row_step * per_segment;
  int64_t base = row * b.segment;
  for (int i = 0; warp_first + i < here; i += groups) {
    const int64_t offset = within * b.block, left = b.segment - offset;
    const int length = left < b.block ? static_cast<int>(left) : b.block;
    visit(Place{start + i, base + offset, group.index + i < here ? length : 0});
    within += within_step;
    base += row_step * b.segment;
    if (within >= per_segment) {
      within -= per_segment;
      base += b.segment;
    }
  }
}

}  // namespace memkern
