// One call of a Function's backward.
#include <algorithm>
#include <new>

#include "call/function_call.h"
#include "call/run_state.h"

namespace torch2ort {

class BackwardCall {
 public:
  BackwardCall(Site* site, Loans& loans, std::vector<Managed>* outputs, std::vector<Ref>* storages,
               Passing* passing)
      : site_(site),
        loans_(loans),
        outputs_(outputs),
        storages_(storages),
        passing_(passing),
        passed_(passing != nullptr && passing->tensor),
        inputs_(*site->inputs),
        tensors_(site->returned),
        access_(site->returned),
        spans_(site->returned),
        written_(site->returned),
        missing_(site->returned),
        exports_(site->returned),
        args_(static_cast<size_t>(PyTuple_Size(site->outputs)) + 1) {}

  bool Run() {
    if (!Receive()) return false;
    if (skipped_) return ReturnNothing() && Settle();
    return Call() && LearnWrites() && CheckCount() && CheckKinds() && Return() && Settle();
  }

 private:
  Context* context() { return reinterpret_cast<Context*>(context_.get()); }
  TensorMeta InputMeta(size_t i) { return context()->tensors.Get(i); }
  TensorMeta OutputMeta(size_t i) { return context()->tensors.Get(inputs_.size() + i); }
  bool arrived(size_t i) {
    return !missing_[i] && (passed_ || loans_[i] != nullptr) && (*site_->tensor_outputs)[i].differentiable;
  }
  // True if other sites of the chain run before the caller takes the gradients.
  bool Continues() const { return passing_ != nullptr && passing_->argument >= 0; }
  bool Linked(size_t i) const { return passing_ != nullptr && static_cast<int>(i) == passing_->argument; }

  bool Receive();
  bool LearnArrivals();
  bool ReceiveGradient(size_t i);
  bool ReceiveLoan(size_t i);
  bool ReceivePassed(size_t i);
  bool CheckShape(size_t i, const DLTensor& gradient);
  bool Call();
  bool LearnWrites();
  bool CheckCount();
  bool CheckKinds();
  PyObject* Item(Py_ssize_t argument) const;
  bool Return();
  bool ReturnNothing();
  bool ReturnGradient(size_t i, PyObject* value);
  bool PassOn(size_t i, Ref gradient, const DLTensor& view, Held held);
  Held WhoHoldsGradient(PyObject* value, const Ref& gradient);
  bool ReturnZeros(size_t i);
  bool Conform(size_t i, Ref* gradient, DLTensor* view);
  bool Convert(PyObject* target, Ref* gradient, DLTensor* view);
  bool View(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view);
  bool RaiseDevice(size_t i, const TensorMeta& expected, const char* found);
  bool Reduce(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view);
  bool Disentangle(size_t i, PyObject* gradient, Held held, Managed* managed);
  bool WarnOnce(size_t i, size_t j);
  bool HeldByContext(const Span& span);
  bool Settle();

