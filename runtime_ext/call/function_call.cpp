#include "call/function_call.h"

#include <cstdarg>

#include "tensors/tensor_refcounts.h"

namespace torch2ort {

MethodNames method_names;

bool InitPolicy() {
  struct {
    PyObject** slot;
    const char* name;
  } names[] = {
      {&method_names.clone, "clone"},
      {&method_names.contiguous, "contiguous"},
      {&method_names.detach, "detach"},
      {&method_names.requires_grad, "requires_grad"},
      {&method_names.untyped_storage, "untyped_storage"},
      {&method_names.set, "set_"},
      {&method_names.sum_to_size, "sum_to_size"},
      {&method_names.to, "to"},
      {&method_names.to_dense, "to_dense"},
      {&method_names.resolve_neg, "resolve_neg"},
      {&method_names.version, "_version"},
      {&method_names.resizable, "resizable"},
      {&method_names.storage_address, "_cdata"},
  };
  for (auto& entry : names) {
    *entry.slot = PyUnicode_InternFromString(entry.name);
    if (*entry.slot == nullptr) return false;
  }
  return true;
}

Ref Contiguous(PyObject* tensor, const DLTensor& view) {
  // A lazily negated tensor (the imaginary part of a conjugate) is every second element of a complex one, so
  // it is contiguous only if it has a single element.
  bool contiguous = IsContiguous(view);
  // torch allocates no memory for some zeros, such as the derivative of `sgn`.
  if (view.data == nullptr && ElementCount(view) != 0) return CallMethod(tensor, method_names.clone);
  if (contiguous && ElementCount(view) != 1) return Ref::Share(tensor);
  return CallMethod(tensor, contiguous ? method_names.resolve_neg : method_names.contiguous);
}

Managed ExportContiguous(PyObject* tensor) {
  Managed managed = ExportTensor(tensor);
  if (!managed) return nullptr;
  Ref plain = Contiguous(tensor, managed->dl_tensor);
  if (!plain) return nullptr;
  return plain.get() == tensor ? std::move(managed) : ExportTensor(plain.get());
}

long WritesTo(PyObject* tensor) {
  // A subclass may return something else.
  long counted = Py_TYPE(tensor) == config.tensor_type ? CountedWrites(tensor) : -1;
  if (counted >= 0) return counted;
  Ref version = Ref::Steal(PyObject_GetAttr(tensor, method_names.version));
  if (version) return PyLong_AsLong(version.get());
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
  PyErr_Clear();
  return 0;
}

void RaiseFromPending(const char* format, ...) {
  Ref cause = Ref::Steal(TakeRaised());
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(config.error_type, format, arguments);
  va_end(arguments);
  Ref error = Ref::Steal(TakeRaised());
  if (!error) return;
  PyException_SetCause(error.get(), Ref::Share(cause.get()).release());
  PyException_SetContext(error.get(), cause.release());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
}

Ref CopyTensor(Site* site, PyObject* tensor) {
  Ref copy = CallMethod(tensor, method_names.clone);
  DLTensor view;
  if (!copy || config.exchange->dltensor_from_py_object_no_sync(copy.get(), &view) != 0) return {};
  site->copied_bytes += SpanOf(view).size();
  return copy;
}

Managed ExportCopy(Site* site, PyObject* tensor) {
  Ref copy = CopyTensor(site, tensor);
  return copy ? ExportContiguous(copy.get()) : nullptr;
}

Ref WatchStorage(PyObject* tensor) {
  Ref storage = CallMethod(tensor, method_names.untyped_storage);
  return storage ? Ref::Steal(PyWeakref_NewRef(storage.get(), nullptr)) : Ref();
}

bool Watch(PyObject* tensor, Ref* watched) {
  if (Py_REFCNT(tensor) == 1 && StorageHolders(tensor) == 1) return true;
  *watched = WatchStorage(tensor);
  return static_cast<bool>(*watched);
}

Ref ReceiveTensor(Site* site, Ref tensor, const DLTensor& view, Access access, Span* span) {
  if (access == Access::kShared) {
    *span = SpanOf(view);
    return tensor;
  }
  Ref copy = CopyTensor(site, tensor.get());
  DLTensor view_of_copy;
  if (!copy || access == Access::kCopied) return copy;
  if (config.exchange->dltensor_from_py_object_no_sync(copy.get(), &view_of_copy) != 0) return {};
  *span = SpanOf(view_of_copy);
  return copy;
}

Ref ReceiveTensor(Site* site, Loan* loan, Access access, Span* span) {
  Ref tensor = Ref::Steal(ImportLoan(loan));
  return tensor ? ReceiveTensor(site, std::move(tensor), loan->dl_tensor, access, span) : Ref();
}

namespace {

// Moves a storage that the Function still holds to memory of its own. A bare address of it, such as a numpy
// array's, is not updated: for this reason a site's first call works on copies.
bool Privatize(Site* site, Loan* loan, int others, PyObject* watched) {
  int64_t bytes = SpanOf(loan->dl_tensor).size();
  bool reachable = watched != nullptr && loan->dl_tensor.device.device_type == kDLCPU;
  Ref storage = reachable ? Dereference(watched) : Ref();
  if (storage) {
    Ref handle = Ref::Steal(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(config.tensor_type)));
    if (!handle || !CallMethod(handle.get(), method_names.set, storage.get())) return false;
    if (!Ref::Steal(CallOne(config.privatize, handle.get()))) return false;
    site->copied_bytes += bytes;
  }
  if (loan->holder_count() == others) return true;
  PyErr_Format(
      config.error_type,
      "%U began to keep memory of ONNX Runtime after its first call, and it could not be given memory of its "
      "own: save a clone() of the tensor instead",
      site->name);
  return false;
}

}  // namespace

