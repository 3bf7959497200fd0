// From an optimizer op's arguments to its table on the device.
#pragma once
#include <span>

#include "common/step_checks.h"
#include "plan.h"
#include "table.cuh"

namespace memkern {

// A tensor of one number: on the device it is read there, by the kernels; on the host, now.
inline Number number_of(const Tensor& t, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.numel() == 1, name, " must be a tensor of one element, got ", t.numel());
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Double || type == ScalarType::Float, name,
                  " must be float32 or float64");
  if (is_host(t)) return {nullptr, read_number(t, name), 0};
  STD_TORCH_CHECK(same_device(t, like), name, " must be on the CPU or on the device of the parameters");
  return {t.data_ptr(), 0.0, type == ScalarType::Double};
}

// The groups' records, whose learning rates may be on the device.
template <class Hyperparameters>
std::vector<StepGroup<Hyperparameters>> records_of(const StepArgs& args,
                                                   const std::vector<Hyperparameters>& groups) {
  std::vector<StepGroup<Hyperparameters>> records;
  for (size_t k = 0; k < groups.size(); ++k)
    records.push_back({number_of(args.lr[k], args.params[0], "lr"), groups[k]});
  return records;
}

inline StepHeader header_of(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                            const std::optional<Tensor>& grad_norm, double max_grad_norm,
                            const Tensor& like) {
  StepHeader h{};
  h.max_grad_norm = max_grad_norm;
  const auto set = [&](Number& number, int64_t& given, const std::optional<Tensor>& t, const char* name) {
    if (!t) return;
    number = number_of(*t, like, name);
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

// Blocks of a tensor's own cut: codes' blocks, or tiles where the states are fp32.
inline TensorRecord record_of(const StepTensor& job, const Tensor* step, int64_t group) {
  check_blocks(job.layout);
  TensorRecord r{};
  r.param = job.param;
  r.exp_avg = job.exp_avg;
  r.exp_avg_sq = job.exp_avg_sq;
  r.exp_avg_scale = job.exp_avg_scale;
  r.exp_avg_sq_scale = job.exp_avg_sq_scale;
  r.step = step ? static_cast<float*>(step->data_ptr()) : nullptr;
  r.numel = job.layout.numel;
  r.blocks = blocks_of(job.layout);
  r.kind = job.kind;
  r.param_type = job.param_type;
  r.grad_type = job.grad_type;
  r.group = static_cast<int32_t>(group);
  r.trust_ratio = job.trust_ratio;
  r.first_layer = job.first_layer;
  r.aligned = on_16_bytes(r.param) && on_16_bytes(r.exp_avg) && on_16_bytes(r.exp_avg_sq);
  return r;
}

inline int64_t tiles_of(const TensorRecord& r) {
  return r.kind == StateKind::kFp32 ? (r.numel + kTileElements - 1) / kTileElements : tiles_of(r.blocks);
}

// The table of a step: built, uploaded, and how many thread blocks go over it.
template <class Group, class Scalars> struct StepTable {
  Twin twin;
  Table<Group, Scalars> table;
  char* scratch = nullptr;  // `per_tile` bytes for each tile
  int64_t tiles = 0;
  bool has_power = false, has_dynamic = false, has_fp32 = false;
};

// steps: empty where the optimizer counts none.
template <class Group, class Scalars>
StepTable<Group, Scalars> upload_step(const char* op, const StepHeader& header,
                                      const std::vector<Group>& groups, const std::vector<StepTensor>& jobs,
                                      const Tensor& first, std::span<const Tensor> steps, const Ints& group,
                                      cudaStream_t stream, size_t per_tile = 0) {
  static_assert(std::has_unique_object_representations_v<TensorRecord>,
                "padding would differ from step to step");
  const size_t n = jobs.size();
  Image image;
  const size_t header_at = image.add<StepHeader>(1), groups_at = image.add<Group>(groups.size()),
               grads_at = image.add<const void*>(n), first_tiles_at = image.add<uint32_t>(n),
               tensors_at = image.add<TensorRecord>(n);
  StepTable<Group, Scalars> made;
  *image.at<StepHeader>(header_at) = header;
  std::copy(groups.begin(), groups.end(), image.at<Group>(groups_at));
  for (size_t i = 0; i < n; ++i) {
    const TensorRecord r = record_of(jobs[i], steps.empty() ? nullptr : &steps[i], group[i]);
    image.at<const void*>(grads_at)[i] = jobs[i].grad;
    image.at<uint32_t>(first_tiles_at)[i] = static_cast<uint32_t>(made.tiles);
    image.at<TensorRecord>(tensors_at)[i] = r;
    made.tiles += tiles_of(r);
    made.has_power |= r.kind == StateKind::kPower;
    made.has_dynamic |= r.kind == StateKind::kDynamic;
    made.has_fp32 |= r.kind == StateKind::kFp32;
  }
  const size_t scalars_at = image.bytes().size(),
               scratch_at = scalars_at + (n * sizeof(Scalars) + 15) / 16 * 16;
  made.twin = upload(image, scratch_at - scalars_at + made.tiles * per_tile, op, first, n, stream);
  const Twin& twin = made.twin;
  made.table = {twin.at<const StepHeader>(header_at),
                twin.at<const Group>(groups_at),
                twin.at<const void* const>(grads_at),
                twin.at<const uint32_t>(first_tiles_at),
                twin.at<const TensorRecord>(tensors_at),
                twin.at<Scalars>(scalars_at),
                static_cast<int>(n)};
  made.scratch = twin.at<char>(scratch_at);
  return made;
}

template <class Group, class Scalars>
void launch_prologue(const char* op, const StepTable<Group, Scalars>& step,
                     void (*prologue)(Table<Group, Scalars>), cudaStream_t stream) {
  launch_checked(op, prologue, (step.table.count + kThreads - 1) / kThreads, stream, step.table);
}

// Launches kernels over the tiles: at most two, one for each codec. Each takes the table, whether it also
// sees to fp32 states, and `args`.
template <class Group, class Scalars, class... Args>
void launch_tiles(const char* op, const StepTable<Group, Scalars>& step,
                  void (*power)(Table<Group, Scalars>, bool, Args...),
                  void (*dynamic)(Table<Group, Scalars>, bool, Args...), cudaStream_t stream,
                  std::type_identity_t<Args>... args) {
  const bool power_first = step.has_power || !step.has_dynamic;
  if (power_first) launch_checked(op, power, step.tiles, stream, step.table, true, args...);
  if (step.has_dynamic) launch_checked(op, dynamic, step.tiles, stream, step.table, !power_first, args...);
}

// A step in one pass.
template <class Group, class Scalars>
void launch_step(const char* op, const StepTable<Group, Scalars>& step,
                 void (*prologue)(Table<Group, Scalars>), void (*power)(Table<Group, Scalars>, bool),
                 void (*dynamic)(Table<Group, Scalars>, bool), cudaStream_t stream) {
  launch_prologue(op, step, prologue, stream);
  launch_tiles(op, step, power, dynamic, stream);
}

}  // namespace memkern
