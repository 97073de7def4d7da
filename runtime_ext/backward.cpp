#include <algorithm>
#include <new>

#include "backward_call.h"

namespace torch2ort {

bool BackwardCall::Receive() {
  if (loans_.size() != site_->tensor_outputs->size()) {
    PyErr_Format(config.error_type,
                 "%U: backward was given %zu gradients, but its site has %zu tensor outputs", site_->name,
                 loans_.size(), site_->tensor_outputs->size());
    return false;
  }
  context_ = TakeContext(site_);
  if (!context_ || (!context()->materialize_grads && !NoteUnmaterialized(site_))) return false;
  args_[0] = context_.get();
  for (size_t i = 1; i < args_.size(); ++i) args_[i] = Py_None;
  for (size_t i = 0; i < site_->returned; ++i) {
    if (!ReceiveGradient(i)) return false;
    args_[static_cast<size_t>((*site_->tensor_outputs)[i].position) + 1] = tensors_[i].get();
  }
  return true;
}

bool BackwardCall::ReceiveGradient(size_t i) {
  const OutputSpec& output = (*site_->tensor_outputs)[i];
  Context* context = this->context();
  // What flows into an output that cannot be differentiated is no gradient to eager either.
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
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(passing_->tensor.get(), &view) != 0) return false;
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

// Backward may write to the gradients it is given, as eager lets it; others may read the runtime's.
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

// Makes sure that what the Function kept of its gradients is not the runtime's to overwrite.
bool BackwardCall::Settle() {
  SmallArray<Ref, 8> watched(site_->returned);
  for (size_t i = 0; i < site_->returned; ++i) {
    if (!arrived(i) || passed_ || access_[i] == Access::kCopied) continue;
    watched[i] = WatchStorage(tensors_[i].get());
    if (!watched[i]) return false;
  }
  // What forward saved is needed no longer, though other backwards of the run are still to come.
  ReleaseContext(context());
  context_.reset();
  result_.reset();
  for (Ref& tensor : tensors_) tensor.reset();
  for (size_t i = 0; i < site_->returned; ++i) {
    Access& next = (*site_->gradient_access)[i];
    // Others may hold what the next site passed, but it is not the runtime's to overwrite.
    if (passed_ && access_[i] == Access::kProbed) next = written_[i] ? Access::kCopied : Access::kShared;
    if (!watched[i]) continue;
    if (!SettleTensor(site_, loans_[i], exports_[i], watched[i].get(), access_[i], &next)) return false;
    if (written_[i]) next = Access::kCopied;
  }
  return true;
}

bool RunBackward(Site* site, Loans& gradients, std::vector<Managed>* outputs) {
  return RunBackward(site, gradients, outputs, nullptr);
}

bool RunBackward(Site* site, Loans& gradients, std::vector<Managed>* outputs, Passing* passing) {
  try {
    return BackwardCall(site, gradients, outputs, passing).Run();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

}  // namespace torch2ort
