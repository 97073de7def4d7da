// The call policy: runs a Function's forward and backward on lent memory as eager PyTorch would, and is
// responsible for all tensors that pass between the Function and the runtime. It is independent of a
// runtime's capsules and values.
#pragma once

#include <optional>
#include <vector>

#include "call/context.h"
#include "call/site.h"
#include "tensors/exchange.h"

namespace torch2ort {

// Owned loans, one per tensor; null where there is no tensor.
class Loans {
 public:
  explicit Loans(size_t size) : loans_(size) {}
  ~Loans() {
    for (Loan* loan : loans_) {
      if (loan != nullptr) loan->Drop();
    }
  }
  Loan*& operator[](size_t i) { return loans_[i]; }
  size_t size() const { return loans_.size(); }

 private:
  SmallArray<Loan*, 8> loans_;
};

// For outputs of this size on, it is worth finding out who holds them.
constexpr int64_t kLargeOutputBytes = 1 << 16;

// The tensor that two sites of a chain pass to each other: torch's own, which the runtime never sees.
struct Passing {
  int argument = -1;      // index of the site's tensor argument that links it to the site before, or -1
  bool has_next = false;  // the site's only output is passed to another site
  Ref tensor;             // that argument, or the gradient of that output, until the site takes it
  Ref result;             // that output, or the gradient of that argument
  // Their descriptions, where these are known already and no other reference can change them.
  std::optional<DLTensor> tensor_view, result_view;

  // The result of one site becomes the input of the next one.
  void Advance() {
    tensor = std::move(result);
    tensor_view = std::exchange(result_view, std::nullopt);
  }
};

// Runs forward; returns one output per Site::tensor_outputs, which the caller copies: they may share memory
// with arguments and with each other. `storages` gets one entry per output: torch's storage, if the caller
// may omit the copy once the storage has no other holder. Otherwise the entry is empty: the output has less
// than kLargeOutputBytes, or shares an argument's memory. For a site of a chain, loans, outputs and gradients
// that `passing` contains are null. False with an exception set on failure.
bool RunForward(Site* site, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages,
                Passing* passing = nullptr);

// Runs backward; expects one gradient per tensor output of forward (null: none) and returns one per tensor
// argument, null for those that need none. The caller copies them: they may share memory with the incoming
// gradients, with values that forward saved, and with each other. `storages`: as for forward; it may have
// fewer entries. False with an exception set on failure.
bool RunBackward(Site* site, Loans& gradients, std::vector<Managed>* outputs, std::vector<Ref>* storages,
                 Passing* passing = nullptr);

// ---- shared by the two directions ----

bool InitPolicy();

// Interned names of the tensor methods that the policy calls.
struct MethodNames {
  PyObject *clone, *detach, *contiguous, *requires_grad, *untyped_storage, *set, *sum_to_size, *to, *to_dense,
      *resolve_neg, *version, *resizable, *storage_address;
};
extern MethodNames method_names;

inline Ref CallMethod(PyObject* self, PyObject* name) {
  return Ref::Steal(PyObject_CallMethodObjArgs(self, name, nullptr));
}
inline Ref CallMethod(PyObject* self, PyObject* name, PyObject* argument) {
  return Ref::Steal(PyObject_CallMethodObjArgs(self, name, argument, nullptr));
}

// The tensor, or a contiguous tensor of equal values without lazy bits; empty with an exception set on
// failure.
Ref Contiguous(PyObject* tensor, const DLTensor& view);
// The tensor as a contiguous exchange struct; null with an exception set on failure.
Managed ExportContiguous(PyObject* tensor);
// Raises the configured error with the formatted message, and the pending exception as its cause.
void RaiseFromPending(const char* format, ...);
// A private copy, whose bytes are counted on the site.
Managed ExportCopy(Site* site, PyObject* tensor);
Ref CopyTensor(Site* site, PyObject* tensor);

// The number of writes to the tensor or its views since it was made; 0 in inference mode, where torch does
// not count; -1 with an exception set on failure.
long WritesTo(PyObject* tensor);

// A weak handle on the storage behind a tensor, which does not keep the storage alive.
Ref WatchStorage(PyObject* tensor);
// The same, or nothing for a tensor that has no holder but its caller, whose storage ends with it. False with
// an exception set on failure.
bool Watch(PyObject* tensor, Ref* watched);
// The tensor that the Function gets. `span`: its memory if an output must not share it, else left empty.
Ref ReceiveTensor(Site* site, Ref tensor, const DLTensor& view, Access access, Span* span);
Ref ReceiveTensor(Site* site, Loan* loan, Access access, Span* span);
// Call it after the policy has dropped the tensor: determines if the Function keeps it, and moves kept memory
// of the runtime's to a private copy, for every view of it. `watched`: the result of Watch(). `access`: how
// the Function got it; `next`: how it will get it. `exports`: outputs that share the loan's memory.
bool SettleTensor(Site* site, Loan* loan, int exports, PyObject* watched, Access access, Access* next);

// The known holders of a tensor that a Function returned.
struct Holders {
  Py_ssize_t references = 0;       // to the tensor object
  std::vector<PyObject*> tensors;  // others over its storage; borrowed
};
// The holders of the memory of a tensor that a Function returned.
enum class Held {
  kUnknown,    // an exception is set
  kAlone,      // the tensor: torch allocated the memory, and no other tensor shares it
  kByKnown,    // only the tensor and the known holders
  kElsewhere,  // possibly others, such as a closure that will write its next result into it
};
Held WhoHolds(PyObject* tensor, const Holders& known);

// Returns a large result as an alias, with its storage: the tensor itself then belongs to the Function alone,
// and the storage shows if the Function holds it. False with an exception set on failure.
bool GiveAlias(PyObject* value, Managed* managed, Ref* storage);

// True if the exported memory is the tensor's own, and no contiguous copy of it.
bool IsOver(PyObject* tensor, const DLTensor& exported);

// Warns that the in-place map `kind`={key: value} would save the copy that was just made.
bool WarnAlias(Site* site, const char* kind, Py_ssize_t key, Py_ssize_t value);

}  // namespace torch2ort
