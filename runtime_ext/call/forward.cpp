// One call of a Function's forward.
#include <algorithm>
#include <cmath>
#include <new>

#include "call/function_call.h"
#include "call/run_state.h"
#include "tensors/tensor_refcounts.h"

namespace torch2ort {

class ForwardCall {
 public:
  ForwardCall(Site* site, Loans& loans, std::vector<Managed>* outputs, std::vector<Ref>* storages,
              Passing* passing)
      : site_(site),
        loans_(loans),
        outputs_(outputs),
        storages_(storages),
        passing_(passing),
        inputs_(*site->inputs),
        tensors_(inputs_.size()),
        access_(inputs_.size()),
        spans_(inputs_.size()),
        devices_(inputs_.size()),
        exports_(inputs_.size()),
        original_versions_(inputs_.size()),
        args_(static_cast<size_t>(PyTuple_Size(site->arguments)) + 1) {}

  bool Run() {
    if (Receive() && Call() && CheckWrites() && Return() && KeepOrDropContext() && Settle() && Separate())
      return true;
    Abandon();
    return false;
  }

 private:
  size_t argument_count() const { return args_.size() - 1; }
  Context* context() { return reinterpret_cast<Context*>(context_.get()); }
  PyObject** arguments() { return args_.data() + 1; }

  bool Receive();
  bool ReceiveInput(size_t i);
  bool ReceiveLoan(size_t i);
  bool ReceivePassed(size_t i);
  bool ReceiveOriginal(size_t i, PyObject* tensor);
  bool CheckDType(const InputSpec& input, DLDataType dtype);
  bool Call();
  bool CallWithSetup();
  bool CheckWrites();
  bool Return();
  bool CheckConstant(Py_ssize_t position, PyObject* value);
  bool ReturnTensor(const OutputSpec& spec, PyObject* value);
  bool RaiseForeign(const OutputSpec& spec);
  bool WarnOnce(size_t index, size_t i);
  bool WarnWritten(size_t i);
  void NoteInContext(PyObject* value, Holders* known);
  bool PassOn(const OutputSpec& spec, PyObject* value);
  bool Separate();
  bool ReturnMutated(PyObject* result);
  bool CheckTensor(const OutputSpec& spec, const DLTensor& tensor);
  // True if the argument is the caller's own tensor, with all of its attributes.
  bool Original(size_t i) const { return original_versions_[i] >= 0; }
  bool Passed(size_t i) const { return passing_ != nullptr && static_cast<int>(i) == passing_->argument; }
  size_t output_count() const { return outputs_->size() + (passing_ != nullptr && passing_->result); }
  bool Disentangle(size_t index, PyObject* value, Managed* managed);
  Held WhoHoldsOutput(PyObject* value);
  bool KeepOrDropContext();
  bool Describe(PyObject* tensor);
  bool DescribeResult();
  bool DropTensors(bool* passed_held);
  bool Settle();
  void Abandon();

  Site* site_;
  Loans& loans_;
  std::vector<Managed>* outputs_;
  std::vector<Ref>* storages_;  // one per output
  Passing* passing_;            // null for a site that is not in a chain
  std::vector<InputSpec>& inputs_;
  SmallArray<Ref, 8> tensors_;    // as forward gets them
  SmallArray<Access, 8> access_;  // per call: another thread's call may change the site's
  SmallArray<Span, 8> spans_;     // memory of the arguments that an output must not share
  SmallArray<DLDevice, 8> devices_;
  SmallArray<int, 8> exports_;             // outputs that are declared to share an input's memory
  SmallArray<long, 8> original_versions_;  // of arguments that are the caller's own tensors, else -1
  long passed_version_ = 0;                // of the tensor that the site before passed
  SmallArray<PyObject*, 12> args_;         // ctx and the arguments; borrowed
  Ref context_;
  bool in_run_ = false;  // the run holds the context
  Ref argument_tuple_;
  Ref result_;
};

bool ForwardCall::Receive() {
  if (loans_.size() != inputs_.size()) {
    PyErr_Format(config.error_type,
                 "%U: forward was given %zu tensors, but its site has %zu tensor arguments", site_->name,
                 loans_.size(), inputs_.size());
    return false;
  }
  ++site_->calls;
  for (size_t i = 0; i < argument_count(); ++i) {
    arguments()[i] = PyTuple_GetItem(site_->arguments, static_cast<Py_ssize_t>(i));
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!ReceiveInput(i)) return false;
    arguments()[inputs_[i].argument] = tensors_[i].get();
  }
  return true;
}

