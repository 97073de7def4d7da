// Values of ONNX Runtime with the owner of their memory: PyTorch's tensors as inputs and outputs of a
// session.
#pragma once

#include <memory>

#include "custom_op/ort_api.h"
#include "python.h"
#include "tensors/exchange.h"

namespace torch2ort {

// A value, shared by all users of its memory.
struct Value {
  OrtValue* ort = nullptr;
  Managed tensor;  // the tensor whose memory it is; empty for memory of the runtime's own

  Value() = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  ~Value();
};
using ValuePtr = std::shared_ptr<Value>;

// The value of a contiguous tensor on the CPU; it holds the memory that the tensor has now. Empty with an
// exception set on failure.
ValuePtr ValueOf(PyObject* tensor);

// A tensor of torch's over a value's memory, which holds the value. Empty with an exception set on failure.
Ref TensorOf(const ValuePtr& value);

// The same for another session; null with an exception set on failure.
DLManagedTensor* DonationOf(const ValuePtr& value);

// Sets RuntimeError with the runtime's message, in the wording of onnxruntime's Python package, and releases
// the status; false if it is an error.
bool Succeeded(OrtStatus* status);
// The text of a status, which it releases.
std::string StatusText(OrtStatus* status);

}  // namespace torch2ort
