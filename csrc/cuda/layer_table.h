// The table of a step in two passes, and its launches.
#pragma once
#include "layers.cuh"
#include "step_table.h"

namespace memkern {

// What upload_step wants of each tensor, for each layer.
struct Layers {
  std::vector<StepTensor> jobs;
  std::vector<Tensor> steps;
  Ints group;
};

inline Layers layers_of(const std::vector<StepTensor>& jobs, const StepArgs& args) {
  Layers all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    add_layers(all.jobs, jobs[i], args.trust_ratios[i]);
    const int64_t count = args.trust_ratios[i].numel();
    all.steps.insert(all.steps.end(), count, args.steps[i]);
    all.group.insert(all.group.end(), count, args.group[i]);
  }
  return all;
}

template <class Group, class Scalars> using TilesKernel = void (*)(Table<Group, Scalars>, bool);
template <class Group, class Scalars> using NormsKernel = void (*)(Table<Group, Scalars>, bool, Squares*);

// At most six launches beside the table's. Each pair of kernels is one for each codec.
template <class Group, class Scalars>
void step_layers(const char* op, const StepHeader& header, const std::vector<Group>& groups,
                 const Layers& layers, const Tensor& first, void (*prologue)(Table<Group, Scalars>),
                 const std::array<NormsKernel<Group, Scalars>, 2>& norms,
                 const std::array<TilesKernel<Group, Scalars>, 2>& updates, cudaStream_t stream) {
  const auto step = upload_step<Group, Scalars>(op, header, groups, layers.jobs, first, layers.steps,
                                                layers.group, stream, sizeof(Squares));
  Squares* partial = reinterpret_cast<Squares*>(step.scratch);
  launch_prologue(op, step, prologue, stream);
  launch_tiles(op, step, norms[0], norms[1], stream, partial);
  launch_checked(op, layer_ratios<Group, Scalars>, step.table.count, stream, step.table,
                 static_cast<const Squares*>(partial), static_cast<int>(step.tiles));
  launch_tiles(op, step, updates[0], updates[1], stream);
}

}  // namespace memkern