  Site* site_;
  Loans& loans_;
  std::vector<Managed>* outputs_;
  std::vector<Ref>* storages_;  // one per output
  Passing* passing_;            // null for a site that is not in a chain
  bool passed_;                 // the gradient of the only output comes from the next site of the chain
  std::vector<InputSpec>& inputs_;
  SmallArray<Ref, 8> tensors_;      // gradients as backward gets them
  SmallArray<Access, 8> access_;    // of this call: another thread's call may change the site's
  SmallArray<Span, 8> spans_;       // per call: another thread's call may change the site's
  long passed_version_ = 0;         // of the gradient that the next site passed
  Span passed_span_;                // memory of the gradient that is passed to the site before
  SmallArray<bool, 8> written_;     // backward wrote to the copy that it was probed with
  SmallArray<bool, 8> missing_;     // the runtime's zeros represent an undefined gradient
  bool skipped_ = false;            // autograd would not run this backward
  SmallArray<int, 8> exports_;      // gradients that are declared to share an output gradient's memory
  SmallArray<PyObject*, 12> args_;  // ctx and one gradient per value of forward; borrowed
  Ref context_;
  Ref result_;
};

bool BackwardCall::Receive() {
  if (loans_.size() != site_->tensor_outputs->size()) {
    PyErr_Format(config.error_type,
                 "%U: backward was given %zu gradients, but its site has %zu tensor outputs", site_->name,
                 loans_.size(), site_->tensor_outputs->size());
    return false;
  }
  context_ = TakeContext(site_);
  if (!context_ || !LearnArrivals()) return false;
  if (skipped_) return true;
  args_[0] = context_.get();
  for (size_t i = 1; i < args_.size(); ++i) args_[i] = Py_None;
  for (size_t i = 0; i < site_->returned; ++i) {
    if (!ReceiveGradient(i)) return false;
    args_[static_cast<size_t>((*site_->tensor_outputs)[i].position) + 1] = tensors_[i].get();
  }
  return true;
}

bool BackwardCall::LearnArrivals() {
  Ref arrivals = ArrivalsAt(site_);
  if (!arrivals || arrivals.get() == Py_None) return static_cast<bool>(arrivals);
  if (!PyTuple_Check(arrivals.get())) {
    PyErr_Format(PyExc_TypeError, "arrivals gave a %.200s, not a tuple", TypeName(arrivals.get()).c_str());
    return false;
  }
  auto count = static_cast<size_t>(PyTuple_Size(arrivals.get()));
  skipped_ = count == 0;
  for (size_t i = 0; i < site_->returned; ++i) {
    missing_[i] = i >= count || PyTuple_GetItem(arrivals.get(), static_cast<Py_ssize_t>(i)) == Py_False;
  }
  return true;
}

bool BackwardCall::ReceiveGradient(size_t i) {
  const OutputSpec& output = (*site_->tensor_outputs)[i];
  Context* context = this->context();
  // A gradient of a non-differentiable output is ignored, as in eager PyTorch.
  if (arrived(i)) return passed_ ? ReceivePassed(i) : ReceiveLoan(i);
  if (!context->materialize_grads) {
    tensors_[i] = Ref::Share(Py_None);
  } else {
    TensorMeta meta = OutputMeta(i);
    tensors_[i] = Zeros(meta.shape, meta.rank, output.dtype, meta.device);
  }
  return static_cast<bool>(tensors_[i]);
}

bool BackwardCall::ReceivePassed(size_t i) {
  DLTensor view = passing_->tensor_view.value_or(DLTensor{});
  if (!passing_->tensor_view &&
      config.exchange->dltensor_from_py_object_no_sync(passing_->tensor.get(), &view) != 0)
    return false;
  if (!CheckShape(i, view)) return false;
  access_[i] = (*site_->gradient_access)[i];
  tensors_[i] = ReceiveTensor(site_, std::move(passing_->tensor), view, access_[i], &spans_[i]);
  if (!tensors_[i]) return false;
  passed_version_ = WritesTo(tensors_[i].get());
  return passed_version_ >= 0;
}

bool BackwardCall::ReceiveLoan(size_t i) {
  if (!CheckShape(i, loans_[i]->dl_tensor)) return false;
  access_[i] = (*site_->gradient_access)[i];
  tensors_[i] = ReceiveTensor(site_, loans_[i], access_[i], &spans_[i]);
  return static_cast<bool>(tensors_[i]);
}

bool BackwardCall::CheckShape(size_t i, const DLTensor& gradient) {
  TensorMeta output = OutputMeta(i);
  bool same =
      gradient.ndim == output.rank && std::equal(output.shape, output.shape + output.rank, gradient.shape);
  if (!same) {
    PyErr_Format(config.error_type,
                 "%U: output %zd of forward has shape %s, but a gradient of shape %s arrived for it",
                 site_->name, (*site_->tensor_outputs)[i].position,
                 ShapeText(output.shape, output.rank).c_str(),
                 ShapeText(gradient.shape, gradient.ndim).c_str());
  }
  return same;
}

bool BackwardCall::Call() {
  result_ = CallWith(site_->backward, args_.data(), args_.size());
  return static_cast<bool>(result_);
}

// Backward may write to its gradients, as in eager PyTorch; but other nodes may read the runtime's.
bool BackwardCall::LearnWrites() {
  for (size_t i = 0; i < site_->returned; ++i) {
    const OutputSpec& output = (*site_->tensor_outputs)[i];
    if (!arrived(i) || access_[i] == Access::kCopied || output.gradient_mapped) continue;
    long writes = WritesTo(tensors_[i].get());
    if (writes < 0) return false;
    writes -= passed_version_;
    if (access_[i] == Access::kShared && writes != 0) {
      PyErr_Format(config.error_type,
                   "%U: backward wrote to the gradient of output %zd, but did not in its first call: write "
                   "to a clone()",
                   site_->name, output.position);
      return false;
    }
    written_[i] = writes != 0;
  }
  return true;
}

// Ensures that memory that the Function keeps of its gradients is not the runtime's to overwrite.
bool BackwardCall::Settle() {
  SmallArray<Ref, 8> watched(site_->returned);
  SmallArray<bool, 8> lent(site_->returned);  // memory that the Function may keep
  for (size_t i = 0; i < site_->returned; ++i) {
    lent[i] = arrived(i) && !passed_ && access_[i] != Access::kCopied;
    if (lent[i] && !Watch(tensors_[i].get(), &watched[i])) return false;
  }
  // The values that forward saved are no longer needed here, even if other backwards of the run follow.
  if (!KeepsContexts()) ReleaseContext(context());
  context_.reset();
  result_.reset();
  for (Ref& tensor : tensors_) tensor.reset();
  for (size_t i = 0; i < site_->returned; ++i) {
    if (!arrived(i)) continue;
    Access& next = (*site_->gradient_access)[i];
    // Others may hold the tensor that the next site passed, but it is not the runtime's to overwrite.
    if (passed_ && access_[i] == Access::kProbed) next = written_[i] ? Access::kCopied : Access::kShared;
    if (!lent[i]) continue;
    if (!SettleTensor(site_, loans_[i], exports_[i], watched[i].get(), access_[i], &next)) return false;
    if (written_[i]) next = Access::kCopied;
  }
  return true;
}

bool RunBackward(Site* site, Loans& gradients, std::vector<Managed>* outputs, std::vector<Ref>* storages,
                 Passing* passing) {
  try {
    return BackwardCall(site, gradients, outputs, storages, passing).Run();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

namespace {

bool Overlaps(const Span& span, PyObject* object) {
  DLTensor view;
  if (!IsTensor(object)) return false;
  if (config.exchange->dltensor_from_py_object_no_sync(object, &view) == 0)
    return span.Overlaps(SpanOf(view));
  PyErr_Clear();  // a tensor without memory of its own, such as a sparse one
  return false;
}

}  // namespace

PyObject* BackwardCall::Item(Py_ssize_t argument) const {
  PyObject* result = result_.get();
  return PyTuple_Check(result) ? PyTuple_GetItem(result, argument) : result;
}

// The checks and their wording are those of torch's PyNode::apply and of torch's engine.
bool BackwardCall::CheckCount() {
  Py_ssize_t count = PyTuple_Check(result_.get()) ? PyTuple_Size(result_.get()) : 1;
  Py_ssize_t expected = PyTuple_Size(site_->arguments);
  bool fits = count >= expected;
  for (Py_ssize_t i = expected; i < count; ++i) fits &= Item(i) == Py_None;
  if (fits) return true;
  PyErr_Format(PyExc_RuntimeError,
               "function %s returned an incorrect number of gradients (expected %zd, got %zd)",
               site_->backward_name->c_str(), expected, count);
  return false;
}

bool BackwardCall::CheckKinds() {
  for (Py_ssize_t i = 0; i < PyTuple_Size(site_->arguments); ++i) {
    PyObject* gradient = Item(i);
    if (gradient == Py_None) continue;
    if ((*site_->input_index)[static_cast<size_t>(i)] < 0) {
      PyErr_Format(PyExc_RuntimeError,
                   "function %s returned a gradient different than None at position %zd, but the "
                   "corresponding forward "
                   "input was not a Variable",
                   site_->backward_name->c_str(), i + 1);
      return false;
    }
    if (!IsTensor(gradient)) {
      PyErr_Format(PyExc_RuntimeError, "expected Variable or None (got %s)", TypeName(gradient).c_str());
      return false;
    }
  }
  return true;
}

bool BackwardCall::Return() {
  outputs_->reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    PyObject* gradient = Item(inputs_[i].argument);
    if (!inputs_[i].needs_grad) {
      outputs_->push_back(nullptr);
    } else if (!(gradient == Py_None ? ReturnZeros(i) : ReturnGradient(i, gradient))) {
      return false;
    }
  }
  return true;
}

// Returns zeros, which the runtime needs as values, in the place of undefined gradients.
bool BackwardCall::ReturnNothing() {
  outputs_->reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].needs_grad) {
      outputs_->push_back(nullptr);
    } else if (!ReturnZeros(i)) {
      return false;
    }
  }
  return true;
}

