// memkern::attention_statistics on the CPU. Nowhere else: the host would have to wait for what it finds.
#include "common/ops.h"
#include "cpu/step.h"

namespace memkern {

namespace {

AttentionJob::MaskType mask_type(const Tensor& mask) {
  if (mask.scalar_type() == ScalarType::Bool) return AttentionJob::kBool;
  MEMKERN_CHECK(is_float_type(mask.scalar_type()), "mask must be bool, float32, bfloat16 or float16");
  const FloatType type = float_type(mask);
  return type == FloatType::kBf16   ? AttentionJob::kBf16
         : type == FloatType::kFp16 ? AttentionJob::kFp16
                                    : AttentionJob::kFp32;
}

void set_mask(AttentionJob& job, const Tensor& mask, const int64_t (&shape)[4]) {
  job.mask_type = mask_type(mask);
  job.mask = mask.data_ptr();
  const int64_t missing = 4 - mask.dim();
  MEMKERN_CHECK(missing >= 0, "mask must have at most 4 dimensions, got ", mask.dim());
  for (int64_t d = missing; d < 4; ++d) {
    const int64_t size = mask.sizes()[d - missing];
    MEMKERN_CHECK(size == 1 || size == shape[d], "mask must broadcast over (batch, heads, queries, keys)");
    job.mask_stride[d] = size == 1 ? 0 : mask.strides()[d - missing];
  }
}

// With the elements of a row side by side.
Tensor with_rows(const Tensor& x) {
  return x.strides()[3] == 1 || x.sizes()[3] == 1 ? x : torch::stable::contiguous(x);
}

}  // namespace

Tensor attention_statistics_cpu(Tensor query, Tensor key, std::optional<Tensor> mask, bool is_causal,
                                double scale, int64_t sample) {
  MEMKERN_CHECK(query.dim() == 4 && key.dim() == 4,
                "query and key must be of shape (batch, heads, tokens, width)");
  MEMKERN_CHECK(is_float_type(query.scalar_type()) && query.scalar_type() == key.scalar_type(),
                "query and key must both be float32, bfloat16 or float16");
  const auto q = query.sizes(), k = key.sizes();
  MEMKERN_CHECK(q[0] == k[0] && q[3] == k[3] && k[1] > 0 && q[1] % k[1] == 0,
                "query and key must agree in batch and width, and query's heads be a multiple of key's");
  MEMKERN_CHECK(sample > 0, "sample must be positive, got ", sample);
  const Tensor queries = with_rows(query), keys = with_rows(key);
  AttentionJob job{};
  job.heads = q[1], job.key_heads = k[1], job.queries = q[2], job.keys = k[2], job.width = q[3];
  job.step = std::max<int64_t>(1, ceil_div(q[2], sample));
  job.is_causal = is_causal;
  job.scale = static_cast<float>(scale);
  job.query = queries.data_ptr();
  job.key = keys.data_ptr();
  for (int d = 0; d < 3; ++d)
    job.query_stride[d] = queries.strides()[d], job.key_stride[d] = keys.strides()[d];
  if (mask) set_mask(job, *mask, {q[0], q[1], q[2], k[2]});
  const int64_t units = q[0] * q[1];
  std::vector<float> scratch(units * job.width * kAttentionRows);
  std::vector<double> partial(units * 4);
  job.scratch = scratch.data();
  job.partial = partial.data();
  job.layout.blocks = units;
  job.layout.numel = query.numel() + key.numel() + units * std::min(q[2], sample) * k[2];
  job.run = cpu_kernels().attention(float_type(query));
  if (units > 0) run_jobs(std::vector<AttentionJob>{job});
  Tensor result = new_tensor(query, {4}, ScalarType::Double);
  double* sums = static_cast<double*>(result.data_ptr());
  std::fill(sums, sums + 4, 0.0);
  for (int64_t i = 0; i < units * 4; ++i) sums[i % 4] += partial[i];
  return result;
}

}  // namespace memkern
