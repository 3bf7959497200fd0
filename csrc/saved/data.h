// saved_value.py: where the data of a stored value are.
#pragma once

#include "codecs.h"

namespace memkern::saved {

// Where a block's data go, if they do not stay: to the hooks around it, such as save_on_cpu's, or to the
// host.
struct Destination {
  py::object hooks;    // pack and unpack; none: offload
  py::object offload;  // options of the transfer
};

using DestinationPtr = std::shared_ptr<const Destination>;

// The tensors that stand for a value, or what stands for them elsewhere.
class Data {
 public:
  using Tensors = c10::SmallVector<Tensor, 3>;

  explicit Data(DestinationPtr destination) : destination_(std::move(destination)) {}
  bool stay() const { return !destination_; }
  bool have_hooks() const { return destination_ && destination_->hooks; }
  void give(Tensors tensors, bool may_leave = true) {
    here_.clear(), there_ = py::object();
    if (have_hooks()) {
      py::tuple packed(tensors.size());
      for (size_t i = 0; i < tensors.size(); ++i) packed[i] = hook(0)(tensors[i]);
      there_ = std::move(packed);
    } else if (destination_ && may_leave) {
      py::object found = call("put", to_tuple(tensors), destination_->offload);
      if (!py::isinstance<py::list>(found)) there_ = std::move(found);
    }
    if (!there_) here_ = std::move(tensors);
  }
  Tensors take() const {
    if (!there_) return here_;
    Tensors found;
    if (have_hooks()) {
      for (auto each : py::reinterpret_borrow<py::tuple>(there_)) found.push_back(to_tensor(hook(1)(each)));
    } else {
      for (auto each : py::list(there_.attr("tensors")())) found.push_back(THPVariable_Unpack(each.ptr()));
    }
    return found;
  }
  const Tensor& front() const { return here_[0]; }  // of what is here
  py::object shown() const { return there_ ? there_ : to_tuple(here_); }
  void clear() { here_.clear(), there_ = py::object(), destination_.reset(); }

 private:
  DestinationPtr destination_;
  Tensors here_;
  py::object there_;

  py::object hook(int i) const { return py::reinterpret_borrow<py::tuple>(destination_->hooks)[i]; }
};

}  // namespace memkern::saved
