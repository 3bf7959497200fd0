// How the blocks of a tensor are spread over thread blocks, warps and lanes.
//
// "Block" is a block of the state's codes, with one scale; CUDA's are called thread blocks. A thread block
// processes a tile: whole blocks of one tensor, about tile_elements() of them. Each block is processed by a
// group of 2 to 32 lanes of one warp, and each lane holds vectors of 8 consecutive elements: one for blocks
// of up to 256 elements, else several, one after the other.
#pragma once
#include "common/layout.h"
#include "vector.cuh"

namespace memkern {

// The threads of a thread block. With 64 in place of 128, at as many resident threads, steps take 0.93 to
// 0.97 of the time on an H200, and GELU and codecs 1.00 to 1.03.
constexpr int kThreads = 64;
// Thread blocks that a multiprocessor runs at once. kResidentBlocks: of kernels whose threads have few
// registers, on devices with 2,048 threads per multiprocessor (resident_blocks() in launch.h). kStepBlocks:
// of a step, with up to 96 registers a thread. kAheadBlocks: of a step that loads two moments ahead
// (main_path.cuh), with up to 128. kCodecBlocks: of codecs.
constexpr int kResidentThreads = 2048, kResidentBlocks = kResidentThreads / kThreads;
constexpr int kStepBlocks = 640 / kThreads, kAheadBlocks = 512 / kThreads;
constexpr int kCodecBlocks = 1024 / kThreads;
// kWideBlocks: as kAheadBlocks, of a step with master weights. For sm_80 to sm_89 ptxas would spill
// registers of the loop with room for kAheadBlocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWideBlocks = kAheadBlocks * 3 / 4;
#else
constexpr int kWideBlocks = kAheadBlocks;
#endif
// kNormBlocks: of the kernels of LAMB's norms, which make no codes. For sm_100 ptxas would spill registers
// with room for kStepBlocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kNormBlocks = kAheadBlocks;
#else
constexpr int kNormBlocks = kStepBlocks;
#endif
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Warp vote (__any_sync). A branch on it is warp-uniform, and the compiler knows it: it leaves out the checks
// for divergence at each shuffle, two instructions, and the stack entries for divergent lanes.
MEMKERN_DEVICE bool any_lane(bool yes) { return __any_sync(kAllLanes, yes); }

// Tells the compiler, for the same reason, that x is the same in all lanes: for the count of a loop.
MEMKERN_DEVICE int same_in_all_lanes(int x) { return __reduce_max_sync(kAllLanes, x); }

constexpr int kTileElements = 16384;  // at most
// How many iterations ahead a step's loop copies vectors to shared memory (CopiedVectors). On the devices
// named here a multiprocessor has 100 KB of it, in which eight thread blocks have room for one.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200
constexpr int kCopiesAhead = 1;
#else
constexpr int kCopiesAhead = 3;
#endif
// Consecutive tiles of a tensor whose thread blocks alternate over a run of memory (Tile).
constexpr int kRunTiles = 128;

// A tensor's blocks, as kernels and the table hold them.
struct Blocks {
  int64_t segment, blocks;
  int32_t blocks_per_segment, block;
  int32_t tile_blocks, tile_elements;  // of a tile; tile_elements where states have no blocks
};

// Whether all blocks have 128 elements: then they are consecutive in memory, whatever the rows are. Kernels
// with a path for such tensors have 16 lanes for each block.
constexpr int kFullBlock = 128, kBlockLanes = kFullBlock / kVector;
MEMKERN_FN bool are_full(const Blocks& b) { return b.block == kFullBlock && b.segment % kFullBlock == 0; }
// Whether blocks have 65 to 128 elements, which takes 16 lanes too, and consist of full vectors of 8.
MEMKERN_FN bool have_full_vectors(const Blocks& b) {
  return b.block % kVector == 0 && b.segment % kVector == 0 && b.block <= kFullBlock &&
         b.block > kFullBlock / 2;
}

// Waits until `loaded`, the first vector of a loop that loads a vector ahead, has arrived, and returns it:
// an XOR with a zero that the compiler does not know to be 0 uses each of its registers.
//
// ptxas waits for a loaded register at its first use, on one of six barriers that loads count on. For the
// first vector that use would be inside of the loop: every iteration would wait there, on a barrier that the
// loads of the same iteration count on too, and none would be ahead. On an H200 Adam spent 40 % of its time
// in that wait.
template <class Loaded> MEMKERN_DEVICE Loaded arrived(Loaded loaded, const Blocks& blocks) {
  const uint32_t zero = static_cast<uint32_t>(blocks.block >> 31);
  uint32_t words[sizeof(Loaded) / sizeof(uint32_t)];
  memcpy(words, &loaded, sizeof(Loaded));
#pragma unroll
  for (uint32_t& word : words) word ^= zero;
  memcpy(&loaded, words, sizeof(Loaded));
  return loaded;
}

// Elements of a tile, where all tensors together have `numel` elements and the device runs `slots` thread
// blocks at once: each slot gets equally many tiles, so that all are busy to the end. In tiles of
// kTileElements, 2^22 elements would keep 256 of an H200's 1,320 slots busy, and 2^24 would keep 1,024.
// kTileElements is large enough to make the start of a thread block small beside its work.
inline int tile_elements(int64_t numel, int64_t slots) {
  constexpr int64_t kRound = kThreads * kVector;
  static_assert(kTileElements % kRound == 0);
  if (numel == 0) return kTileElements;
  const int64_t tiles = slots * ceil_div(numel, slots * kTileElements);
  return static_cast<int>(kRound * ceil_div(numel, tiles * kRound));
}

inline Blocks blocks_of(const BlockLayout& l, int tile_elements) {
  const int32_t block = static_cast<int32_t>(l.block);
  return {l.segment,
          l.blocks,
          static_cast<int32_t>(l.blocks_per_segment),
          block,
          block < tile_elements ? tile_elements / block : 1,
          tile_elements};
}

inline int64_t tiles_of(const Blocks& b) { return ceil_div(b.blocks, b.tile_blocks); }

// The tensor that `tile` belongs to: the last one whose first tile is not after `tile`. All lanes of a warp
// call it; each round of the search compares 32 candidates.
MEMKERN_DEVICE int find_tensor(const uint32_t* first_tiles, int count, uint32_t tile) {
  const int lane = threadIdx.x % kWarp;
  int tensor = 0;
  while (count > 1) {
    const int stride = (count + kWarp - 1) / kWarp, i = lane * stride;
    const unsigned before = __ballot_sync(kAllLanes, i < count && first_tiles[tensor + i] <= tile);
    const int last = 31 - __clz(before);
    tensor += last * stride;
    count -= last * stride;
    if (count > stride) count = stride;
  }
  return tensor;
}

// The lanes of a warp that process a block together: 2^shift of them, at least two.
struct LaneGroup {
  int shift;
  int vectors;  // how many of a block's vectors each lane holds, one after the other

