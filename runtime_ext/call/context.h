// The object that a Function's forward and backward get as `ctx`.
#pragma once

#include <vector>

#include "python.h"
#include "tensors/exchange.h"

namespace torch2ort {

// Metadata of one tensor of a run.
struct TensorMeta {
  const int64_t* shape;
  int32_t rank;
  DLDevice device;
};

// Metadata of all tensors of one forward, in one allocation.
class MetaList {
 public:
  void Reserve(size_t tensors) { words_.reserve(tensors * 8); }
  void Append(const DLTensor& tensor);
  TensorMeta Get(size_t index) const;
  // True if any of the first `count` tensors shares a byte with `span`.
  bool Overlaps(const Span& span, size_t count) const;
  // Clears the span of a tensor whose memory may be reused from now on.
  void ForgetSpan(size_t index);

 private:
  // A tensor's words: rank, device type, device id, first byte, byte past the end, and the shape.
  static constexpr size_t kHeader = 5;
  size_t WordOf(size_t index) const;

  std::vector<int64_t> words_;
};

struct Context {
  PyObject_HEAD PyObject* attributes;  // __dict__, made on first use
  PyObject* weak_references;
  PyObject* needs_input_grad;
  PyObject* to_save;  // the arguments of save_for_backward
  PyObject* saved;    // the same once forward has ended: a tuple with one saved version per entry
  PyObject* saved_for_forward;
  PyObject* dirty_tensors;
  PyObject* non_differentiable;
  bool materialize_grads;
  bool in_forward;  // the call policy runs forward: saved tensors are checked when it has returned
  bool released;
  // Constructed and destroyed explicitly: CPython's allocator returns zeroed memory without objects.
  std::vector<long> saved_versions;  // one per saved tensor; empty in a context that no site filled
  MetaList tensors;                  // the site's tensor arguments, then its tensor outputs
};

extern PyTypeObject* context_type;
bool InitContext(PyObject* module);

// A new Context for the call policy, inside forward.
Ref NewContext(PyObject* needs_input_grad);

// Ends forward: checks and stores the saved tensors. `executable`: eager PyTorch would record the call for
// backward.
bool FinishForward(Context* context, bool executable);

// Frees the saved tensors; `saved_tensors` raises from now on.
void ReleaseContext(Context* context);

}  // namespace torch2ort
