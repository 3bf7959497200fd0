// An optimizer's step on a CUDA device, from its arguments to its launches: checks, the step's table,
// kernels. launch_trust_ratios.h has the steps with trust ratios.
#pragma once
#include <utility>

#include "common/step_args.h"
#include "step_table.cuh"
#include "tensor_table.h"

namespace memkern {

// A tensor of one element as an argument of the kernels. The kernels read a tensor on the device; the value
// of a tensor on the CPU is read here.
inline ScalarArg scalar_arg(const Tensor& t, const Tensor& like, const char* name) {
  MEMKERN_CHECK(t.numel() == 1, name, " must be a tensor of one element, got ", t.numel());
  const ScalarType type = t.scalar_type();
  MEMKERN_CHECK(type == ScalarType::Double || type == ScalarType::Float, name, " must be float32 or float64");
  if (is_host(t)) return {nullptr, read_number(t, name), 0};
  MEMKERN_CHECK(same_device(t, like), name, " must be on the CPU or on the device of the parameters");
  return {t.data_ptr(), 0.0, type == ScalarType::Double};
}

inline StepHeader header_of(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                            const std::optional<Tensor>& grad_norm, double max_grad_norm,
                            const Tensor& like) {
  StepHeader h{};
  h.max_grad_norm = max_grad_norm;
  const auto set = [&](ScalarArg& scalar, int64_t& given, const std::optional<Tensor>& t, const char* name) {
    if (!t) return;
    scalar = scalar_arg(*t, like, name);
    given = 1;
  };
  set(h.grad_scale, h.has_grad_scale, grad_scale, "grad_scale");
  set(h.found_inf, h.has_found_inf, found_inf, "found_inf");
  set(h.grad_norm, h.has_grad_norm, grad_norm, "grad_norm");
  return h;
}

inline StepHeader header_of(const StepArgs& args) {
  return header_of(args.grad_scale, args.found_inf, args.grad_norm, args.max_grad_norm, args.params[0]);
}

template <class Hyperparameters>
std::vector<StepGroup<Hyperparameters>> group_records(const StepArgs& args,
                                                      const std::vector<Hyperparameters>& groups) {
  std::vector<StepGroup<Hyperparameters>> records;
  for (size_t k = 0; k < groups.size(); ++k)
    records.push_back({scalar_arg(args.lr[k], args.params[0], "lr"), groups[k]});
  return records;
}

inline TensorRecord tensor_record(const StepTensor& job, const Tensor& step, int64_t group,
                                  int tile_elements) {
  check_blocks(job.layout);
  TensorRecord r{};
  r.param = job.param;
  r.m = job.m;
  r.v = job.v;
  r.m_scale = job.m_scale;
  r.v_scale = job.v_scale;
  r.step = static_cast<float*>(step.data_ptr());
  r.numel = job.layout.numel;
  r.blocks = blocks_of(job.layout, tile_elements);
  r.kind = job.kind;
  r.param_type = job.param_type;
  r.grad_type = job.grad_type;
  r.group = static_cast<int32_t>(group);
  r.trust_ratio = job.trust_ratio;
  r.first_layer = job.first_layer;
  r.weight_state = job.weight_state;
  r.weight_storage = job.weight_storage;
  r.aligned = on_16_bytes(r.param) && on_16_bytes(r.m) && on_16_bytes(r.v) && on_16_bytes(r.weight_state);
  r.main_path = fast_paths() && r.aligned && have_full_vectors(r.blocks);
  return r;
}

// fp32 states have no blocks: their tiles are runs of elements.
inline int64_t tiles_of(const TensorRecord& r) {
  return r.kind == StateKind::kFp32 ? ceil_div(r.numel, r.blocks.tile_elements) : tiles_of(r.blocks);
}

// The entries of a step's table: its tensors or, with trust ratios, their layers.
struct StepEntries {
  std::vector<StepTensor> tensors;
  std::vector<Tensor> steps;
  Ints group;
};

inline StepEntries tensor_entries(std::vector<StepTensor> jobs, const StepArgs& args) {
  return {std::move(jobs), {args.steps.begin(), args.steps.end()}, args.group};
}

// A step's table on the device, and the size of the grids that go over it.
template <class Group, class Scalars> struct UploadedStep {
  DeviceTable memory;
  StepTable<Group, Scalars> table;
  char* scratch = nullptr;  // `bytes_per_tile` for each tile
  int64_t tiles = 0;
  // The kinds of its tensors' states, without and with master weights.
  struct Kinds {
    bool power = false, dynamic = false, fp32 = false;
  } plain, master;
};

// Brings a step's table to the device. first: a tensor of the step (upload_table). step_blocks: thread blocks
// of the step's kernels that a multiprocessor has room for.
template <class Group, class Scalars>
UploadedStep<Group, Scalars> upload_step(const char* op, const StepHeader& header,
                                         const std::vector<Group>& groups, const StepEntries& entries,
                                         const Tensor& first, cudaStream_t stream, int step_blocks,
                                         size_t bytes_per_tile = 0) {
  static_assert(std::has_unique_object_representations_v<TensorRecord>,
                "padding would differ from step to step");
  const size_t n = entries.tensors.size();
  TableImage image;
  const size_t header_at = image.add<StepHeader>(1), groups_at = image.add<Group>(groups.size()),
               grads_at = image.add<const void*>(n), first_tiles_at = image.add<uint32_t>(n),
               tensors_at = image.add<TensorRecord>(n);
  UploadedStep<Group, Scalars> step;
  int64_t numel = 0;
  for (const StepTensor& tensor : entries.tensors) numel += tensor.layout.numel;
  const int elements_per_tile = tile_elements(numel, step_blocks * multiprocessors());
  *image.at<StepHeader>(header_at) = header;
  std::copy(groups.begin(), groups.end(), image.at<Group>(groups_at));
  for (size_t i = 0; i < n; ++i) {
    const TensorRecord r =
        tensor_record(entries.tensors[i], entries.steps[i], entries.group[i], elements_per_tile);
    image.at<const void*>(grads_at)[i] = entries.tensors[i].grad;
    image.at<uint32_t>(first_tiles_at)[i] = static_cast<uint32_t>(step.tiles);
    image.at<TensorRecord>(tensors_at)[i] = r;
    step.tiles += tiles_of(r);
    auto& kinds = r.weight_storage == WeightStorage::kNearest ? step.plain : step.master;
    kinds.power |= r.kind == StateKind::kPower;
    kinds.dynamic |= r.kind == StateKind::kDynamic;
    kinds.fp32 |= r.kind == StateKind::kFp32;
  }
  const size_t scalars_at = image.bytes().size(),
               scratch_at = scalars_at + (n * sizeof(Scalars) + 15) / 16 * 16;
  step.memory =
      upload_table(image, scratch_at - scalars_at + step.tiles * bytes_per_tile, op, first, n, stream);
  const DeviceTable& memory = step.memory;
  step.table = {memory.at<const StepHeader>(header_at),
                memory.at<const Group>(groups_at),
                memory.at<const void* const>(grads_at),
                memory.at<const uint32_t>(first_tiles_at),
                memory.at<const TensorRecord>(tensors_at),
                memory.at<Scalars>(scalars_at),
                static_cast<int>(n)};
  step.scratch = memory.at<char>(scratch_at);
  return step;
}

// The kernels of a step over its tiles, by the codec of the states. A kernel takes whether it also updates
// fp32 states.
template <class Group, class Scalars, class... Args> struct KernelsOfCodecs {
  void (*power)(StepTable<Group, Scalars>, bool, Args...);
  void (*dynamic)(StepTable<Group, Scalars>, bool, Args...);
};
// Tensors with master weights have kernels of their own, as these take more registers.
template <class Group, class Scalars, class... Args> struct TileKernels {
  KernelsOfCodecs<Group, Scalars, Args...> plain, master;
};
template <class Group, class Scalars> using PrologueKernel = void (*)(StepTable<Group, Scalars>);

template <class Group, class Scalars>
void launch_prologue(const char* op, const UploadedStep<Group, Scalars>& step,
                     PrologueKernel<Group, Scalars> prologue, cudaStream_t stream) {
  launch_checked(op, prologue, ceil_div(step.table.count, kThreads), stream, step.table);
}

// A launch over all tiles for each codec in use (power's where all states are fp32), and again for tensors
// with master weights.
template <class Group, class Scalars, class... Args>
void launch_tiles(const char* op, const UploadedStep<Group, Scalars>& step,
                  const TileKernels<Group, Scalars, Args...>& kernels, cudaStream_t stream,
                  std::type_identity_t<Args>... args) {
  const auto launch_codecs = [&](const auto& kinds,
                                 const KernelsOfCodecs<Group, Scalars, Args...>& codec_kernels) {
    bool with_fp32 = true;  // the first launch
    const auto launch = [&](auto kernel) {
      launch_checked(op, kernel, step.tiles, stream, step.table, std::exchange(with_fp32, false), args...);
    };
    if (kinds.power || (kinds.fp32 && !kinds.dynamic)) launch(codec_kernels.power);
    if (kinds.dynamic) launch(codec_kernels.dynamic);
  };
  launch_codecs(step.plain, kernels.plain);
  launch_codecs(step.master, kernels.master);
}

// A step in one pass: launches that write its table, the prologue, and those of launch_tiles. Blocks: the
// thread blocks of its kernels that a multiprocessor has room for.
template <int Blocks, class Hyperparameters, class Scalars>
void step_in_one_pass(const StepOp& op, const StepArgs& args,
                      PrologueKernel<StepGroup<Hyperparameters>, Scalars> prologue,
                      const TileKernels<StepGroup<Hyperparameters>, Scalars>& update) {
  const auto groups = args.groups<Hyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, op);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = group_records(args, groups);
  const DeviceScope scope(args.params[0]);
  const auto step = upload_step<StepGroup<Hyperparameters>, Scalars>(
      op.name, header, records, tensor_entries(jobs, args), args.params[0], scope.stream, Blocks);
  launch_prologue(op.name, step, prologue, scope.stream);
  launch_tiles(op.name, step, update, scope.stream);
}

}  // namespace memkern
