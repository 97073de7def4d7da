// The object that a Function's forward and backward get as `ctx`.
#pragma once

#include <vector>

#include "exchange.h"
#include "python.h"

namespace torch2ort {

// What one tensor of a run looked like: shape for gradients, memory for aliasing checks.
struct TensorMeta {
  const int64_t* shape;
  int32_t rank;
  DLDevice device;
  Span span;
};

// Metadata of all tensors of one forward, in one allocation.
class MetaList {
 public:
  void Reserve(size_t tensors) { words_.reserve(tensors * 8); }
  void Append(const DLTensor& tensor);
  size_t size() const { return count_; }
  // Visits every tensor in order of Append: visit(index, meta) returns false to stop.
  template <typename Visit>
  void ForEach(Visit visit) const {
    const int64_t* word = words_.data();
    for (size_t i = 0; i < count_; ++i) {
      auto rank = static_cast<int32_t>(word[0]);
      TensorMeta meta{word + kHeader,
                      rank,
                      {static_cast<int32_t>(word[1]), static_cast<int32_t>(word[2])},
                      {static_cast<uintptr_t>(word[3]), static_cast<uintptr_t>(word[4])}};
      if (!visit(i, meta)) return;
      word += kHeader + rank;
    }
  }
  TensorMeta Get(size_t index) const;
  // Empties the span of a tensor whose memory may serve others from now on.
  void ForgetSpan(size_t index);

 private:
  static constexpr size_t kHeader = 5;  // rank, device type, device id, first byte, byte past the end
  std::vector<int64_t> words_;
  size_t count_ = 0;
};

struct Context {
  PyObject_HEAD PyObject* attributes;  // __dict__, made on first use
  PyObject* weak_references;
  PyObject* needs_input_grad;
  PyObject* to_save;
  PyObject* saved_for_forward;
  PyObject* dirty_tensors;
  PyObject* non_differentiable;
  bool materialize_grads;
  bool in_forward;  // the call policy runs forward: what it saves is looked at when it has returned
  bool released;
  // Constructed in place: a Python object's memory comes zeroed from CPython, not from new.
  std::vector<int64_t>* saved_versions;
  MetaList* inputs;   // one entry a tensor argument
  MetaList* outputs;  // one entry a tensor output
};

extern PyTypeObject* context_type;
bool InitContext(PyObject* module);

// A new Context for the call policy, inside forward.
Ref NewContext(PyObject* needs_input_grad);

// Ends forward: checks and keeps what was saved. `executable`: eager would record the call for backward.
bool FinishForward(Context* context, bool executable);

// Frees what was saved; `saved_tensors` raises from now on.
void ReleaseContext(Context* context);

}  // namespace torch2ort
