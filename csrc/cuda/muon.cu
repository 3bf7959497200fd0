// memkern::muon_momentum_ and memkern::muon_apply_ on CUDA devices. Lower bound of their time: their bytes
// over the copy bandwidth. Momentum has 8.06 per parameter with fp32 gradients, 6.06 with bf16, and 2 for the
// sums of squares; apply 10 with fp32 parameters, 6 with bf16. The products between them take far longer.
#include "common/muon_args.h"
#include "common/ops.h"
#include "core/muon.h"
#include "launch_sums.h"
#include "lion_update.cuh"

namespace memkern {

struct MuonTensor : StepTensor {
  void* update;
};

using MuonStepped = Stepped<MuonScalars>;

// ---- momentum

using MuonGroup = StepGroup<MuonHyperparameters>;
using MuonTable = StepTable<MuonGroup, MuonStepped>;

// One thread per tensor: increments its step and computes its scalars.
static __global__ void muon_prologue(MuonTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const MuonGroup& group = table.groups[t.group];
  table.scalars[i] = {muon_scalars(read(group.lr), group.h, gradient_factor(*table.header), 1.0),
                      static_cast<uint32_t>(*t.step += 1.0f)};
}

// The momentum as a rule of lion_update.cuh; the update takes the parameter's place.
struct MuonRule {
  using Stepped = MuonStepped;
  using Scalars = MuonScalars;
  static MEMKERN_DEVICE void update(float& u, float g, float& m, const Scalars& s) {
    u = muon_momentum(g, m, s);
  }
};

// One thread block per tile. Launched with fp32 = true, it also updates tensors with fp32 states.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, kStepBlocks)
    muon_tiles(MuonTable table, bool fp32) {
  __shared__ TileWork<MuonStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, false)) return;
  const TensorRecord& t = work.tensor;
  const LaneGroup group(t.blocks.block);
  const bool sixteen = group.shift == 4;
  if (any_lane(t.kind == StateKind::kFp32))
    lion_update_fp32<MuonRule>(work, Written{});
  else if (any_lane(sixteen && t.grad_type == FloatType::kFp32))
    lion_update_tile<Kind, MuonRule>(work, Written{}, ConstantType<FloatType::kFp32>{}, SixteenLanes{});
  else if (any_lane(sixteen && t.grad_type == FloatType::kBf16))
    lion_update_tile<Kind, MuonRule>(work, Written{}, ConstantType<FloatType::kBf16>{}, SixteenLanes{});
  else
    lion_update_tile<Kind, MuonRule>(work, Written{}, t.grad_type, group);
}

