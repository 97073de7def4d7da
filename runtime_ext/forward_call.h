// One call of a Function's forward: forward.cpp makes it, forward_outputs.cpp sees to what it returns.
#pragma once

#include "policy.h"
#include "run.h"

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
  bool NoteInContext(PyObject* value, Holders* known);
  bool PassOn(const OutputSpec& spec, PyObject* value, bool held);
  bool Separate();
  bool ReturnMutated(PyObject* result);
  bool CheckTensor(const OutputSpec& spec, const DLTensor& tensor);
  bool Passed(size_t i) const { return passing_ != nullptr && static_cast<int>(i) == passing_->argument; }
  size_t output_count() const { return outputs_->size() + (passing_ != nullptr && passing_->result); }
  bool Disentangle(size_t index, PyObject* value, bool held, Managed* managed);
  int HeldByOthers(const OutputSpec& spec, PyObject* value);
  bool ReturnAlias(PyObject* value, Managed* managed, Ref* storage);
  bool KeepOrDropContext();
  bool Describe(PyObject* tensor);
  bool DropTensors(bool* passed_held);
  bool Settle();
  void Abandon();

  Site* site_;
  Loans& loans_;
  std::vector<Managed>* outputs_;
  std::vector<Ref>* storages_;  // one an output, or null
  Passing* passing_;            // null for a site that is not in a chain
  std::vector<InputSpec>& inputs_;
  SmallArray<Ref, 8> tensors_;    // as forward gets them
  SmallArray<Access, 8> access_;  // of this call: another thread's call may change the site's
  SmallArray<Span, 8> spans_;     // memory of the arguments that an output must not share
  SmallArray<DLDevice, 8> devices_;
  SmallArray<int, 8> exports_;      // outputs that are declared to be an input's memory
  long passed_version_ = 0;         // of the tensor that the site before passed
  SmallArray<PyObject*, 12> args_;  // ctx and the arguments; borrowed
  Ref context_;
  bool in_run_ = false;  // the run holds the context
  Ref argument_tuple_;
  Ref result_;
};

}  // namespace torch2ort
