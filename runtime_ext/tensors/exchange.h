// Tensors between torch and a runtime, without a copy and without torch's headers: DLPack's C exchange API.
#pragma once

#include <atomic>
#include <string>

#include "python.h"
#include "tensors/dlpack.h"

namespace torch2ort {

// The arguments of configure(). All of them live as long as the process.
struct Configuration {
  const DLPackExchangeAPI* exchange = nullptr;
  PyTypeObject* tensor_type = nullptr;
  PyObject* privatize = nullptr;
  PyObject* warn_alias = nullptr;
  PyObject* is_base_held = nullptr;
  PyObject* use_count = nullptr;
  PyObject* error_type = nullptr;
  PyObject* inplace_error_type = nullptr;
};
extern Configuration config;

// False with RuntimeError set if configure() was not called yet.
bool CheckConfigured();

inline bool IsTensor(PyObject* object) { return PyObject_TypeCheck(object, config.tensor_type); }

// Memory of a runtime, lent to torch for as long as torch holds the storage made from it.
//
// Counts its holders: torch's storage (once imported), the call policy, and outputs that are declared to
// share an input's memory. The last holder returns the memory to its owner. Once the policy has dropped every
// tensor that it made, the count therefore shows if the Function still holds the memory: through a saved
// tensor, an attribute, a view, a global, or an autograd graph.
struct Loan : DLManagedTensorVersioned {
  std::atomic<int> holders;
  void* owner;
  void (*give_back)(void* owner);
  // The memory is the caller's own: it does not change as long as the loan is held.
  bool lasting = false;

  void Hold() { holders.fetch_add(1, std::memory_order_relaxed); }
  void Drop();
  // The owner takes the memory back after the call, even if the loan has holders.
  bool borrowed() const { return give_back == nullptr; }
  int holder_count() const { return holders.load(std::memory_order_acquire); }
};

// A loan with one holder, the caller. `give_back(owner)` may run on any thread, without the GIL; null means
// that the memory is only borrowed for the duration of the call.
Loan* Lend(const DLTensor& tensor, void* owner, void (*give_back)(void* owner));
Loan* LendVersioned(DLManagedTensorVersioned* tensor);
// A lasting loan of memory that `feed`, a torch tensor, keeps alive. Null with an exception set on failure.
Loan* LendFeed(const DLTensor& tensor, PyObject* feed);

// A tensor over the loan's memory: torch becomes a holder. Null with an exception set on failure.
PyObject* ImportLoan(Loan* loan);

// The loan's memory as an output of its own: the runtime that gets it becomes a holder of the loan.
DLManagedTensorVersioned* ExportLoan(Loan* loan, const DLTensor& view);

// An owned exchange struct.
struct ReleaseManaged {
  void operator()(DLManagedTensorVersioned* tensor) const {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using Managed = std::unique_ptr<DLManagedTensorVersioned, ReleaseManaged>;

Managed ExportTensor(PyObject* tensor);
Ref ImportManaged(Managed tensor);

// Zeros of the given shape, on `device`. Empty with an exception set on failure.
Ref Zeros(const int64_t* shape, int32_t rank, DLDataType dtype, DLDevice device);

// The bytes [begin, end) of a tensor's elements; empty for a tensor without elements.
struct Span {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool Overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
  int64_t size() const { return static_cast<int64_t>(end - begin); }
};
Span SpanOf(const DLTensor& tensor);
bool IsContiguous(const DLTensor& tensor);
int64_t ElementCount(const DLTensor& tensor);

inline bool operator==(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}
inline bool operator!=(DLDataType a, DLDataType b) { return !(a == b); }
inline bool operator==(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}
inline bool operator!=(DLDevice a, DLDevice b) { return !(a == b); }
inline bool IsFloating(DLDataType dtype) {
  return dtype.code == kDLFloat || dtype.code == kDLBfloat || dtype.code >= kDLFloat8_e4m3fn;
}

// Parses dtype names in torch's spelling ("float32"); false with ValueError set for an unknown name.
bool ParseDType(PyObject* name, DLDataType* dtype);
std::string DTypeName(DLDataType dtype);
std::string ShapeText(const int64_t* shape, int32_t rank);
// The name in torch's spelling: "cpu", "cuda:0".
std::string DeviceName(DLDevice device);

}  // namespace torch2ort
