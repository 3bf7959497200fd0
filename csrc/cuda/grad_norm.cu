// memkern::grad_norm_ on CUDA devices: the global norm of gradients, a sum in fp64 for each tile, then the
// sum of those, both in a fixed order. And the sums of squares of single arrays, for Muon's matrices.
#include "common/ops.h"
#include "launch_sums.h"
#include "squares.cuh"

namespace memkern {

// The arrays whose squares are summed, cut into tiles, as the kernels get them.
struct NormTable {
  const StepHeader* header;
  const uint32_t* first_tiles;
  const NormTensor* tensors;
  double* partial;  // of each tile
  int count, tiles, tile_elements;
};

static __global__ void __launch_bounds__(kThreads) norm_tiles(NormTable table) {
  const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
  const NormTensor t = table.tensors[i];
  const int64_t first = (blockIdx.x - int64_t{table.first_tiles[i]}) * table.tile_elements;
  const int64_t left = t.numel - first;
  const int n = left < table.tile_elements ? static_cast<int>(left) : table.tile_elements;
  constexpr int kStep = kThreads * kVector;
  double sum = 0.0;
  // The loads of two vectors are in flight: with 16 bytes of bf16 for each thread the memory would idle.
  for (int j = static_cast<int>(threadIdx.x) * kVector; j < n; j += 2 * kStep) {
    const Span at = span_of(first + j, n - j, true), second = span_of(first + j + kStep, n - j - kStep, true);
    const Alignment alignment = alignment_of(t.values, at), second_alignment = alignment_of(t.values, second);
    const Raw raw = load_gradient(t.values, t.type, at, alignment),
              second_raw = load_gradient(t.values, t.type, second, second_alignment);
    float g[kVector];
    gradient_to_floats(raw, t.type, alignment, g);
    add_squares(sum, g);
    gradient_to_floats(second_raw, t.type, second_alignment, g);
    add_squares(sum, g);
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) table.partial[blockIdx.x] = sum;
}

// Adds all partial sums, in one thread block: a gradient of 10^9 elements has 61,000.
constexpr int kTotalThreads = 1024;
static __global__ void __launch_bounds__(kTotalThreads) norm_total(NormTable table, double* norm) {
  double sum = 0.0;
#pragma unroll 8
  for (int i = threadIdx.x; i < table.tiles; i += kTotalThreads) sum += table.partial[i];
  sum = sum_over_block<kTotalThreads>(sum);
  if (threadIdx.x == 0) *norm = ::sqrt(sum) * gradient_factor(*table.header);
}

// Adds the partial sums of each array, one thread block for each.
static __global__ void __launch_bounds__(kThreads) norm_of_each(NormTable table) {
  const int i = blockIdx.x;
  const NormTensor t = table.tensors[i];
  const int end = i + 1 < table.count ? static_cast<int>(table.first_tiles[i + 1]) : table.tiles;
  double sum = 0.0;
  for (int k = static_cast<int>(table.first_tiles[i] + threadIdx.x); k < end; k += kThreads)
    sum += table.partial[k];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) *t.sum = skipped(*table.header) ? 0.0 : sum;
}

namespace {

struct UploadedNorms {
  DeviceTable memory;
  NormTable table;
};

// The table of the arrays, with room for the sums of their tiles, and a launch that computes these.
UploadedNorms launch_norm_tiles(const char* op, const StepHeader& header,
                                const std::vector<NormTensor>& tensors, const Tensor& like,
                                cudaStream_t stream) {
  int64_t total = 0;
  for (const NormTensor& t : tensors) total += t.numel;
  const int tile = tile_elements(total, resident_blocks(kThreads));
  std::vector<uint32_t> first_tiles;
  int64_t tiles = 0;
  for (const NormTensor& t : tensors) {
    first_tiles.push_back(static_cast<uint32_t>(tiles));
    tiles += ceil_div(t.numel, tile);
  }
  MEMKERN_CHECK(tiles < int64_t{1} << 31, op, ": too many elements for one launch");
  TableImage image;
  const size_t header_at = image.add<StepHeader>(1), tensors_at = image.add<NormTensor>(tensors.size()),
               first_tiles_at = image.add<uint32_t>(tensors.size());
  *image.at<StepHeader>(header_at) = header;
  std::copy(tensors.begin(), tensors.end(), image.at<NormTensor>(tensors_at));
  std::copy(first_tiles.begin(), first_tiles.end(), image.at<uint32_t>(first_tiles_at));
  UploadedNorms norms{upload_table(image, tiles * sizeof(double), op, like, tensors.size(), stream), {}};
  const DeviceTable& memory = norms.memory;
  norms.table = {memory.at<const StepHeader>(header_at),
                 memory.at<const uint32_t>(first_tiles_at),
                 memory.at<const NormTensor>(tensors_at),
                 memory.at<double>(image.bytes().size()),
                 static_cast<int>(tensors.size()),
                 static_cast<int>(tiles),
                 tile};
  launch_checked(op, norm_tiles, tiles, stream, norms.table);
  return norms;
}

}  // namespace

void launch_sums(const char* op, const StepHeader& header, const std::vector<NormTensor>& tensors,
                 const Tensor& like, cudaStream_t stream) {
  const UploadedNorms norms = launch_norm_tiles(op, header, tensors, like, stream);
  launch_checked(op, norm_of_each, norms.table.count, stream, norms.table);
}

void grad_norm_cuda(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale) {
  MEMKERN_CHECK(norm.numel() == 1 && norm.scalar_type() == ScalarType::Double,
                "norm must be float64 of one element on the gradients' device");
  auto* const result = static_cast<double*>(address_of(norm, "norm"));
  const StepHeader header = header_of(grad_scale, std::nullopt, std::nullopt, 0.0, norm);
  Tensors values;  // keeps the memory that the table points to
  std::vector<NormTensor> tensors;
  for (size_t i = 0; i < grads.size(); ++i) {
    MEMKERN_CHECK(same_device(grads[i], norm), name_of("grads", i), " must be on norm's device");
    values.push_back(dense(grads[i]));
    const Tensor& g = values.back();
    MEMKERN_CHECK(is_float_type(g.scalar_type()), name_of("grads", i),
                  " must be float32, bfloat16 or float16");
    const int64_t numel = layout_of(g, kMinBlockSize, "a gradient").numel;
    tensors.push_back({address_of(g, "a gradient"), nullptr, numel, float_type(g), 0});
  }
  const DeviceScope scope(norm);
  const UploadedNorms norms = launch_norm_tiles("grad_norm_", header, tensors, norm, scope.stream);
  launch_checked<kTotalThreads>("grad_norm_", norm_total, 1, scope.stream, norms.table, result);
}

}  // namespace memkern