bool BackwardCall::ReturnZeros(size_t i) {
  TensorMeta meta = InputMeta(i);
  Ref zeros = Zeros(meta.shape, meta.rank, inputs_[i].dtype, meta.device);
  if (!zeros || !NoteUndefined(site_, static_cast<size_t>(inputs_[i].argument))) return false;
  if (!Linked(i)) {
    outputs_->push_back(ExportTensor(zeros.get()));
    return outputs_->back() != nullptr;
  }
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(zeros.get(), &view) != 0) return false;
  return PassOn(i, std::move(zeros), view, Held::kAlone);
}

bool BackwardCall::ReturnGradient(size_t i, PyObject* value) {
  Ref gradient = Ref::Share(value);
  DLTensor view;
  if (!Conform(i, &gradient, &view)) return false;
  Held held = Continues() ? WhoHoldsGradient(value, gradient) : Held::kByKnown;
  if (held == Held::kUnknown) return false;
  if (Linked(i)) return PassOn(i, std::move(gradient), view, held);
  Managed managed = ExportContiguous(gradient.get());
  const void* exported = managed.get();
  if (!managed || !Disentangle(i, gradient.get(), held, &managed)) return false;
  storages_->resize(outputs_->size() + 1);
  bool unchanged = managed.get() == exported;  // neither copied nor an incoming gradient's memory
  if (unchanged && !GiveAlias(gradient.get(), &managed, &storages_->back())) return false;
  outputs_->push_back(std::move(managed));
  return true;
}