static void muon_momentum(const Tensors& updates, const Tensors& sums, const StepArgs& args) {
  const auto groups = args.groups<MuonHyperparameters>();
  const auto tensors = muon_tensors<MuonTensor>(args, updates);
  check_sums(args, updates, sums);
  if (tensors.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = group_records(args, groups);
  std::vector<StepTensor> jobs;
  for (const MuonTensor& t : tensors) {
    StepTensor job = t;
    job.param = t.update;
    job.param_type = FloatType::kBf16;
    job.weight_state = nullptr;
    job.weight_storage = WeightStorage::kNearest;
    jobs.push_back(job);
  }
  const char* const op = "muon_momentum_";
  const DeviceScope scope(args.params[0]);
  {  // a table is in use for as long as its UploadedStep lives
    const auto step =
        upload_step<MuonGroup, MuonStepped>(op, header, records, tensor_entries(std::move(jobs), args),
                                            args.params[0], scope.stream, kStepBlocks);
    launch_prologue(op, step, muon_prologue, scope.stream);
    const TileKernels<MuonGroup, MuonStepped> kernels{
        .plain = {.power = muon_tiles<StateKind::kPower>, .dynamic = muon_tiles<StateKind::kDynamic>},
        .master = {}};
    launch_tiles(op, step, kernels, scope.stream);
  }

  Tensors values;  // keeps the memory that the table points to
  std::vector<NormTensor> norm_tensors;
  for (size_t i = 0; i < updates.size(); ++i) {
    const Matrices matrices(updates[i]);
    values.push_back(with_whole_matrices(updates[i]));
    const auto* first = static_cast<const uint16_t*>(values.back().data_ptr());
    auto* sum = static_cast<double*>(sums[i].data_ptr());
    for (int64_t k = 0; k < matrices.count; ++k)
      norm_tensors.push_back({first + k * matrices.numel, sum + k, matrices.numel, FloatType::kBf16, 0});
  }
  // A name of its own: two tables of one name, array and count would overwrite each other at every step.
  if (!norm_tensors.empty())
    launch_sums("muon_momentum_: squares", header, norm_tensors, args.params[0], scope.stream);
}

// ---- parameters

// The hyperparameters of muon_apply_'s groups: one for each tensor, as each has a ratio of its own.
struct MuonRatio {
  MuonHyperparameters muon;
  double ratio;
};
using MuonRatioTable = StepTable<StepGroup<MuonRatio>, MuonStepped>;

static __global__ void muon_apply_prologue(MuonRatioTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const StepGroup<MuonRatio>& group = table.groups[t.group];
  table.scalars[i] = {muon_scalars(read(group.lr), group.h.muon, 1.0, group.h.ratio),
                      static_cast<uint32_t>(*t.step)};
}

template <class P> MEMKERN_DEVICE void muon_apply_tile(const TileWork<MuonStepped>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const MuonScalars s = work.stepped.scalars;
  const void* const updates = work.grad;
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    const auto raw = load_weights(t, param_type, at);
    float p[kVector], o[kVector];
    load_gradient_floats(updates, FloatType::kBf16, at, o);
    join_weights(t, param_type, raw, p);
#pragma unroll
    for (int i = 0; i < kVector; ++i) p[i] = muon_parameter(p[i], o[i], s);
    store_weights(
        t, param_type, at, work.stepped.step,
        [&](int i) { return position_in_block(t.blocks, at.offset + i); }, p);
  });
}

template <bool Master> __global__ void __launch_bounds__(kThreads, kStepBlocks)
    muon_apply_tiles(MuonRatioTable table, bool) {
  __shared__ TileWork<MuonStepped> work;
  if (!work.find(table, StateKind::kFp32, true, Master)) return;
  if constexpr (Master)
    muon_apply_tile(work, MasterWeights{});
  else
    muon_apply_tile(work, work.tensor.param_type);
}

static void muon_apply(const Tensors& updates, const Doubles& ratios, const StepArgs& args) {
  const auto groups = args.groups<MuonHyperparameters>();
  const auto tensors = muon_tensors<MuonTensor>(args, updates);
  check_count("ratios", ratios.size(), 1, tensors.size());
  if (tensors.empty()) return;
  const StepHeader header = header_of(args);
  const auto muon_groups = group_records(args, groups);
  std::vector<StepGroup<MuonRatio>> records;
  StepEntries entries{{}, {args.steps.begin(), args.steps.end()}, {}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const MuonGroup& group = muon_groups[args.group[i]];
    records.push_back({group.lr, {group.h, ratios[i]}});
    entries.group.push_back(static_cast<int64_t>(i));
    StepTensor job = tensors[i];
    job.grad = tensors[i].update;
    job.grad_type = FloatType::kBf16;
    job.m = nullptr;
    job.m_scale = nullptr;
    job.kind = StateKind::kFp32;  // tiles of elements, whatever the momentum has
    entries.tensors.push_back(job);
  }
  const char* const op = "muon_apply_";
  const DeviceScope scope(args.params[0]);
  const auto step = upload_step<StepGroup<MuonRatio>, MuonStepped>(op, header, records, entries,
                                                                   args.params[0], scope.stream, kStepBlocks);
  launch_prologue(op, step, muon_apply_prologue, scope.stream);
  const TileKernels<StepGroup<MuonRatio>, MuonStepped> kernels{
      .plain = {.power = muon_apply_tiles<false>, .dynamic = nullptr},
      .master = {.power = muon_apply_tiles<true>, .dynamic = nullptr}};
  launch_tiles(op, step, kernels, scope.stream);
}

void muon_momentum_cuda(StableIValue* stack, uint64_t arguments, uint64_t results) {
  muon_op<Tensors, muon_momentum>(stack, arguments, results);
}

void muon_apply_cuda(StableIValue* stack, uint64_t arguments, uint64_t results) {
  muon_op<Doubles, muon_apply>(stack, arguments, results);
}

}  // namespace memkern