bool ForwardCall::ReceiveInput(size_t i) {
  original_versions_[i] = -1;
  PyObject* original = inputs_[i].original < 0 ? nullptr : OriginalAt(inputs_[i].original);
  if (original != nullptr && loans_[i] != nullptr && !Passed(i)) return ReceiveOriginal(i, original);
  if (!(Passed(i) ? ReceivePassed(i) : ReceiveLoan(i))) return false;
  return !inputs_[i].requires_grad ||
         PyObject_SetAttr(tensors_[i].get(), method_names.requires_grad, Py_True) == 0;
}

bool ForwardCall::CheckDType(const InputSpec& input, DLDataType dtype) {
  if (dtype == input.dtype) return true;
  PyErr_Format(config.error_type, "%U: tensor argument %zd was exported as %s, but a tensor of %s arrived",
               site_->name, input.argument, DTypeName(input.dtype).c_str(), DTypeName(dtype).c_str());
  return false;
}

bool ForwardCall::ReceivePassed(size_t i) {
  PyObject* tensor = passing_->tensor.get();
  DLTensor view = passing_->tensor_view.value_or(DLTensor{});
  if (!passing_->tensor_view && config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0)
    return false;
  if (!CheckDType(inputs_[i], view.dtype)) return false;
  access_[i] = Access::kShared;
  spans_[i] = SpanOf(view);
  devices_[i] = view.device;
  passed_version_ = WritesTo(tensor);
  tensors_[i] = std::move(passing_->tensor);
  return passed_version_ >= 0;
}

// The memory belongs to the caller, who keeps it: nothing is copied, and no holder has to be found.
bool ForwardCall::ReceiveOriginal(size_t i, PyObject* tensor) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) return false;
  if (!CheckDType(inputs_[i], view.dtype)) return false;
  access_[i] = Access::kShared;
  spans_[i] = SpanOf(view);
  devices_[i] = view.device;
  tensors_[i] = Ref::Share(tensor);
  original_versions_[i] = WritesTo(tensor);
  return original_versions_[i] >= 0;
}

bool ForwardCall::ReceiveLoan(size_t i) {
  const InputSpec& input = inputs_[i];
  if (loans_[i] == nullptr) {
    PyErr_Format(config.error_type, "%U: no tensor arrived for argument %zd", site_->name, input.argument);
    return false;
  }
  if (!CheckDType(input, loans_[i]->dl_tensor.dtype)) return false;
  access_[i] = input.access;
  // A copy is only needed for memory that the runtime takes back, or that the Function must not write to.
  if (loans_[i]->lasting && !input.mutated && access_[i] == Access::kCopied) access_[i] = Access::kShared;
  devices_[i] = loans_[i]->dl_tensor.device;
  tensors_[i] = ReceiveTensor(site_, loans_[i], access_[i], &spans_[i]);
  return static_cast<bool>(tensors_[i]);
}

bool ForwardCall::Call() {
  context_ = NewContext(site_->needs_input_grad);
  if (!context_) return false;
  if (site_->setup_context != nullptr) return CallWithSetup();
  args_[0] = context_.get();
  result_ = CallWith(site_->forward, args_.data(), argument_count() + 1);
  return static_cast<bool>(result_);
}

bool ForwardCall::CallWithSetup() {
  argument_tuple_ = PackTuple(arguments(), argument_count());
  if (!argument_tuple_) return false;
  result_ = Ref::Steal(PyObject_Call(site_->forward, argument_tuple_.get(), nullptr));
  if (!result_) return false;
  PyObject* args[] = {context_.get(), argument_tuple_.get(), result_.get()};
  return static_cast<bool>(CallWith(site_->setup_context, args, 3));
}