// Finds out if a closure, class or module also holds the gradient, in order to reuse its memory. PyTorch's
// kernels do not.
Held BackwardCall::WhoHoldsGradient(PyObject* value, const Ref& gradient) {
  if (site_->trusted) return Held::kByKnown;
  Holders known;
  known.references = 1;
  if (value == gradient.get()) {
    for (Py_ssize_t j = 0; j < (PyTuple_Check(result_.get()) ? PyTuple_Size(result_.get()) : 1); ++j) {
      known.references += Item(j) == value;
    }
  }
  Held held = WhoHolds(gradient.get(), known);
  // The same tensor may be the gradient of several arguments.
  return held == Held::kAlone && known.references > 2 ? Held::kByKnown : held;
}

// Passes the gradient to the site before unchanged, unless others hold it or its memory is that of another
// one.
bool BackwardCall::PassOn(size_t i, Ref gradient, const DLTensor& view, Held held) {
  passed_span_ = SpanOf(view);
  if (held == Held::kAlone) {
    passing_->result_view = view;
    passing_->result = std::move(gradient);
    outputs_->push_back(nullptr);
    return true;
  }
  size_t given = 0;  // index of the incoming gradient whose memory it is, if it is one's
  while (given < site_->returned && !passed_span_.Overlaps(spans_[given])) ++given;
  bool alias = given < site_->returned;
  bool shared = held == Held::kElsewhere || alias || HeldByContext(passed_span_);
  for (const Managed& earlier : *outputs_) {
    shared |= earlier != nullptr && passed_span_.Overlaps(SpanOf(earlier->dl_tensor));
  }
  if (shared) passed_span_ = {};
  passing_->result = shared ? CopyTensor(site_, gradient.get()) : std::move(gradient);
  outputs_->push_back(nullptr);
  return passing_->result && (!alias || WarnOnce(i, given));
}

