// memkern::few_bit_encode, few_bit_backward and few_bit_backward_from_output on the CPU. The activation
// itself is torch's own op (memkern/_ops.py).
#include "common/activation_args.h"
#include "common/ops.h"
#include "cpu/run_jobs.h"

namespace memkern {

Tensor few_bit_encode_cpu(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry) {
  const Thresholds table = thresholds_of(bits, thresholds, flips, symmetry);
  ActivationJob job{};
  job.layout = flat_layout(x, "x", kGroup);
  job.plane = plane_bytes(job.layout.numel);
  Tensor codes = new_tensor(x, {bits, job.plane}, ScalarType::Byte);
  ThresholdsOfPlanes planes{table.symmetry, table.bits};
  int count = 0;
  for (int p = 0; p < bits; ++p) {
    planes.first[p] = count;
    for (int i = 0; i < table.count; ++i)
      if (table.flip[i] >> p & 1) planes.threshold[count++] = table.threshold[i];
  }
  planes.first[bits] = count;
  job.input = address_of(x, "x");
  job.codes = static_cast<uint8_t*>(codes.data_ptr());
  job.thresholds = &planes;
  job.run = cpu_kernels().encode(float_type(x), table.bits);
  run_jobs(std::vector<ActivationJob>{job});
  return codes;
}

namespace {

// The job of either backward op, without its kernel and the kernel's table. layout: of grad.
ActivationJob backward_job(const Tensor& grad, const BlockLayout& layout, const Tensor& codes,
                           const Tensor& result) {
  ActivationJob job{};
  job.layout = layout;
  check_planes(codes, job.layout.numel);
  job.plane = plane_bytes(job.layout.numel);
  job.input = address_of(grad, "grad");
  job.codes = static_cast<uint8_t*>(address_of(codes, "codes"));
  job.result = result.data_ptr();
  return job;
}

}  // namespace

Tensor few_bit_backward_cpu(Tensor grad, Tensor codes, Doubles levels) {
  const BlockLayout layout = flat_layout(grad, "grad", kGroup);
  Tensor result = empty_like(grad, grad.scalar_type());
  ActivationJob job = backward_job(grad, layout, codes, result);
  const int bits = static_cast<int>(codes.sizes()[0]);
  float table[1 << kMaxBits];
  fill_levels(levels, bits, table);
  job.levels = table;
  job.run = cpu_kernels().levels(float_type(grad), bits);
  run_jobs(std::vector<ActivationJob>{job});
  return result;
}

Tensor few_bit_backward_from_output_cpu(Tensor grad, Tensor output, Tensor codes, double minimum,
                                        Doubles falling, Doubles rising, double falling_reach,
                                        double rising_reach) {
  const BlockLayout layout = flat_layout(grad, "grad", kGroup);
  check_output(output, grad);
  const TwoBranch two_branch = two_branch_of(minimum, falling, rising, falling_reach, rising_reach);
  Tensor result = empty_like(grad, grad.scalar_type());
  ActivationJob job = backward_job(grad, layout, codes, result);
  MEMKERN_CHECK(codes.sizes()[0] == 1, "codes must have one row, got ", codes.sizes()[0]);
  job.output = address_of(output, "output");
  job.two_branch = &two_branch;
  job.run = cpu_kernels().two_branch(float_type(grad), float_type(output));
  run_jobs(std::vector<ActivationJob>{job});
  return result;
}

}  // namespace memkern
