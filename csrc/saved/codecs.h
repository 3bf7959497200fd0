// codecs.py: the power code here, every other codec in Python.
#pragma once

#include "nodes.h"

namespace memkern::saved {

struct Encoded {
  c10::SmallVector<Tensor, 3> data;
  bool is_coarse = false;
};

struct Layout {
  at::DimVector shape, stride;
  ScalarType dtype = at::kFloat;
};

// signs: of the power code; none for a codec in Python. mean, inverse: of codes of (x - mean) * inverse, else
// undefined.
struct Codec {
  enum class Signs : int8_t { kNone, kSigned, kUnsigned } signs = Signs::kNone;
  bool is_lossy = true, is_logarithm = false;
  int64_t block_size = 0;
  Tensor mean, inverse;
  py::object python;
};

inline CodecPtr to_codec(const py::object& codec) {
  if (codec.is_none()) return nullptr;
  auto found = std::make_shared<Codec>();
  found->python = codec;
  found->is_lossy = codec.attr("lossy").cast<bool>();
  found->block_size = codec.attr("block_size").cast<int64_t>();
  auto kind = call("kind_of_codec", codec).cast<std::string>();
  found->is_logarithm = kind == "logarithm";
  if (kind == "signed") found->signs = Codec::Signs::kSigned;
  if (kind == "unsigned") found->signs = Codec::Signs::kUnsigned;
  return found;
}

inline CodecPtr in_blocks_of(const CodecPtr& codec, int64_t block_size) {
  static auto& made = *new std::map<std::pair<PyObject*, int64_t>, CodecPtr>;
  CodecPtr& found = made[{codec->python.ptr(), block_size}];
  if (!found) found = to_codec(call("in_blocks_of", codec->python, block_size));
  return found;
}

struct Constants {  // of codecs.py, data_needs.py and attention.py
  int64_t power, block_size, smallest_block, sample;
  double largest_scale, largest_share, largest_mean, largest_deviations, largest_spread;
  double largest_score_deviation, largest_sureness;
  static const Constants& get() {
    static const Constants found = [] {
      py::dict c = call("constants");
      auto whole = [&](const char* name) { return c[name].cast<int64_t>(); };
      auto number = [&](const char* name) { return c[name].cast<double>(); };
      return Constants{whole("power"),
                       whole("block_size"),
                       whole("smallest_block"),
                       whole("sample"),
                       number("largest_scale"),
                       number("largest_share"),
                       number("largest_mean"),
                       number("largest_deviations"),
                       number("largest_spread"),
                       number("largest_score_deviation"),
                       number("largest_sureness")};
    }();
    return found;
  }
};

// Whether the ops of a CPU are the compiled ones: memkern.backend may be told otherwise at any time. Asked by
// every session.
inline bool g_has_compiled_ops = false;

// An op of HOST_OPS in memkern/schemas.py, which C++ has where the ops of a CPU are the compiled ones.
constexpr char kQuantizeWithNorms[] = "quantize_with_norms";
constexpr char kAttentionStatistics[] = "attention_statistics";

template <class Signature, const char* name> const c10::TypedOperatorHandle<Signature>& host_op() {
  static const auto find = [](const char* space) {
    return c10::Dispatcher::singleton().findSchemaOrThrow((std::string(space) + name).c_str(), "");
  };
  static const auto compiled = find("memkern::").template typed<Signature>();
  static const auto reference = find("memkern_reference::").template typed<Signature>();
  return g_has_compiled_ops ? compiled : reference;
}

inline std::tuple<Tensor, Tensor, Tensor> quantize_with_norms(const Tensor& x, bool is_signed,
                                                              int64_t block_size) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, bool, int64_t);
  return host_op<Signature, kQuantizeWithNorms>().call(x, is_signed, block_size);
}

inline Tensor dequantize(const Tensor& codes, const Tensor& scale, int64_t block_size, ScalarType dtype) {
  if (!is_on_cpu(codes) || !g_has_compiled_ops)
    return to_tensor(call("dequantize", codes, scale, block_size, dtype));
  using Signature = Tensor(const Tensor&, const Tensor&, int64_t, int64_t, ScalarType);
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("memkern::dequantize_blockwise", "").typed<Signature>();
  return op.call(codes, scale, Constants::get().power, block_size, dtype);
}

inline double norm_of(const Tensor& x) { return at::linalg_vector_norm(x).item().toDouble(); }

// codecs.encode_power.
inline std::optional<Encoded> encode_power(const Codec& codec, const Tensor& given) {
  const auto& constants = Constants::get();
  Tensor x = is_dense(given) ? given : at::empty_like(given).copy_(given);
  bool is_signed = codec.signs == Codec::Signs::kSigned;
  if (!is_on_cpu(x)) {
    auto [codes, scale] = call("quantize", x, is_signed, codec.block_size).cast<std::tuple<Tensor, Tensor>>();
    return Encoded{{codes, scale}};
  }
  auto [codes, scale, norms] = quantize_with_norms(x, is_signed, codec.block_size);
  auto is_coarse = [&, &codes = codes] { return call("is_coarse", x, codes, codec.block_size).cast<bool>(); };
  const double* found = norms.const_data_ptr<double>();
  double of_all = found[0], of_scales = found[1];
  if (of_all <= constants.largest_scale)
    return Encoded{{codes, scale}, of_scales > constants.largest_share * of_all && is_coarse()};
  if (!x.isfinite().all().item().toBool()) return std::nullopt;
  scale.clamp_max_(constants.largest_scale);
  return Encoded{{codes, scale}, is_coarse()};
}

// codecs.normalized.
inline std::optional<Encoded> encode_normalized(const Codec& codec, const Tensor& x) {
  Tensor y = x.to(at::kFloat).sub(codec.mean);
  if (codec.inverse.defined()) y.mul_(codec.inverse);
  auto found = encode_power(codec, y);
  if (found) found->data.push_back(codec.mean);
  return found;
}

inline std::optional<Encoded> encode(const Codec& codec, const Tensor& x) {
  if (codec.mean.defined()) return encode_normalized(codec, x);
  if (codec.signs != Codec::Signs::kNone) return encode_power(codec, x);
  py::object found = codec.python.attr("encode")(x);
  if (found.is_none()) return std::nullopt;
  Encoded encoded;
  for (auto each : found.attr("data")) encoded.data.push_back(THPVariable_Unpack(each.ptr()));
  encoded.is_coarse = found.attr("coarse").cast<bool>();
  return encoded;
}

inline py::tuple to_tuple(at::ArrayRef<Tensor> tensors) {
  py::tuple found(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) found[i] = py::cast(tensors[i]);
  return found;
}

inline Tensor decode(const Codec& codec, at::ArrayRef<Tensor> data, const Layout& layout, ScalarType dtype) {
  if (codec.mean.defined()) {
    Tensor y = dequantize(data[0], data[1], codec.block_size, at::kFloat);
    return (codec.inverse.defined() ? y.div_(codec.inverse) : y).add_(data[2]).to(dtype);
  }
  if (codec.signs != Codec::Signs::kNone) return dequantize(data[0], data[1], codec.block_size, dtype);
  return to_tensor(call("decode", codec.python, to_tuple(data), at::IntArrayRef(layout.shape),
                        at::IntArrayRef(layout.stride), layout.dtype, dtype));
}

}  // namespace memkern::saved