// Converts a gradient to its argument's shape, dtype and device as torch's engine does, or raises the same
// error. `view` describes the result.
bool BackwardCall::Conform(size_t i, Ref* gradient, DLTensor* view) {
  TensorMeta expected = InputMeta(i);
  if (!View(i, expected, gradient, view) || !Reduce(i, expected, gradient, view)) return false;
  DLDataType dtype = inputs_[i].dtype;
  if (view->dtype != dtype) {
    if (!IsFloating(view->dtype) && (view->dtype.code == kDLComplex) != (dtype.code == kDLComplex)) {
      PyErr_SetString(PyExc_RuntimeError,
                      "Expected isFloatingType(grad.scalar_type()) || (input_is_complex == grad_is_complex) "
                      "to be true, but got "
                      "false.  (Could this error message be improved?  If so, please report an enhancement "
                      "request to PyTorch.)");
      return false;
    }
    if (!Convert(inputs_[i].torch_dtype.get(), gradient, view)) return false;
  }
  if (view->device == expected.device) return true;
  if (view->ndim != 0) return RaiseDevice(i, expected, DeviceName(view->device).c_str());
  Ref device = Ref::Steal(PyUnicode_FromString(DeviceName(expected.device).c_str()));
  return device && Convert(device.get(), gradient, view);
}

// gradient = gradient.to(target)
bool BackwardCall::Convert(PyObject* target, Ref* gradient, DLTensor* view) {
  *gradient = CallMethod(gradient->get(), method_names.to, target);
  return *gradient && config.exchange->dltensor_from_py_object_no_sync(gradient->get(), view) == 0;
}

// Describes the gradient in `view`; a sparse one is made dense first, as it has no single piece of memory.
bool BackwardCall::View(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view) {
  if (config.exchange->dltensor_from_py_object_no_sync(gradient->get(), view) == 0) return true;
  PyErr_Clear();
  *gradient = CallMethod(gradient->get(), method_names.to_dense);
  if (!*gradient) return false;
  if (config.exchange->dltensor_from_py_object_no_sync(gradient->get(), view) == 0) return true;
  PyErr_Clear();
  Ref device = Ref::Steal(PyObject_GetAttrString(gradient->get(), "device"));
  if (device) device = Ref::Steal(PyObject_Str(device.get()));
  return device && RaiseDevice(i, expected, PyUnicode_AsUTF8AndSize(device.get(), nullptr));
}

bool BackwardCall::RaiseDevice(size_t i, const TensorMeta& expected, const char* found) {
  PyErr_Format(PyExc_RuntimeError,
               "Function %s returned an invalid gradient at index %zu - expected device %s but got %s",
               site_->backward_name->c_str(), i, DeviceName(expected.device).c_str(), found);
  return false;
}