  MEMKERN_DEVICE explicit LaneGroup(int block) {
    const int in_block = (block + kVector - 1) / kVector;
    shift = in_block >= kWarp ? 5 : in_block > 2 ? 32 - __clz(in_block - 1) : 1;
    vectors = (in_block + (1 << shift) - 1) >> shift;
  }
  MEMKERN_DEVICE constexpr LaneGroup(int shift_, int vectors_) : shift(shift_), vectors(vectors_) {}
  MEMKERN_DEVICE int width() const { return 1 << shift; }
  MEMKERN_DEVICE int groups() const { return kThreads >> shift; }  // in the thread block
  // This thread's lane in its group, and its group in the thread block.
  MEMKERN_DEVICE int lane() const { return threadIdx.x & (width() - 1); }
  MEMKERN_DEVICE int index() const { return threadIdx.x >> shift; }
  // The first group of this thread's warp.
  MEMKERN_DEVICE int first_of_warp() const { return threadIdx.x / kWarp * kWarp >> shift; }
};

// The group for blocks of 65 to 128 elements as a compile-time constant.
struct SixteenLanes {
  MEMKERN_DEVICE operator LaneGroup() const { return LaneGroup(4, 1); }
};

// A tile's position in its tensor. In shared memory, as it is the same for all threads.
//
// The blocks of kRunTiles tiles are a run. A thread block updates as many blocks at once as it has groups of
// lanes, G, and the T tiles of a run take turns: tile t has the run's blocks t G to t G + (G - 1), then those
// T G further, and so on. Thread blocks of consecutive tiles start together. So they read and write
// consecutive memory at the same time, which DRAM serves faster than as many places far apart.
struct Tile {
  int64_t first_block;    // index in the tensor
  int64_t segment_start;  // offset of the segment that first_block is in
  // A group's next block is block_stride blocks ahead. For that, segment_step is added to the segment's
  // offset and block_step to the block's index in the segment; or, to the block's own offset, `step`. If the
  // index is then past the end of the segment, the block is in the next segment, and `gap` is added to its
  // own offset. gap, 0 or less, is the length of a segment less that of its blocks if all were full.
  int64_t segment_step;
  int32_t block_in_segment, block_step;
  int32_t blocks;  // from first_block to the end of the run, the other tiles' blocks included
  int32_t block_stride;
  int32_t step, gap;

