// The part that this module uses of the C interface of libtorch_cpu, which torch keeps for compiled models
// and extensions: https://docs.pytorch.org/docs/main/notes/libtorch_stable_abi.html
//
// The library is not linked, so one binary supports every torch version: its functions are looked up in the
// copy that `import torch` loaded. None of them needs Python or the GIL. Tested on torch 2.11, 2.13
// and 2.15.0.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tensors/dlpack.h"

namespace torch2ort {

struct AtenTensor;
using TensorHandle = AtenTensor*;  // owned by whoever made it
struct StableList;
struct StableString;
using StableValue = uint64_t;  // an argument or a result of any operator: a number's bits, or a handle
using TorchError = int32_t;    // 0 for none

struct TorchAbi {
  TorchError (*create_tensor_from_blob)(void* data, int64_t rank, const int64_t* sizes,
                                        const int64_t* strides, int64_t offset, int32_t dtype,
                                        int32_t device_type, int32_t device_index, TensorHandle* out);
  TorchError (*delete_tensor_object)(TensorHandle tensor);
  TorchError (*get_data_ptr)(TensorHandle tensor, void** out);
  TorchError (*get_dim)(TensorHandle tensor, int64_t* out);
  TorchError (*get_sizes)(TensorHandle tensor, int64_t** out);
  TorchError (*get_strides)(TensorHandle tensor, int64_t** out);
  TorchError (*get_dtype)(TensorHandle tensor, int32_t* out);
  TorchError (*get_layout)(TensorHandle tensor, int32_t* out);
  TorchError (*is_defined)(TensorHandle tensor, bool* out);
  TorchError (*copy)(TensorHandle to, TensorHandle from, int32_t non_blocking);
  bool (*grad_mode_is_enabled)();
  void (*grad_mode_set_enabled)(bool enabled);
  uint64_t (*version)();
  // Takes ownership of the arguments; the results replace them on the stack.
  TorchError (*call_dispatcher)(const char* name, const char* overload, StableValue* stack, uint64_t version);
  TorchError (*new_list)(size_t size, StableList** out);
  TorchError (*list_push_back)(StableList* list, StableValue item);
  TorchError (*new_string)(const char* data, size_t size, StableString** out);
  // Available since torch 2.13; before, torch expects `new`.
  TorchError (*new_stable_value)(StableValue** out);

  std::vector<std::pair<DLDataType, int32_t>> dtypes;  // torch's numbers
  int32_t strided = 0;
};

// The interface, or null where a part of it is missing. It is looked up again until it is found, as torch may
// be imported later.
const TorchAbi* FindTorchAbi();

// A function of libtorch_cpu, or null.
void* FindTorchFunction(const std::string& name);

// torch's number of an element type, or -1.
int32_t TorchDType(const TorchAbi& torch, DLDataType dtype);

// A tensor of torch's without a Python object.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(const TorchAbi& torch, TensorHandle handle) : torch_(&torch), handle_(handle) {}
  OwnedTensor(OwnedTensor&& other) noexcept
      : torch_(other.torch_), handle_(std::exchange(other.handle_, nullptr)) {}
  OwnedTensor& operator=(OwnedTensor&& other) noexcept {
    std::swap(torch_, other.torch_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  ~OwnedTensor() {
    if (handle_ != nullptr) torch_->delete_tensor_object(handle_);
  }
  TensorHandle get() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  const TorchAbi* torch_ = nullptr;
  TensorHandle handle_ = nullptr;
};

}  // namespace torch2ort
