// memkern's few-bit activations on CUDA devices.
#include "common/activation_args.h"

#include "activation_kernel.cuh"
#include "host.h"

namespace memkern {
namespace {

EncodeTable encode_table(const Thresholds& from) {
  EncodeTable table{from.count, from.bits, from.symmetry};
  for (int i = 0; i < from.count; ++i) {
    table.threshold[i] = from.threshold[i];
    for (int p = 0; p < from.bits; ++p) table.flip[i] |= (from.flip[i] >> p & 1u) << 8 * p;
  }
  return table;
}

Elementwise elementwise(const Tensor& input, const Tensor* result, const Tensor& codes, int64_t numel) {
  void *x = input.data_ptr(), *y = result ? result->data_ptr() : nullptr;
  return {x,
          y,
          static_cast<uint8_t*>(codes.data_ptr()),
          numel,
          plane_bytes(numel),
          float_type(input),
          on_16_bytes(x) && on_16_bytes(y)};
}

int64_t blocks_for(const Elementwise& t) { return (t.plane + kThreads - 1) / kThreads; }

// Calls use(number) with an activation's number as a constant.
template <class Use> void with_activation(int64_t fn, Use&& use) {
  const bool known = [&]<int... Fn>(std::integer_sequence<int, Fn...>) {
    return ((fn == Fn && (use(std::integral_constant<int, Fn>{}), true)) || ...);
  }(std::make_integer_sequence<int, kActivations>{});
  STD_TORCH_CHECK(known, "fn must be from 0 to ", kActivations - 1, ", got ", fn);
}

}  // namespace

Tensor few_bit_encode_cuda(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry) {
  const EncodeTable table = encode_table(thresholds_of(bits, thresholds, flips, symmetry));
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const OnDevice on(x);
  Tensor codes = torch::stable::new_empty(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, nullptr, codes, numel);
  launch_checked("few_bit_encode", encode_eights<-1>, blocks_for(t), on.stream, t, 0.0f, 0.0f, table);
  return codes;
}

std::tuple<Tensor, Tensor> few_bit_forward_cuda(Tensor x, int64_t fn, double a, double b, int64_t bits,
                                                Doubles thresholds, Ints flips, int64_t symmetry) {
  const EncodeTable table = encode_table(thresholds_of(bits, thresholds, flips, symmetry));
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const OnDevice on(x);
  Tensor y = empty_like(x, x.scalar_type());
  Tensor codes = torch::stable::new_empty(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, &y, codes, numel);
  with_activation(fn, [&](auto number) {
    launch_checked("few_bit_forward", encode_eights<number()>, blocks_for(t), on.stream, t,
                   static_cast<float>(a), static_cast<float>(b), table);
  });
  return {y, codes};
}

Tensor few_bit_backward_cuda(Tensor grad, Tensor codes, Doubles levels) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_planes(codes, numel);
  STD_TORCH_CHECK(same_device(codes, grad), "codes must be on grad's device");
  LevelTable table{static_cast<int>(codes.sizes()[0])};
  check_levels(levels, table.bits, table.level);
  const OnDevice on(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  launch_checked("few_bit_backward", multiply_by_levels, blocks_for(t), on.stream, t, table);
  return result;
}

Tensor few_bit_backward_from_output_cuda(Tensor grad, Tensor output, Tensor codes, double minimum,
                                         Doubles falling, Doubles rising, double falling_reach,
                                         double rising_reach) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_output(output, grad);
  check_planes(codes, numel);
  STD_TORCH_CHECK(codes.sizes()[0] == 1, "codes must have one row, got ", codes.sizes()[0]);
  STD_TORCH_CHECK(same_device(codes, grad) && same_device(output, grad),
                  "output and codes must be on grad's device");
  const Valley valley = valley_of(minimum, falling, rising, falling_reach, rising_reach);
  const OnDevice on(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  launch_checked("few_bit_backward_from_output", multiply_by_valley, blocks_for(t), on.stream, t,
                 output.data_ptr(), float_type(output), on_16_bytes(output.data_ptr()), valley);
  return result;
}

}  // namespace memkern