bool BackwardCall::Reduce(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view) {
  int32_t extra = view->ndim - expected.rank;
  bool same = extra == 0;
  bool expandable = extra >= 0;
  for (int32_t d = 0; expandable && d < expected.rank; ++d) {
    bool equal = expected.shape[d] == view->shape[d + extra];
    same &= equal;
    expandable = equal || expected.shape[d] == 1;
  }
  if (!expandable) {
    PyErr_Format(PyExc_RuntimeError,
                 "Function %s returned an invalid gradient at index %zu - got %s but expected shape "
                 "compatible with %s",
                 site_->backward_name->c_str(), i, ShapeText(view->shape, view->ndim).c_str(),
                 ShapeText(expected.shape, expected.rank).c_str());
    return false;
  }
  if (same) return true;
  Ref shape = Ref::Steal(PyTuple_New(expected.rank));
  if (!shape) return false;
  for (int32_t d = 0; d < expected.rank; ++d) {
    PyTuple_SetItem(shape.get(), d, PyLong_FromLongLong(expected.shape[d]));
  }
  *gradient = CallMethod(gradient->get(), method_names.sum_to_size, shape.get());
  return *gradient && config.exchange->dltensor_from_py_object_no_sync(gradient->get(), view) == 0;
}

// Exports a gradient that shares an incoming one's memory as that memory, or as a copy; others unchanged,
// unless a site that runs before the caller takes it may write to its memory.
bool BackwardCall::Disentangle(size_t i, PyObject* gradient, Held held, Managed* managed) {
  Span span = SpanOf((*managed)->dl_tensor);
  if (span.size() == 0) {
    // Without elements it shares no byte, but it may hold a storage.
    *managed = ExportCopy(site_, gradient);
    return static_cast<bool>(*managed);
  }
  int mapped = (*site_->gradient_mapped)[i];
  // Where autograd has no gradient, the result of backward has memory of its own.
  if (mapped >= 0 && arrived(static_cast<size_t>(mapped))) {
    Loan* loan = loans_[static_cast<size_t>(mapped)];
    if (SpanOf(loan->dl_tensor).begin == span.begin) {
      DLTensor view = (*managed)->dl_tensor;
      *managed = Managed(ExportLoan(loan, view));
      ++exports_[static_cast<size_t>(mapped)];
      return true;
    }
    PyErr_Format(
        config.inplace_error_type,
        "%U: the in-place map says that the gradient of argument %zd is the memory of the gradient of output "
        "%zd, but backward returned other memory: correct the map or unregister it",
        site_->name, inputs_[i].argument, (*site_->tensor_outputs)[static_cast<size_t>(mapped)].position);
    return false;
  }
  for (size_t j = 0; j < site_->returned; ++j) {
    if (!span.Overlaps(spans_[j])) continue;
    if (access_[j] == Access::kShared && !passed_) {
      DLTensor view = (*managed)->dl_tensor;
      *managed = Managed(ExportLoan(loans_[j], view));
      ++exports_[j];
      site_->copied_bytes += span.size();  // the consumer of the gradient makes the copy
    } else {
      *managed = ExportCopy(site_, gradient);
    }
    return *managed && WarnOnce(i, j);
  }
  if (!Continues() || held == Held::kAlone) return true;
  bool shared = (held == Held::kElsewhere && IsOver(gradient, (*managed)->dl_tensor)) ||
                HeldByContext(span) || span.Overlaps(passed_span_);
  if (shared) *managed = ExportCopy(site_, gradient);
  return static_cast<bool>(*managed);
}

bool BackwardCall::WarnOnce(size_t i, size_t j) {
  if ((*site_->gradient_warned)[i]) return true;
  (*site_->gradient_warned)[i] = 1;
  return WarnAlias(site_, "backward", inputs_[i].argument, (*site_->tensor_outputs)[j].position);
}

// The consumer of a gradient may accumulate into it, which must not change values that forward saved.
bool BackwardCall::HeldByContext(const Span& span) {
  Context* context = this->context();
  bool held = context->tensors.Overlaps(span, inputs_.size());
  for (Py_ssize_t i = 0; !held && context->saved != nullptr && i < PyTuple_Size(context->saved); ++i) {
    held = Overlaps(span, PyTuple_GetItem(context->saved, i));
  }
  PyObject *name, *value;
  Py_ssize_t cursor = 0;
  while (!held && context->attributes != nullptr &&
         PyDict_Next(context->attributes, &cursor, &name, &value)) {
    held = Overlaps(span, value);
  }
  return held;
}

}  // namespace torch2ort
