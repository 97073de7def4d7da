// One call of a Function's backward: backward.cpp makes it, backward_gradients.cpp sees to what it returns.
#pragma once

#include "policy.h"
#include "run.h"

namespace torch2ort {

class BackwardCall {
 public:
  BackwardCall(Site* site, Loans& loans, std::vector<Managed>* outputs, Passing* passing)
      : site_(site),
        loans_(loans),
        outputs_(outputs),
        passing_(passing),
        passed_(passing != nullptr && passing->tensor),
        inputs_(*site->inputs),
        tensors_(site->returned),
        access_(site->returned),
        spans_(site->returned),
        written_(site->returned),
        exports_(site->returned),
        args_(static_cast<size_t>(PyTuple_Size(site->outputs)) + 1) {}

  bool Run() {
    return Receive() && Call() && LearnWrites() && CheckCount() && CheckKinds() && Return() && Settle();
  }

 private:
  Context* context() { return reinterpret_cast<Context*>(context_.get()); }
  TensorMeta InputMeta(size_t i) { return context()->tensors.Get(i); }
  TensorMeta OutputMeta(size_t i) { return context()->tensors.Get(inputs_.size() + i); }
  bool arrived(size_t i) {
    return (passed_ || loans_[i] != nullptr) && (*site_->tensor_outputs)[i].differentiable;
  }
  bool Linked(size_t i) const { return passing_ != nullptr && static_cast<int>(i) == passing_->argument; }

  bool Receive();
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
  bool ReturnGradient(size_t i, PyObject* gradient);
  bool PassOn(size_t i, Ref gradient, bool held);
  int HeldByOthers(PyObject* value, const Ref& gradient);
  bool ReturnZeros(size_t i);
  bool Conform(size_t i, Ref* gradient);
  bool View(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view);
  bool RaiseDevice(size_t i, const TensorMeta& expected, const char* found);
  bool Reduce(size_t i, const TensorMeta& expected, Ref* gradient, DLTensor* view);
  bool Disentangle(size_t i, PyObject* gradient, bool held, Managed* managed);
  bool WarnOnce(size_t i, size_t j);
  bool HeldByContext(const Span& span);
  bool Settle();

  Site* site_;
  Loans& loans_;
  std::vector<Managed>* outputs_;
  Passing* passing_;  // null for a site that is not in a chain
  bool passed_;       // the gradient of the only output comes from the next site of the chain
  std::vector<InputSpec>& inputs_;
  SmallArray<Ref, 8> tensors_;      // gradients as backward gets them
  SmallArray<Access, 8> access_;    // of this call: another thread's call may change the site's
  SmallArray<Span, 8> spans_;       // memory of the tensors_
  long passed_version_ = 0;         // of the gradient that the next site passed
  Span passed_span_;                // memory of the gradient that goes to the site before
  SmallArray<bool, 8> written_;     // backward wrote to the copy that it was probed with
  SmallArray<int, 8> exports_;      // gradients that are declared to be an output gradient's memory
  SmallArray<PyObject*, 12> args_;  // ctx and one gradient a value of forward; borrowed
  Ref context_;
  Ref result_;
};

}  // namespace torch2ort
