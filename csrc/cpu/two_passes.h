// Steps in two passes (LAMB, LARS): the norms of each layer, of which its trust ratio is made, then the
// update.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"

namespace memkern {

template <class Scalars> struct Layer : Job<Scalars> {
  Scalars own;  // what `scalars` points to while it runs
  TrustRule trust;
  Norms<Job<Scalars>> norms;
};

// Some blocks of a layer, and the sum over them: so many elements, whatever the number of threads, so that
// sums are the same.
constexpr int64_t kPieceElements = 1 << 15;
template <class L> struct Piece {
  L* layer;
  int64_t begin, end;  // blocks
  Squares sum;
};

template <class L> void add_pieces(std::vector<Piece<L>>& pieces, L& layer) {
  const int64_t blocks = layer.layout.blocks,
                size = std::max<int64_t>(1, kPieceElements / layer.layout.block);
  for (int64_t b = 0; b < blocks; b += size) pieces.push_back({&layer, b, std::min(b + size, blocks), {}});
}

template <class L> void set_trust_ratios(const std::vector<Piece<L>>& pieces) {
  for (auto piece = pieces.begin(); piece != pieces.end();) {
    L& layer = *piece->layer;
    Squares all{0.0, 0.0};
    for (; piece != pieces.end() && piece->layer == &layer; ++piece) {
      all.param += piece->sum.param;
      all.update += piece->sum.update;
    }
    if (layer.trust.adapt) *layer.trust_ratio = trust_ratio(all, layer.trust);
    set_trust_ratio(layer.own, layer.trust.lr, *layer.trust_ratio);
  }
}

// Both passes over whole layers.
template <class L> void run_both_passes(std::vector<Piece<L>>& pieces) {
  const int64_t count = static_cast<int64_t>(pieces.size()), threads = torch::stable::get_num_threads();
  run_pieces(count, threads, [&](int64_t k) {
    Piece<L>& p = pieces[k];
    if (p.layer->trust.adapt) p.sum = p.layer->norms(*p.layer, p.begin, p.end);
  });
  set_trust_ratios(pieces);
  run_pieces(count, threads, [&](int64_t k) {
    const Piece<L>& p = pieces[k];
    p.layer->run(*p.layer, p.begin, p.end);
  });
}

// Layers are taken together until they have this many elements for each thread: few enough for the second
// pass to find them in the caches.
constexpr int64_t kBatchElements = 1 << 16;

template <class L> void run_layers(std::vector<L>& layers) {
  const int64_t enough = kBatchElements * torch::stable::get_num_threads();
  std::vector<Piece<L>> batch;
  int64_t elements = 0;
  for (L& layer : layers) {
    layer.scalars = &layer.own;
    *layer.trust_ratio = 1.0f;
    add_pieces(batch, layer);
    elements += layer.layout.numel;
    if (elements < enough) continue;
    run_both_passes(batch);
    batch.clear();
    elements = 0;
  }
  run_both_passes(batch);
}

}  // namespace memkern