// A write that was not seen at export would wrongly change, or not change, the value for its other readers.
bool ForwardCall::CheckWrites() {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].mutated) continue;
    long writes = WritesTo(tensors_[i].get());
    if (writes < 0) return false;
    if (writes == (Passed(i) ? passed_version_ : Original(i) ? original_versions_[i] : 0)) continue;
    PyErr_Format(config.error_type,
                 "%U: forward wrote to argument %zd, but did not when it was exported: write to a clone(), "
                 "or mark the "
                 "argument with ctx.mark_dirty() whenever forward may write to it",
                 site_->name, inputs_[i].argument);
    return false;
  }
  return true;
}

bool ForwardCall::KeepOrDropContext() {
  Context* context = this->context();
  if (!FinishForward(context, site_->executable)) return false;
  PyObject* run = CurrentRun();
  if (!site_->training || run == nullptr) return true;
  context->tensors.Reserve(inputs_.size() + output_count());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!Passed(i)) {
      context->tensors.Append(loans_[i]->dl_tensor);
    } else if (!Describe(tensors_[i].get())) {
      return false;
    }
  }
  for (const Managed& output : *outputs_) context->tensors.Append(output->dl_tensor);
  if (passing_ != nullptr && passing_->result && !DescribeResult()) return false;
  in_run_ = true;
  return KeepContext(run, site_, context_.get());
}

bool ForwardCall::DescribeResult() {
  if (!passing_->result_view) return Describe(passing_->result.get());
  context()->tensors.Append(*passing_->result_view);
  return true;
}

bool ForwardCall::Describe(PyObject* tensor) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) return false;
  context()->tensors.Append(view);
  return true;
}

// Drops the arguments, and determines if the one that the site before passed still has a holder.
bool ForwardCall::DropTensors(bool* passed_held) {
  Ref watched;
  if (in_run_ && passing_ != nullptr && passing_->argument >= 0) {
    PyObject* tensor = tensors_[static_cast<size_t>(passing_->argument)].get();
    *passed_held = Py_REFCNT(tensor) > 1;
    if (!*passed_held && !Watch(tensor, &watched)) return false;
  }
  for (Ref& tensor : tensors_) tensor.reset();
  if (watched) *passed_held = static_cast<bool>(Dereference(watched.get()));
  return true;
}

// Ensures that memory that the Function keeps of its inputs is not the runtime's to overwrite.
bool ForwardCall::Settle() {
  SmallArray<Ref, 8> watched(inputs_.size());
  SmallArray<bool, 8> lent(inputs_.size());  // memory that the Function may keep
  for (size_t i = 0; i < inputs_.size(); ++i) {
    lent[i] = !Passed(i) && !Original(i) && access_[i] != Access::kCopied;
    if (lent[i] && !Watch(tensors_[i].get(), &watched[i])) return false;
  }
  // From here on, only the Function and the run can hold the inputs.
  if (!in_run_) context_.reset();
  argument_tuple_.reset();
  result_.reset();
  bool passed_held = false;
  if (!DropTensors(&passed_held)) return false;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (lent[i] &&
        !SettleTensor(site_, loans_[i], exports_[i], watched[i].get(), access_[i], &inputs_[i].access))
      return false;
    if (!in_run_) continue;
    bool held = Passed(i) ? passed_held : Original(i) || loans_[i]->holder_count() != 1 + exports_[i];
    if (!held) context()->tensors.ForgetSpan(i);
  }
  return true;
}

// After a failure, the exception's frames hold the inputs, and a debugger may read them long after the
// runtime took its memory back.
void ForwardCall::Abandon() {
  PyObject* error = TakeRaised();
  SmallArray<Ref, 8> watched(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    bool borrowed =
        tensors_[i] && access_[i] == Access::kShared && !Passed(i) && !Original(i) && loans_[i]->borrowed();
    if (borrowed) watched[i] = WatchStorage(tensors_[i].get());
  }
  outputs_->clear();
  if (passing_ != nullptr) passing_->result.reset();
  storages_->clear();
  context_.reset();
  argument_tuple_.reset();
  result_.reset();
  for (Ref& tensor : tensors_) tensor.reset();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Access unchanged = access_[i];  // a tensor held by a traceback is no sign for the next call
    if (watched[i]) SettleTensor(site_, loans_[i], 0, watched[i].get(), access_[i], &unchanged);
  }
  PyErr_Clear();  // the Function's own exception matters more than a tensor that could not be moved
  if (error == nullptr) return;
  PyErr_Restore(Ref::Share(reinterpret_cast<PyObject*>(Py_TYPE(error))).release(), error,
                PyException_GetTraceback(error));
}

