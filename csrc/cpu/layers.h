// Steps in two passes, layer by layer: first the norms, of which the trust ratio is made, then the update.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "share.h"

namespace memkern {

template <class Scalars> struct Layer : Job<Scalars> {
  Scalars own;  // what `scalars` points to while it runs
  TrustRule trust;
  Norms<Job<Scalars>> norms;
};

// A sum for each piece, whatever the number of threads.
constexpr int64_t kPieceElements = 1 << 15;
// What is updated while it is in the cache: layers of up to this many elements for each thread.
constexpr int64_t kWaveElements = 1 << 16;

// Calls run(piece) for each of [0, count), some at a time.
template <class Run> void for_pieces(int64_t count, int64_t elements, Run&& run) {
  const int64_t threads = std::clamp<int64_t>(elements / kPieceElements, 1, torch::stable::get_num_threads());
  const int64_t some = std::max<int64_t>(1, count / (32 * threads)), turns = (count + some - 1) / some;
  share(turns, threads, [&](int64_t k) {
    for (int64_t i = k * some; i < std::min(count, (k + 1) * some); ++i) run(i);
  });
}

template <class L> struct Piece {
  L* layer;
  int64_t begin, end;
  Squares sum;
};

template <class L> void run_wave(const std::vector<L*>& wave, std::vector<Piece<L>>& pieces) {
  pieces.clear();
  int64_t elements = 0;
  for (L* layer : wave) {
    const int64_t size = std::max<int64_t>(1, kPieceElements / layer->layout.block);
    for (int64_t b = 0; b < layer->layout.blocks; b += size)
      pieces.push_back({layer, b, std::min(b + size, layer->layout.blocks), {}});
    elements += layer->layout.numel;
  }
  const int64_t count = static_cast<int64_t>(pieces.size());
  for_pieces(count, elements, [&](int64_t i) {
    Piece<L>& piece = pieces[i];
    if (piece.layer->trust.adapt) piece.sum = piece.layer->norms(*piece.layer, piece.begin, piece.end);
  });
  for (int64_t i = 0; i < count;) {
    L& layer = *pieces[i].layer;
    Squares all{0.0, 0.0};
    for (; i < count && pieces[i].layer == &layer; ++i) {
      all.param += pieces[i].sum.param;
      all.update += pieces[i].sum.update;
    }
    if (layer.trust.adapt) *layer.trust_ratio = trust_ratio(all, layer.trust);
    set_trust_ratio(layer.own, layer.trust.lr, *layer.trust_ratio);
  }
  // Not backwards, from what was read last: that gains no more from the cache than it costs (1.1 times as
  // long).
  for_pieces(count, elements, [&](int64_t i) {
    const Piece<L>& piece = pieces[i];
    piece.layer->run(*piece.layer, piece.begin, piece.end);
  });
}

// Layers in waves that fit the cache; a larger layer is one by itself.
template <class L> void run_layers(std::vector<L>& layers) {
  const int64_t most = kWaveElements * torch::stable::get_num_threads();
  std::vector<Piece<L>> pieces;
  std::vector<L*> wave;
  int64_t elements = 0;
  for (L& layer : layers) {
    layer.scalars = &layer.own;
    *layer.trust_ratio = 1.0f;
    if (layer.layout.numel > most) {
      run_wave<L>({&layer}, pieces);
      continue;
    }
    if (elements + layer.layout.numel > most) {
      run_wave(wave, pieces);
      wave.clear();
      elements = 0;
    }
    wave.push_back(&layer);
    elements += layer.layout.numel;
  }
  run_wave(wave, pieces);
}

}  // namespace memkern