  // By one thread: so the divisions are done once per tile.
  MEMKERN_DEVICE void start(const Blocks& b, int64_t tile, const LaneGroup& group) {
    const int64_t first_tile = tile - tile % kRunTiles, run = first_tile * b.tile_blocks,
                  left = b.blocks - run;
    const int in_run = static_cast<int>(tile - first_tile), tile_blocks = b.tile_blocks;
    const int64_t max_blocks = int64_t{kRunTiles} * tile_blocks;
    const int run_blocks = static_cast<int>(left < max_blocks ? left : max_blocks),
              run_tiles = left < max_blocks ? (run_blocks + tile_blocks - 1) / tile_blocks : kRunTiles;
    first_block = run + in_run * group.groups();
    blocks = run_blocks - in_run * group.groups();
    block_stride = run_tiles * group.groups();
    // A division of 64 bits takes four times as long.
    const int64_t segment =
        first_block >> 32 ? first_block / b.blocks_per_segment
                          : static_cast<uint32_t>(first_block) / static_cast<uint32_t>(b.blocks_per_segment);
    segment_start = segment * b.segment;
    block_in_segment = static_cast<int>(first_block - segment * b.blocks_per_segment);
    const int segments = block_stride / b.blocks_per_segment;
    segment_step = segments * b.segment;
    block_step = block_stride - segments * b.blocks_per_segment;
    step = static_cast<int32_t>(segment_step) + block_step * b.block;
    gap = static_cast<int32_t>(b.segment - int64_t{b.blocks_per_segment} * b.block);
  }
};

// A block: its index in the tensor, and its elements' offset and number.
struct BlockSpan {
  int64_t index, start;
  int n;
};

// Calls visit(block) for each block of a tile that this lane's group processes. All lanes of a warp call
// `visit` equally often, so that they can shuffle: a group without a block left gets the tile's first block,
// with n = 0 elements.
template <class Visit>
MEMKERN_DEVICE void for_each_block(const Blocks& b, const Tile& tile, const LaneGroup& group, Visit&& visit) {
  const unsigned ahead = static_cast<unsigned>(tile.block_in_segment) + group.index();
  const unsigned segment = ahead / static_cast<unsigned>(b.blocks_per_segment);
  int in_segment = static_cast<int>(ahead - segment * b.blocks_per_segment);
  int64_t start = tile.segment_start + segment * b.segment;
  for (int i = 0; group.first_of_warp() + i < tile.blocks; i += tile.block_stride) {
    const int64_t offset = static_cast<int64_t>(in_segment) * b.block, left = b.segment - offset;
    const int length = left < b.block ? static_cast<int>(left) : b.block;
    const int index = group.index() + i;
    const bool exists = index < tile.blocks;
    visit(BlockSpan{tile.first_block + (exists ? index : 0), start + offset, exists ? length : 0});
    in_segment += tile.block_step;
    start += tile.segment_step;
    if (in_segment >= b.blocks_per_segment) {
      in_segment -= b.blocks_per_segment;
      start += b.segment;
    }
  }
}

}  // namespace memkern
