// The table of a step on the device, which every kernel of the step reads: header, param groups, tensors. The
// host fills it in launch_step.h.
#pragma once
#include "core/corrections.h"
#include "tile.cuh"

namespace memkern {

// A scalar argument of a step (lr, grad_scale, ...): if `address` is not null it is read there by the
// kernels, so that each replay of a CUDA graph sees its present value; else it is `value`.
struct ScalarArg {
  const void* address;
  double value;
  int64_t is_double;
};

MEMKERN_DEVICE double read(const ScalarArg& s) {
  if (!s.address) return s.value;
  return s.is_double ? *static_cast<const double*>(s.address) : *static_cast<const float*>(s.address);
}

// The scalars that all tensors of a step share. A scalar was not given if its has_... is 0.
struct StepHeader {
  ScalarArg grad_scale, found_inf, grad_norm;
  int64_t has_grad_scale, has_found_inf, has_grad_norm;
  double max_grad_norm;
};

MEMKERN_DEVICE bool skipped(const StepHeader& h) { return h.has_found_inf && read(h.found_inf) != 0.0; }

MEMKERN_DEVICE double gradient_factor(const StepHeader& h) {
  const double scale = h.has_grad_scale ? read(h.grad_scale) : 1.0,
               norm = h.has_grad_norm ? read(h.grad_norm) : 0.0;
  return gradient_factor(scale, h.has_grad_norm, norm, h.max_grad_norm);
}

// One tensor. Gradients are in a list of their own: their addresses may change at every step.
struct TensorRecord {
  void *param, *m, *v, *weight_state;
  float *m_scale, *v_scale, *step, *trust_ratio;
  int64_t numel;
  Blocks blocks;
  StateKind kind;
  FloatType param_type, grad_type;
  int32_t group;
  int32_t aligned;  // to 16 bytes: all arrays but the gradient
  int32_t first_layer;
  WeightStorage weight_storage;
  int32_t main_path;  // whether main_path.cuh has its update
};

MEMKERN_DEVICE bool has_master_weights(const TensorRecord& t) {
  return t.weight_storage != WeightStorage::kNearest;
}

// The type of a bf16 parameter with a weight state or stochastic rounding (weights.cuh), in place of its
// FloatType.
struct MasterWeights {
  MEMKERN_FN constexpr operator FloatType() const { return FloatType::kBf16; }
};

// A param group: its learning rate, and the optimizer's other hyperparameters.
template <class Hyperparameters> struct StepGroup {
  ScalarArg lr;
  Hyperparameters h;
};

// Pointers to the table's sections on the device.
template <class Group, class Scalars> struct StepTable {
  const StepHeader* header;
  const Group* groups;
  const void* const* grads;
  const uint32_t* first_tiles;
  const TensorRecord* tensors;
  Scalars* scalars;  // of each tensor; the prologue computes them
  int count;         // of tensors
};

// The scalars that a prologue computes for a tensor, and its step, which seeds the dither of its codes.
template <class Formula> struct Stepped {
  Formula scalars;
  uint32_t step;
};

template <class Formula> MEMKERN_DEVICE Formula& scalars_of(Stepped<Formula>& tensor) {
  return tensor.scalars;
}

// The tile of a thread block. It is the same for all threads, so it is in shared memory: registers are
// scarce.
template <class Stepped> struct TileWork {
  TensorRecord tensor;
  Tile tile;
  Stepped stepped;
  const void* grad;
  int64_t tile_index;  // in the tensor
  bool skip;           // the whole step

  // Finds the tile of blockIdx.x; all threads call it. Returns whether this launch processes the tile: the
  // step is not skipped, the tensor has master weights if and only if `master` is true, and its states are
  // codes of `kind` or, if `fp32` is true, fp32.
  template <class Group>
  MEMKERN_DEVICE bool find(const StepTable<Group, Stepped>& table, StateKind kind, bool fp32, bool master) {
    // The second warp checks whether the step is skipped while the first finds the tile: both are chains of
    // dependent loads.
    if (threadIdx.x == kWarp) skip = skipped(*table.header);
    if (threadIdx.x < kWarp) {
      const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
      if (threadIdx.x == 0) {
        tensor = table.tensors[i];
        stepped = table.scalars[i];
        grad = table.grads[i];
        tile_index = blockIdx.x - table.first_tiles[i];
        if (tensor.kind != StateKind::kFp32)
          tile.start(tensor.blocks, tile_index, LaneGroup(tensor.blocks.block));
      }
    }
    __syncthreads();
    return any_lane(!skip && has_master_weights(tensor) == master &&
                    (tensor.kind == kind || (tensor.kind == StateKind::kFp32 && fp32)));
  }
};

// Calls fp32(param_type) if the states are fp32, else coded(param_type, grad_type, group). For blocks of 65
// to 128 elements with both types fp32 or both bf16, the three arguments of `coded` are compile-time
// constants, which saves a tenth of the instructions. Master: for tensors whose param_type is MasterWeights.
template <bool Master, class Coded, class Fp32>
MEMKERN_DEVICE void with_state_types(const TensorRecord& t, Coded&& coded, Fp32&& fp32) {
  const LaneGroup group(t.blocks.block);
  const bool sixteen = group.shift == 4;
  if constexpr (Master) {
    if (any_lane(t.kind == StateKind::kFp32))
      fp32(MasterWeights{});
    else if (any_lane(sixteen && t.grad_type == FloatType::kBf16))
      coded(MasterWeights{}, ConstantType<FloatType::kBf16>{}, SixteenLanes{});
    else
      coded(MasterWeights{}, t.grad_type, group);
  } else {
    if (any_lane(t.kind == StateKind::kFp32))
      fp32(t.param_type);
    else if (any_lane(sixteen && t.param_type == FloatType::kFp32 && t.grad_type == FloatType::kFp32))
      coded(ConstantType<FloatType::kFp32>{}, ConstantType<FloatType::kFp32>{}, SixteenLanes{});
    else if (any_lane(sixteen && t.param_type == FloatType::kBf16 && t.grad_type == FloatType::kBf16))
      coded(ConstantType<FloatType::kBf16>{}, ConstantType<FloatType::kBf16>{}, SixteenLanes{});
    else
      coded(t.param_type, t.grad_type, group);
  }
}

// Calls visit(span) for this thread's vectors of a tile of fp32 states, or of gradients: arrays without
// blocks. The vectors of consecutive threads are consecutive in memory, so that accesses coalesce.
template <class Visit> MEMKERN_DEVICE void for_each_vector(int64_t numel, int64_t tile, int tile_elements,
                                                           bool aligned, Visit&& visit) {
  const int64_t first = tile * tile_elements, left = numel - first;
  const int n = left < tile_elements ? static_cast<int>(left) : tile_elements;
  for (int j = static_cast<int>(threadIdx.x) * kVector; j < n; j += kThreads * kVector)
    visit(span_of(first + j, n - j, aligned));
}

}  // namespace memkern