bool RunForward(Site* site, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages,
                Passing* passing) {
  try {
    return ForwardCall(site, inputs, outputs, storages, passing).Run();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

bool ForwardCall::Return() {
  PyObject* result = result_.get();
  Py_ssize_t expected = PyTuple_Size(site_->outputs);
  if (PyTuple_Check(result) != site_->returns_tuple) {
    PyErr_Format(config.error_type, "%U: forward was exported returning %s, but returned %.200s", site_->name,
                 site_->returns_tuple ? "a tuple" : "a single value", TypeName(result).c_str());
    return false;
  }
  Py_ssize_t count = site_->returns_tuple ? PyTuple_Size(result) : 1;
  if (count != expected) {
    PyErr_Format(config.error_type, "%U: forward was exported returning %zd values, but returned %zd",
                 site_->name, expected, count);
    return false;
  }
  outputs_->reserve(site_->tensor_outputs->size());
  for (Py_ssize_t i = 0; i < count; ++i) {
    int index = (*site_->output_index)[static_cast<size_t>(i)];
    PyObject* item = site_->returns_tuple ? PyTuple_GetItem(result, i) : result;
    bool good = index < 0 ? CheckConstant(i, item)
                          : ReturnTensor((*site_->tensor_outputs)[static_cast<size_t>(index)], item);
    if (!good) return false;
  }
  return ReturnMutated(result);
}

bool ForwardCall::CheckConstant(Py_ssize_t position, PyObject* value) {
  PyObject* exported = PyTuple_GetItem(site_->outputs, position);
  if (value == exported) return true;
  int same = Py_TYPE(value) == Py_TYPE(exported) ? PyObject_RichCompareBool(value, exported, Py_EQ) : 0;
  bool both_nan = PyFloat_CheckExact(value) && PyFloat_CheckExact(exported) &&
                  std::isnan(PyFloat_AsDouble(value)) && std::isnan(PyFloat_AsDouble(exported));
  if (both_nan) return true;
  if (same == 0) {
    PyErr_Format(
        config.error_type,
        "%U: output %zd of forward was exported as the constant %R, but forward returned %R: return what "
        "varies as a tensor",
        site_->name, position, exported, value);
  }
  return same == 1;
}

bool ForwardCall::CheckTensor(const OutputSpec& spec, const DLTensor& tensor) {
  if (tensor.dtype != spec.dtype || tensor.ndim != spec.rank) {
    PyErr_Format(config.error_type,
                 "%U: output %zd of forward was exported as a tensor of %s with %d dimensions, but forward "
                 "returned one "
                 "of %s with %d dimensions",
                 site_->name, spec.position, DTypeName(spec.dtype).c_str(), spec.rank,
                 DTypeName(tensor.dtype).c_str(), tensor.ndim);
    return false;
  }
  bool foreign = !inputs_.empty();
  for (size_t i = 0; i < inputs_.size(); ++i) foreign &= tensor.device != devices_[i];
  if (!foreign) return true;
  PyErr_Format(config.error_type,
               "%U: output %zd of forward is on %s, but its first tensor argument is on %s", site_->name,
               spec.position, DeviceName(tensor.device).c_str(), DeviceName(devices_[0]).c_str());
  return false;
}

bool ForwardCall::ReturnTensor(const OutputSpec& spec, PyObject* value) {
  if (!IsTensor(value)) {
    PyErr_Format(config.error_type,
                 "%U: output %zd of forward was exported as a tensor, but forward returned %.200s",
                 site_->name, spec.position, TypeName(value).c_str());
    return false;
  }
  if (passing_ != nullptr && passing_->has_next) return PassOn(spec, value);
  Managed managed = ExportContiguous(value);
  if (!managed) return RaiseForeign(spec);
  if (!CheckTensor(spec, managed->dl_tensor)) return false;
  const void* exported = managed.get();
  if (!Disentangle(outputs_->size(), value, &managed)) return false;
  storages_->emplace_back();
  bool unchanged = managed.get() == exported;  // neither copied nor an argument's memory
  if (unchanged && !GiveAlias(value, &managed, &storages_->back())) return false;
  outputs_->push_back(std::move(managed));
  return true;
}

bool ForwardCall::RaiseForeign(const OutputSpec& spec) {
  RaiseFromPending("%U: output %zd of forward is a tensor that cannot be handed to ONNX Runtime", site_->name,
                   spec.position);
  return false;
}

// Passes the output to the next site unchanged, unless others hold it or its memory is an argument's. It is
// made contiguous, as every value of the graph is: an export drops a contiguous() between two calls.
bool ForwardCall::PassOn(const OutputSpec& spec, PyObject* value) {
  Held held = WhoHoldsOutput(value);
  if (held == Held::kUnknown) return false;
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(value, &view) != 0) return RaiseForeign(spec);
  if (!CheckTensor(spec, view)) return false;
  Span span = SpanOf(view);
  for (size_t i = 0; held != Held::kAlone && i < inputs_.size(); ++i) {
    if (Passed(i) || !span.Overlaps(spans_[i])) continue;
    Ref copy = CopyTensor(site_, value);
    if (copy) passing_->result = Contiguous(copy.get(), view);
    return passing_->result && WarnOnce(0, i);
  }
  // Without elements it shares no byte, but it may hold an argument's storage.
  Ref own = held == Held::kElsewhere || span.size() == 0 ? CopyTensor(site_, value) : Ref::Share(value);
  if (own) passing_->result = Contiguous(own.get(), view);
  if (passing_->result.get() == value) passing_->result_view = view;
  return static_cast<bool>(passing_->result);
}

// Gives the next site a plain tensor, so changes of it do not show in a tensor that this Function holds.
bool ForwardCall::Separate() {
  if (passing_ == nullptr || !passing_->has_next) return true;
  PyObject* tensor = passing_->result.get();
  Ref recorded = Ref::Steal(PyObject_GetAttr(tensor, method_names.requires_grad));
  if (!recorded) return false;
  bool plain = Py_TYPE(tensor) == config.tensor_type && recorded.get() == Py_False;
  if (plain && Py_REFCNT(tensor) == 1) return true;
  Managed alias = ExportTensor(tensor);
  if (!alias) return RaiseForeign((*site_->tensor_outputs)[0]);
  passing_->result = ImportManaged(std::move(alias));
  passing_->result_view.reset();
  return static_cast<bool>(passing_->result);
}

// Warns that the copy for an argument that forward writes to and returns could be saved.
bool ForwardCall::WarnWritten(size_t i) {
  PyObject* result = result_.get();
  for (size_t index = 0; index < site_->returned && access_[i] == Access::kCopied; ++index) {
    Py_ssize_t position = (*site_->tensor_outputs)[index].position;
    PyObject* item = site_->returns_tuple ? PyTuple_GetItem(result, position) : result;
    if (item == tensors_[i].get()) return WarnOnce(index, i);
  }
  return true;
}

bool ForwardCall::WarnOnce(size_t index, size_t i) {
  OutputSpec& spec = (*site_->tensor_outputs)[index];
  if (spec.warned || index >= site_->returned) return true;
  spec.warned = true;
  return WarnAlias(site_, "forward", spec.position, inputs_[i].argument);
}

// Finds out if the next site's input has other holders than the context that may reuse its memory, such as a
// workspace. A tensor that the context holds is not written to.
Held ForwardCall::WhoHoldsOutput(PyObject* value) {
  // PyTorch's kernels keep no references. Only in a run may the next site save the tensor for its backward.
  if (site_->trusted || CurrentRun() == nullptr) return Held::kByKnown;
  Holders known;
  PyObject* result = result_.get();
  Py_ssize_t returned = site_->returns_tuple ? PyTuple_Size(result) : 1;
  for (Py_ssize_t i = 0; i < returned; ++i) {
    known.references += (site_->returns_tuple ? PyTuple_GetItem(result, i) : result) == value;
  }
  NoteInContext(value, &known);
  return WhoHolds(value, known);
}

namespace {

// True if two tensors share a storage; by their addresses where the storage cannot be determined.
bool SharesMemory(PyObject* a, PyObject* b) {
  int same = ShareStorage(a, b);
  if (same >= 0) return same != 0;
  DLTensor first, second;
  if (config.exchange->dltensor_from_py_object_no_sync(a, &first) == 0 &&
      config.exchange->dltensor_from_py_object_no_sync(b, &second) == 0) {
    return SpanOf(first).Overlaps(SpanOf(second));
  }
  PyErr_Clear();  // a tensor without memory of its own, such as a sparse one
  return false;
}

}  // namespace

// Adds the context's references to a tensor, and the context's other tensors over its storage.
void ForwardCall::NoteInContext(PyObject* value, Holders* known) {
  Context* context = this->context();
  auto note = [&](PyObject* held) {
    if (held == value) {
      ++known->references;
    } else if (IsTensor(held) && SharesMemory(held, value)) {
      bool noted = std::find(known->tensors.begin(), known->tensors.end(), held) != known->tensors.end();
      if (!noted) known->tensors.push_back(held);
    }
  };
  for (PyObject* tuple :
       {context->to_save, context->saved_for_forward, context->dirty_tensors, context->non_differentiable}) {
    if (tuple == nullptr || !PyTuple_Check(tuple)) continue;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) note(PyTuple_GetItem(tuple, i));
  }
  PyObject *name, *held;
  Py_ssize_t cursor = 0;
  while (context->attributes != nullptr && PyDict_Next(context->attributes, &cursor, &name, &held))
    note(held);
}

