// The call policy: runs a Function's forward and backward on lent memory as eager PyTorch would, and answers
// for what crosses between the Function and the runtime. Knows nothing of any runtime's capsules or values.
#pragma once

#include <optional>
#include <vector>

#include "call/context.h"
#include "call/site.h"
#include "tensors/exchange.h"

namespace torch2ort {

// Owned loans, one a tensor; null where there is no tensor.
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

// Outputs from here on are worth more than a look at who holds them.
constexpr int64_t kLargeOutputBytes = 1 << 16;

// What two sites of a chain pass to each other: torch's own tensor, which the runtime never sees.
struct Passing {
  int argument = -1;      // index of the site's tensor argument that links it to the site before, or -1
  bool has_next = false;  // the site's only output goes to another site
  Ref tensor;             // that argument, or the gradient of that output, until the site takes it
  Ref result;             // that output, or the gradient of that argument
  // What they look like, where somebody looked already and nobody else can reach them.
  std::optional<DLTensor> tensor_view, result_view;

  // What one site gave is what the next one takes.
  void Advance() {
    tensor = std::move(result);
    tensor_view = std::exchange(result_view, std::nullopt);
  }
};

// Runs forward; gives one output per Site::tensor_outputs, which the caller copies: they may share memory
// with arguments and with each other. `storages` gets one entry an output: torch's storage, if the caller may
// spare the copy once nobody else holds that. Else nothing: the output has less than kLargeOutputBytes, or is
// an argument's memory. For a site of a chain, loans, outputs and gradients are null where `passing` stands
// for them. False with an exception set on failure.
bool RunForward(Site* site, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages,
                Passing* passing = nullptr);

// Runs backward; takes one gradient per tensor output of forward (null: none) and gives one per tensor
// argument, null for those that need none. The caller copies them: they may share memory with those that it
// gave, with what forward kept, and with each other. `storages`: as for forward; it may have fewer entries.
// False with an exception set on failure.
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

// The tensor, or its contiguous equal without lazy bits; empty with an exception set on failure.
Ref Contiguous(PyObject* tensor, const DLTensor& view);
// The tensor as a contiguous exchange struct; null with an exception set on failure.
Managed ExportContiguous(PyObject* tensor);
// Raises the configured error with the message that `format` makes, the pending exception as its cause.
void RaiseFromPending(const char* format, ...);
// A private copy of it, its bytes counted on the site.
Managed ExportCopy(Site* site, PyObject* tensor);
Ref CopyTensor(Site* site, PyObject* tensor);

// How often torch wrote to the tensor or a view of it since it was made; 0 in inference mode, where torch
// does not count; -1 with an exception set on failure.
long WritesTo(PyObject* tensor);

// A weak handle on the storage behind a tensor: it outlives neither the storage nor keeps it alive.
Ref WatchStorage(PyObject* tensor);
// The same, or nothing for a tensor that is its caller's alone, whose storage goes with it. False with an
// exception set on failure.
bool Watch(PyObject* tensor, Ref* watched);
// A tensor as the Function gets it. `span`: its memory if that must not come back, else left empty.
Ref ReceiveTensor(Site* site, Ref tensor, const DLTensor& view, Access access, Span* span);
Ref ReceiveTensor(Site* site, Loan* loan, Access access, Span* span);
// After the policy has dropped the tensor: learns whether the Function keeps it, and gives what it keeps of
// the runtime's memory a private copy, behind every view of it. `watched`: what Watch() gave. `access`: how
// the Function got it; `next`: how it will. `exports`: outputs that are the loan's memory.
bool SettleTensor(Site* site, Loan* loan, int exports, PyObject* watched, Access access, Access* next);

// What is known to hold a tensor that a Function returned.
struct Holders {
  Py_ssize_t references = 0;       // to the tensor object
  std::vector<PyObject*> tensors;  // others over its storage; borrowed
};
// Who has the memory of a tensor that a Function returned.
enum class Held {
  kUnknown,    // an exception is set
  kAlone,      // the tensor: torch allocated it, and no other tensor is over it
  kByKnown,    // besides none but those that are known
  kElsewhere,  // somebody else may, such as a closure that will write its next result into it
};
Held WhoHolds(PyObject* tensor, const Holders& known);

// Gives a large result as an alias, beside its storage: the tensor itself is then the Function's alone, and
// the storage tells whether the Function holds on to it. False with an exception set on failure.
bool GiveAlias(PyObject* value, Managed* managed, Ref* storage);

// Whether what was exported is the tensor's own memory, and no contiguous copy of it.
bool IsOver(PyObject* tensor, const DLTensor& exported);

// Says that the in-place map `kind`={key: value} would save the copy that was just made.
bool WarnAlias(Site* site, const char* kind, Py_ssize_t key, Py_ssize_t value);

}  // namespace torch2ort
