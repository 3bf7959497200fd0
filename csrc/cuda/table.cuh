// The device's table of a step: what all tensors of an optimizer need, read by every kernel of the step.
#pragma once
#include "core/corrections.h"
#include "tile.cuh"

namespace memkern {

// A number that the step reads: on the device where `at` says so, at every step and every replay, else
// `value`.
struct Number {
  const void* at;
  double value;
  int64_t is_double;
};

MEMKERN_DEVICE double read(const Number& n) {
  if (!n.at) return n.value;
  return n.is_double ? *static_cast<const double*>(n.at) : *static_cast<const float*>(n.at);
}

// Each Number is there where its `given` says so.
struct StepHeader {
  Number grad_scale, found_inf, grad_norm;
  int64_t has_grad_scale, has_found_inf, has_grad_norm;
  double max_grad_norm;
};

MEMKERN_DEVICE bool skipped(const StepHeader& h) { return h.has_found_inf && read(h.found_inf) != 0.0; }

MEMKERN_DEVICE double gradient_factor(const StepHeader& h) {
  const double scale = h.has_grad_scale ? read(h.grad_scale) : 1.0,
               norm = h.has_grad_norm ? read(h.grad_norm) : 0.0;
  return gradient_factor(scale, h.has_grad_norm, norm, h.max_grad_norm);
}

// One tensor. Gradients, which come and go, are in a list of their own.
struct TensorRecord {
  void *param, *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale, *step, *trust_ratio;
  int64_t numel;
  Blocks blocks;
  StateKind kind;
  FloatType param_type, grad_type;
  int32_t group;
  int32_t aligned;  // all but the gradient start on 16 bytes
  int32_t first_layer;
};

// A group of a step: its learning rate and the optimizer's hyperparameters.
template <class Hyperparameters> struct StepGroup {
  Number lr;
  Hyperparameters h;
};

// The parts of the table on the device.
template <class Group, class Scalars> struct Table {
  const StepHeader* header;
  const Group* groups;
  const void* const* grads;
  const uint32_t* first_tiles;
  const TensorRecord* tensors;
  Scalars* scalars;  // a prologue writes them
  int count;         // of tensors
};

// What a thread block works on, in shared memory: registers are for what differs from lane to lane.
template <class Scalars> struct TileWork {
  TensorRecord tensor;
  Walk walk;
  Scalars scalars;
  const void* grad;
  int64_t tile;  // of the tensor

  // All threads call it. False where the step is skipped, or another launch sees to the tile: this one does
  // codes of `kind`, and, if it is the one for them, fp32 states.
  template <class Group>
  MEMKERN_DEVICE bool find(const Table<Group, Scalars>& table, StateKind kind, bool fp32) {
    if (skipped(*table.header)) return false;
    if (threadIdx.x < kWarp) {
      const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
      if (threadIdx.x == 0) {
        tensor = table.tensors[i];
        scalars = table.scalars[i];
        grad = table.grads[i];
        tile = blockIdx.x - table.first_tiles[i];
        if (tensor.kind != StateKind::kFp32)
          walk.start(tensor.blocks, tile, memkern::Group(tensor.blocks.block));
      }
    }
    __syncthreads();
    return tensor.kind == kind || (tensor.kind == StateKind::kFp32 && fp32);
  }
};

// Calls plain() where the states are fp32, else coded(param, grad, group): types and group as constants where
// they are the usual ones, which saves a tenth of the instructions.
template <class Coded, class Plain>
MEMKERN_DEVICE void with_states(const TensorRecord& t, Coded&& coded, Plain&& plain) {
  if (t.kind == StateKind::kFp32) return plain();
  const Group group(t.blocks.block);
  const bool sixteen = group.shift == 4;
  if (sixteen && t.param_type == FloatType::kFp32 && t.grad_type == FloatType::kFp32)
    coded(Known<FloatType::kFp32>{}, Known<FloatType::kFp32>{}, Sixteen{});
  else if (sixteen && t.param_type == FloatType::kBf16 && t.grad_type == FloatType::kBf16)
    coded(Known<FloatType::kBf16>{}, Known<FloatType::kBf16>{}, Sixteen{});
  else
    coded(t.param_type, t.grad_type, group);
}

// Calls visit(span) for the eights of a tile of a tensor without blocks that fall to this thread.
template <class Visit>
MEMKERN_DEVICE void for_eights(int64_t numel, int64_t tile, bool aligned, Visit&& visit) {
  const int64_t first = tile * kTileElements, left = numel - first;
  const int n = left < kTileElements ? static_cast<int>(left) : kTileElements;
  for (int j = static_cast<int>(threadIdx.x) * kEight; j < n; j += kThreads * kEight)
    visit(span_of(first + j, n - j, aligned));
}

}  // namespace memkern
