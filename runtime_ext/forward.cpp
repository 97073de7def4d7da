#include <new>

#include "forward_call.h"

namespace torch2ort {

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
  DLTensor view;
  PyObject* tensor = passing_->tensor.get();
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) return false;
  if (!CheckDType(inputs_[i], view.dtype)) return false;
  access_[i] = Access::kShared;
  spans_[i] = SpanOf(view);
  devices_[i] = view.device;
  passed_version_ = WritesTo(tensor);
  tensors_[i] = std::move(passing_->tensor);
  return passed_version_ >= 0;
}

bool ForwardCall::ReceiveLoan(size_t i) {
  const InputSpec& input = inputs_[i];
  if (loans_[i] == nullptr) {
    PyErr_Format(config.error_type, "%U: no tensor arrived for argument %zd", site_->name, input.argument);
    return false;
  }
  DLDataType& dtype = loans_[i]->dl_tensor.dtype;
  // Runtimes pass bool as bytes in DLPack's older form, which knows no bool.
  if (input.dtype.code == kDLBool && dtype.code == kDLUInt && dtype.bits == 8) dtype = input.dtype;
  if (!CheckDType(input, dtype)) return false;
  access_[i] = input.access;
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

// A write that export did not see would reach, or fail to reach, others who read the same value.
bool ForwardCall::CheckWrites() {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].mutated || inputs_[i].mapped) continue;
    long writes = WritesTo(tensors_[i].get());
    if (writes < 0) return false;
    if (writes == (Passed(i) ? passed_version_ : 0)) continue;
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
  if (passing_ != nullptr && passing_->result && !Describe(passing_->result.get())) return false;
  in_run_ = true;
  return KeepContext(run, site_, context_.get());
}

bool ForwardCall::Describe(PyObject* tensor) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) return false;
  context()->tensors.Append(view);
  return true;
}

// Drops the arguments, and learns whether somebody still holds the one that the site before passed.
bool ForwardCall::DropTensors(bool* passed_held) {
  Ref watched;
  if (in_run_ && passing_ != nullptr && passing_->argument >= 0) {
    PyObject* tensor = tensors_[static_cast<size_t>(passing_->argument)].get();
    *passed_held = Py_REFCNT(tensor) > 1;
    if (!*passed_held) watched = WatchStorage(tensor);
    if (!*passed_held && !watched) return false;
  }
  for (Ref& tensor : tensors_) tensor.reset();
  if (watched) *passed_held = static_cast<bool>(Dereference(watched.get()));
  return true;
}

// Makes sure that what the Function kept of its inputs is not the runtime's to overwrite.
bool ForwardCall::Settle() {
  SmallArray<Ref, 8> watched(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (Passed(i) || inputs_[i].protected_ || access_[i] == Access::kCopied) continue;
    watched[i] = WatchStorage(tensors_[i].get());
    if (!watched[i]) return false;
  }
  // From here on only the Function and the run can hold the inputs.
  if (!in_run_) context_.reset();
  argument_tuple_.reset();
  result_.reset();
  bool passed_held = false;
  if (!DropTensors(&passed_held)) return false;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (watched[i] &&
        !SettleTensor(site_, loans_[i], exports_[i], watched[i].get(), access_[i], &inputs_[i].access))
      return false;
    if (!in_run_) continue;
    bool held = Passed(i) ? passed_held : loans_[i]->holder_count() != 1 + exports_[i];
    if (!held) context()->tensors.ForgetSpan(i);
  }
  return true;
}

// After a failure the exception's frames hold the inputs, and a debugger may look at them long after the
// runtime took its memory back.
void ForwardCall::Abandon() {
  PyObject* error = TakeRaised();
  SmallArray<Ref, 8> watched(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    bool borrowed = tensors_[i] && access_[i] == Access::kShared && !Passed(i) && loans_[i]->borrowed();
    if (borrowed) watched[i] = WatchStorage(tensors_[i].get());
  }
  outputs_->clear();
  if (passing_ != nullptr) passing_->result.reset();
  if (storages_ != nullptr) storages_->clear();
  context_.reset();
  argument_tuple_.reset();
  result_.reset();
  for (Ref& tensor : tensors_) tensor.reset();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Access unchanged = access_[i];  // that a traceback holds the tensor says nothing of the next call
    if (watched[i]) SettleTensor(site_, loans_[i], 0, watched[i].get(), access_[i], &unchanged);
  }
  PyErr_Clear();  // the Function's own exception matters more than a tensor that could not be moved
  if (error == nullptr) return;
  PyErr_Restore(Ref::Share(reinterpret_cast<PyObject*>(Py_TYPE(error))).release(), error,
                PyException_GetTraceback(error));
}

bool RunForward(Site* site, Loans& inputs, std::vector<Managed>* outputs) {
  return RunForward(site, inputs, outputs, nullptr);
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

}  // namespace torch2ort
