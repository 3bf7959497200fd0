// A step with trust ratios (LAMB, LARS) on a CUDA device: launch_step.h with layers as the table's entries,
// and a pass over their norms before the update.
#pragma once
#include "common/trust_ratios.h"
#include "launch_step.h"
#include "trust_ratio.cuh"

namespace memkern {

inline StepEntries layer_entries(const std::vector<StepTensor>& jobs, const StepArgs& args) {
  StepEntries layers;
  for (size_t i = 0; i < jobs.size(); ++i) {
    add_layers(layers.tensors, jobs[i], args.trust_ratios[i]);
    const int64_t count = args.trust_ratios[i].numel();
    layers.steps.insert(layers.steps.end(), count, args.steps[i]);
    layers.group.insert(layers.group.end(), count, args.group[i]);
  }
  return layers;
}

// A step in two passes, with the layers' trust ratios between them: launches that write the step's table, the
// prologue, the ratios, and for each pass the launches of launch_tiles. With squares in StepArgs only one of
// the passes runs.
template <int Blocks, class Hyperparameters, class Scalars>
void step_in_two_passes(const StepOp& op, const StepArgs& args,
                        PrologueKernel<StepGroup<Hyperparameters>, Scalars> prologue,
                        const TileKernels<StepGroup<Hyperparameters>, Scalars, Squares*>& norms,
                        const TileKernels<StepGroup<Hyperparameters>, Scalars>& update) {
  const auto groups = args.groups<Hyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, op);
  check_trust_ratios(args, jobs, groups);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = group_records(args, groups);
  const DeviceScope scope(args.params[0]);
  const auto step =
      upload_step<StepGroup<Hyperparameters>, Scalars>(op.name, header, records, layer_entries(jobs, args),
                                                       args.params[0], scope.stream, Blocks, sizeof(Squares));
  Squares* partial = reinterpret_cast<Squares*>(step.scratch);
  launch_prologue(op.name, step, prologue, scope.stream);
  Squares* squares = squares_of(args);
  if (!squares || args.squares_only) launch_tiles(op.name, step, norms, scope.stream, partial);
  launch_checked<kRatioThreads>(op.name, layer_ratios<StepGroup<Hyperparameters>, Scalars>, step.table.count,
                                scope.stream, step.table, static_cast<const Squares*>(partial),
                                static_cast<int>(step.tiles), squares, args.squares_only);
  if (!args.squares_only) launch_tiles(op.name, step, update, scope.stream);
}

}  // namespace memkern
