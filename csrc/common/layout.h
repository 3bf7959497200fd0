// How a parameter is cut into blocks: mirrors memkern/quant/layout.py, which explains it.
#pragma once
#include "core/scalar.h"

namespace memkern {

MEMKERN_FN int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct BlockLayout {
  int64_t numel = 0;
  int64_t rows = 1;     // the size of the outermost dimension in memory
  int64_t segment = 0;  // consecutive elements that blocks never cross
  int64_t block = 0;    // elements in a full block
  int64_t blocks_per_segment = 0;
  int64_t blocks = 0;
  bool long_rows = false;  // rows of a block or more: scales are (rows, blocks per row), else (blocks,)
};

// Sizes and strides of a tensor in elements. Returns false where the tensor is not dense.
MEMKERN_FN bool block_layout(const int64_t* sizes, const int64_t* strides, int64_t dims, int64_t block_size,
                             BlockLayout* out) {
  *out = BlockLayout{};
  out->block = block_size;
  int64_t numel = 1;
  for (int64_t d = 0; d < dims; ++d) numel *= sizes[d];
  if (numel == 0) return true;

  // Dense: from the smallest stride up, each stride is the number of elements inside it.
  int64_t expected = 1, outermost_size = 1;
  while (expected != numel) {
    int64_t next = -1;
    for (int64_t d = 0; d < dims; ++d)
      if (sizes[d] != 1 && strides[d] == expected) next = d;
    if (next < 0) return false;
    expected *= sizes[next];
    outermost_size = sizes[next];
  }
  // A dimension of size 1 has no place in memory order; as dim 0 it is the only row, which a shard may be
  // left with.
  out->rows = dims == 0 || sizes[0] == 1 ? 1 : outermost_size;
  const int64_t cols = numel / out->rows;
  out->numel = numel;
  if (cols >= block_size) {
    out->segment = cols;
    out->long_rows = true;
  } else {
    out->segment = numel;
    out->block = block_size / cols * cols;
  }
  out->blocks_per_segment = ceil_div(out->segment, out->block);
  out->blocks = numel / out->segment * out->blocks_per_segment;
  return true;
}

// The layout of numel elements as one segment, cut every `block` elements, whatever the rows.
inline BlockLayout flat_layout(int64_t numel, int64_t block) {
  BlockLayout layout;
  layout.numel = layout.segment = numel;
  layout.block = block;
  layout.blocks = layout.blocks_per_segment = ceil_div(numel, block);
  return layout;
}

// Stands for a number of layers: each row of the tensor is a layer.
constexpr int64_t kEveryRow = 0;

// How many layers a tensor has (memkern/quant/layout.py: layer_count), or 0 where its rows cannot be divided
// into so many or a layer would end inside a block. layers: the number asked for, or kEveryRow.
MEMKERN_FN int64_t layer_count(const BlockLayout& l, int64_t dims, int64_t layers) {
  if (layers == 1 || dims < 2 || l.numel == 0) return 1;
  const int64_t count = layers == kEveryRow ? l.rows : layers;
  if (count < 1 || l.rows % count != 0) return 0;
  if (count > 1 && l.segment == l.numel && l.numel / count % l.block != 0) return 0;
  return count;
}

// Calls visit(offset, length, block) for each block of [begin, end); offset: of its first element.
template <class Visit>
MEMKERN_FN void for_blocks(const BlockLayout& l, int64_t begin, int64_t end, Visit&& visit) {
  if (begin >= end) return;
  int64_t in_segment = begin % l.blocks_per_segment;
  int64_t segment_start = begin / l.blocks_per_segment * l.segment;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t start = in_segment * l.block;
    const int64_t left = l.segment - start;
    visit(segment_start + start, static_cast<int>(left < l.block ? left : l.block), b);
    if (++in_segment == l.blocks_per_segment) {
      in_segment = 0;
      segment_start += l.segment;
    }
  }
}

}  // namespace memkern
