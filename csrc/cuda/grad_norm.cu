// memkern::grad_norm_ on CUDA devices.
#include "common/ops.h"
#include "grad_norm_kernel.cuh"
#include "step_table.h"

namespace memkern {

void grad_norm_cuda(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale) {
  STD_TORCH_CHECK(norm.numel() == 1 && norm.scalar_type() == ScalarType::Double,
                  "norm must be float64 of one element on the gradients' device");
  const StepHeader header = header_of(grad_scale, std::nullopt, std::nullopt, 0.0, norm);
  Tensors values;  // what the tables point to
  std::vector<NormTensor> tensors;
  std::vector<uint32_t> first_tiles;
  int64_t tiles = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    STD_TORCH_CHECK(same_device(grads[i], norm), name_of("grads", i), " must be on norm's device");
    values.push_back(dense(grads[i]));
    const Tensor& g = values.back();
    STD_TORCH_CHECK(is_float_type(g.scalar_type()), name_of("grads", i),
                    " must be float32, bfloat16 or float16");
    const int64_t numel = layout_of(g, kMinBlockSize, "a gradient").numel;
    tensors.push_back({g.data_ptr(), numel, float_type(g), on_16_bytes(g.data_ptr())});
    first_tiles.push_back(static_cast<uint32_t>(tiles));
    tiles += (numel + kTileElements - 1) / kTileElements;
  }
  STD_TORCH_CHECK(tiles < int64_t{1} << 31, "grad_norm_: too many elements for one launch");

  const OnDevice on(norm);
  Image image;
  const size_t header_at = image.add<StepHeader>(1), tensors_at = image.add<NormTensor>(tensors.size()),
               first_tiles_at = image.add<uint32_t>(tensors.size());
  *image.at<StepHeader>(header_at) = header;
  std::copy(tensors.begin(), tensors.end(), image.at<NormTensor>(tensors_at));
  std::copy(first_tiles.begin(), first_tiles.end(), image.at<uint32_t>(first_tiles_at));
  const Twin twin = upload(image, tiles * sizeof(double), "grad_norm_", norm, tensors.size(), on.stream);
  const NormTable table{twin.at<const StepHeader>(header_at),  twin.at<const uint32_t>(first_tiles_at),
                        twin.at<const NormTensor>(tensors_at), twin.at<double>(image.bytes().size()),
                        static_cast<int>(tensors.size()),      static_cast<int>(tiles)};
  launch_checked("grad_norm_", norm_tiles, tiles, on.stream, table);
  launch_checked("grad_norm_", norm_total, 1, on.stream, table, static_cast<double*>(norm.data_ptr()));
}

}  // namespace memkern