bool SettleTensor(Site* site, Loan* loan, int exports, PyObject* watched, Access access, Access* next) {
  if (access == Access::kProbed) {
    *next = watched != nullptr && Dereference(watched) ? Access::kCopied : Access::kShared;
    return true;
  }
  int others = 1 + exports;
  if (loan->holder_count() == others) return true;
  // With a copy from the start, the next calls avoid the expensive exchange.
  if (exports == 0) *next = Access::kCopied;
  return loan->lasting || Privatize(site, loan, others, watched);
}

namespace {

// References to a handle on a storage that has no other handle; torch itself may hold one. -1 with an
// exception set.
Py_ssize_t ReferencesToNewHandle() {
  static Py_ssize_t known = -1;
  if (known >= 0) return known;
  Ref tensor = Ref::Steal(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(config.tensor_type)));
  Ref handle = tensor ? CallMethod(tensor.get(), method_names.untyped_storage) : Ref();
  if (handle) known = Py_REFCNT(handle.get());
  return known;
}

// The number of holders of the storage behind a tensor; -1 if torch does not count them all: memory that
// torch did not allocate has holders unknown to it. -2 with an exception set on failure.
long HoldersOfStorage(PyObject* tensor) {
  Ref storage = CallMethod(tensor, method_names.untyped_storage);
  Ref resizable = storage ? CallMethod(storage.get(), method_names.resizable) : Ref();
  if (!resizable) return -2;
  if (resizable.get() != Py_True || config.use_count == Py_None) return -1;
  Ref address = Ref::Steal(PyObject_GetAttr(storage.get(), method_names.storage_address));
  Ref count = address ? Ref::Steal(CallOne(config.use_count, address.get())) : Ref();
  long holders = count ? PyLong_AsLong(count.get()) : -1;
  if (holders == -1 && PyErr_Occurred()) return -2;
  // The handle that is used here is one holder. Torch returns the same handle to all callers.
  Py_ssize_t alone = ReferencesToNewHandle();
  return alone < 0 ? -2 : holders - 1 + static_cast<long>(Py_REFCNT(storage.get()) > alone);
}

}  // namespace

Held WhoHolds(PyObject* tensor, const Holders& known) {
  if (Py_REFCNT(tensor) > known.references) return Held::kElsewhere;
  long expected = 1 + static_cast<long>(known.tensors.size());
  if (TensorHolders(tensor) > expected) return Held::kElsewhere;
  long holders = HoldersOfOwnMemory(tensor);
  if (holders == expected) return expected == 1 ? Held::kAlone : Held::kByKnown;
  // A handle on the storage that was made once is counted, even if it has no other reference now.
  if (holders < 0 || holders > expected) holders = HoldersOfStorage(tensor);
  if (holders < 0) return holders == -1 ? Held::kElsewhere : Held::kUnknown;
  if (holders <= expected) return Held::kByKnown;
  if (holders > expected + 1) return Held::kElsewhere;
  // A view holds its base, which may have no other holder.
  Ref answer = Ref::Steal(CallOne(config.is_base_held, tensor));
  int held = answer ? PyObject_IsTrue(answer.get()) : -1;
  return held < 0 ? Held::kUnknown : held > 0 ? Held::kElsewhere : Held::kByKnown;
}

bool GiveAlias(PyObject* value, Managed* managed, Ref* storage) {
  if (SpanOf((*managed)->dl_tensor).size() < kLargeOutputBytes) return true;
  Ref alias = CallMethod(value, method_names.detach);
  Managed other = alias ? ExportTensor(alias.get()) : nullptr;
  if (!other) return false;
  // A contiguous copy of the value differs from the contents of its storage.
  if (other->dl_tensor.data != (*managed)->dl_tensor.data || !IsContiguous(other->dl_tensor)) return true;
  *managed = std::move(other);
  *storage = CallMethod(value, method_names.untyped_storage);
  return static_cast<bool>(*storage);
}

bool IsOver(PyObject* tensor, const DLTensor& exported) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) == 0)
    return SpanOf(view).begin == SpanOf(exported).begin;
  PyErr_Clear();
  return true;
}

bool WarnAlias(Site* site, const char* kind, Py_ssize_t key, Py_ssize_t value) {
  if (site->trusted) return true;
  return static_cast<bool>(
      Ref::Steal(PyObject_CallFunction(config.warn_alias, "Osnn", site, kind, key, value)));
}

}  // namespace torch2ort