// Exports an output that shares an input's memory as that memory, if declared, or as a copy; others
// unchanged.
bool ForwardCall::Disentangle(size_t index, PyObject* value, Managed* managed) {
  OutputSpec& spec = (*site_->tensor_outputs)[index];
  Span span = SpanOf((*managed)->dl_tensor);
  if (span.size() == 0) {
    // Without elements it shares no byte, but it may hold an argument's storage.
    *managed = ExportCopy(site_, value);
    return static_cast<bool>(*managed);
  }
  if (spec.mapped_input >= 0) {
    Loan* loan = loans_[static_cast<size_t>(spec.mapped_input)];
    if (SpanOf(loan->dl_tensor).begin != span.begin) {
      PyErr_Format(
          config.inplace_error_type,
          "%U: the in-place map says that output %zd of forward is the memory of argument %zd, but forward "
          "returned other memory: correct the map or unregister it",
          site_->name, spec.position, inputs_[static_cast<size_t>(spec.mapped_input)].argument);
      return false;
    }
    DLTensor view = (*managed)->dl_tensor;
    *managed = Managed(ExportLoan(loan, view));
    ++exports_[static_cast<size_t>(spec.mapped_input)];
    return true;
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!span.Overlaps(spans_[i])) continue;
    if (Passed(i)) return true;  // torch's memory, which the output holds
    if (access_[i] == Access::kShared) {
      DLTensor view = (*managed)->dl_tensor;
      *managed = Managed(ExportLoan(loans_[i], view));
      ++exports_[i];
      site_->copied_bytes += span.size();  // the consumer of the output makes the copy
    } else {
      *managed = ExportCopy(site_, value);
    }
    if (!*managed) return false;
    return WarnOnce(index, i);
  }
  return true;
}

bool ForwardCall::ReturnMutated(PyObject* result) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].mutated) continue;
    bool returned = result == tensors_[i].get();
    for (Py_ssize_t j = 0; site_->returns_tuple && j < PyTuple_Size(result); ++j) {
      returned |= PyTuple_GetItem(result, j) == tensors_[i].get();
    }
    if (returned && !WarnWritten(i)) return false;
    if (returned) continue;
    if (output_count() == site_->tensor_outputs->size()) {
      PyErr_Format(config.error_type,
                   "%U: argument %zd, which forward writes to, was exported as one of its outputs, but "
                   "forward did not "
                   "return it",
                   site_->name, inputs_[i].argument);
      return false;
    }
    if (!ReturnTensor((*site_->tensor_outputs)[output_count()], tensors_[i].get())) return false;
  }
  if (output_count() == site_->tensor_outputs->size()) return true;
  PyErr_Format(config.error_type, "%U: forward was exported with %zu tensor outputs, but gave %zu",
               site_->name, site_->tensor_outputs->size(), output_count());
  return false;
}

}  // namespace torch2ort
