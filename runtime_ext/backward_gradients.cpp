#include "backward_call.h"

namespace torch2ort {

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

// The checks and their wording are those of torch's PyNode::apply and of its engine.
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

bool BackwardCall::ReturnZeros(size_t i) {
  TensorMeta meta = InputMeta(i);
  Ref zeros = Zeros(meta.shape, meta.rank, inputs_[i].dtype, meta.device);
  if (!zeros || !NoteUndefined(site_, static_cast<size_t>(inputs_[i].argument))) return false;
  if (Linked(i)) return PassOn(i, std::move(zeros), false);
  outputs_->push_back(ExportTensor(zeros.get()));
  return outputs_->back() != nullptr;
}

bool BackwardCall::ReturnGradient(size_t i, PyObject* value) {
  Ref gradient = Ref::Share(value);
  if (!Conform(i, &gradient)) return false;
  int held = HeldByOthers(value, gradient);
  if (held < 0) return false;
  if (Linked(i)) return PassOn(i, std::move(gradient), held != 0);
  Managed managed = ExportContiguous(gradient.get());
  if (!managed || !Disentangle(i, gradient.get(), held != 0, &managed)) return false;
  outputs_->push_back(std::move(managed));
  return true;
}

// Whether a closure, class or module holds the gradient too, to use its memory again. PyTorch's kernels do
// not.
int BackwardCall::HeldByOthers(PyObject* value, const Ref& gradient) {
  if (site_->trusted) return 0;
  Holders known;
  known.references = 1;
  if (value == gradient.get()) {
    for (Py_ssize_t j = 0; j < (PyTuple_Check(result_.get()) ? PyTuple_Size(result_.get()) : 1); ++j) {
      known.references += Item(j) == value;
    }
  }
  return HeldElsewhere(gradient.get(), known);
}

// Gives the gradient to the site before as it is, unless others hold it or it is the memory of another.
bool BackwardCall::PassOn(size_t i, Ref gradient, bool held) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(gradient.get(), &view) != 0) return false;
  passed_span_ = SpanOf(view);
  size_t given = 0;  // whose memory it is, if that of a gradient that came
  while (given < site_->returned && !passed_span_.Overlaps(spans_[given])) ++given;
  bool alias = given < site_->returned;
  bool shared = held || alias || HeldByContext(passed_span_);
  for (const Managed& earlier : *outputs_) {
    shared |= earlier != nullptr && passed_span_.Overlaps(SpanOf(earlier->dl_tensor));
  }
  if (shared) passed_span_ = {};
  passing_->result = shared ? CopyTensor(site_, gradient.get()) : std::move(gradient);
  outputs_->push_back(nullptr);
  return passing_->result && (!alias || WarnOnce(i, given));
}

// Brings a gradient to its argument's shape, dtype and device as torch's engine does, or raises what it
// raises.
bool BackwardCall::Conform(size_t i, Ref* gradient) {
  DLTensor view;
  TensorMeta expected = InputMeta(i);
  if (!View(i, expected, gradient, &view) || !Reduce(i, expected, gradient, &view)) return false;
  DLDataType dtype = inputs_[i].dtype;
  if (view.dtype != dtype) {
    if (!IsFloating(view.dtype) && (view.dtype.code == kDLComplex) != (dtype.code == kDLComplex)) {
      PyErr_SetString(PyExc_RuntimeError,
                      "Expected isFloatingType(grad.scalar_type()) || (input_is_complex == grad_is_complex) "
                      "to be true, but got "
                      "false.  (Could this error message be improved?  If so, please report an enhancement "
                      "request to PyTorch.)");
      return false;
    }
    *gradient = CallMethod(gradient->get(), method_names.to, inputs_[i].torch_dtype.get());
  }
  if (view.device == expected.device || !*gradient) return static_cast<bool>(*gradient);
  if (view.ndim != 0) return RaiseDevice(i, expected, DeviceName(view.device).c_str());
  Ref device = Ref::Steal(PyUnicode_FromString(DeviceName(expected.device).c_str()));
  if (device) *gradient = CallMethod(gradient->get(), method_names.to, device.get());
  return device && *gradient;
}

// What the gradient looks like; a sparse one is made dense first, as it has no single piece of memory.
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

// Gives a gradient memory of its own, unless it has that or is declared to be an output gradient's memory.
bool BackwardCall::Disentangle(size_t i, PyObject* gradient, bool held, Managed* managed) {
  Span span = SpanOf((*managed)->dl_tensor);
  if (span.size() == 0) {
    // Without elements it shares no byte, but it may hold a storage.
    *managed = ExportCopy(site_, gradient);
    return static_cast<bool>(*managed);
  }
  int mapped = (*site_->gradient_mapped)[i];
  if (mapped >= 0) {
    Loan* loan = loans_[static_cast<size_t>(mapped)];
    if (loan != nullptr && SpanOf(loan->dl_tensor).begin == span.begin) {
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
    *managed = ExportCopy(site_, gradient);
    return *managed && WarnOnce(i, j);
  }
  bool shared =
      (held && IsOver(gradient, (*managed)->dl_tensor)) || HeldByContext(span) || span.Overlaps(passed_span_);
  for (const Managed& earlier : *outputs_) {
    shared |= earlier != nullptr && span.Overlaps(SpanOf(earlier->dl_tensor));
  }
  if (shared) *managed = ExportCopy(site_, gradient);
  return static_cast<bool>(*managed);
}

bool BackwardCall::WarnOnce(size_t i, size_t j) {
  if ((*site_->gradient_warned)[i]) return true;
  (*site_->gradient_warned)[i] = 1;
  return WarnAlias(site_, "backward", inputs_[i].argument, (*site_->tensor_outputs)[j].position);
}

// Who gets a gradient may accumulate into it, which must not reach what forward kept.
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
