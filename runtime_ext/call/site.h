// A site: one call of a Function in an exported model, with all properties that are determined once.
#pragma once

#include <string>
#include <vector>

#include "python.h"
#include "tensors/exchange.h"

namespace torch2ort {

// The highest rank of torch's tensors.
constexpr int64_t kMaxRank = 64;

// The way in which a Function gets a tensor of the runtime's.
enum class Access : char {
  kProbed,  // first call: a copy, to find out if the Function keeps it or writes to it
  kShared,  // the runtime's own memory
  kCopied,  // a private copy, as the Function was seen to keep it or to write to it
};

// One tensor argument.
struct InputSpec {
  Py_ssize_t argument;  // position among all arguments of apply
  DLDataType dtype;
  bool needs_grad;
  bool requires_grad;  // needs_grad and of a dtype that supports it
  bool mutated;        // forward writes into it
  bool mapped;         // some output is declared to share its memory
  int original;        // number of the run's original that forward gets instead, or -1
  Access access;
  Ref torch_dtype;  // of its gradient
};

// One tensor output. Those after Site::returned are mutated arguments that forward does not return.
struct OutputSpec {
  Py_ssize_t position;  // among the values that forward returns; a mutated argument counts as one more
  DLDataType dtype;
  int32_t rank;
  bool differentiable;
  int mapped_input;      // index of the tensor argument whose memory it is declared to share, or -1
  bool gradient_mapped;  // some gradient is declared to share the memory of this output's gradient
  bool warned;
};

struct Site {
  PyObject_HEAD PyObject* weak_references;
  PyObject* name;
  PyObject* key;
  PyObject* forward;
  PyObject* setup_context;  // null where forward itself gets ctx
  PyObject* backward;
  PyObject* arguments;
  PyObject* needs_input_grad;
  PyObject* outputs;
  bool returns_tuple;
  bool training;
  bool trusted;  // torch2ort's own Function: it keeps no references, and no user could declare a map for it
  bool executable;  // training, and some input needs a gradient: eager PyTorch would record the call
  int64_t calls;
  int64_t copied_bytes;
  std::string* backward_name;  // torch's name of the gradient node: "MyFunctionBackward"
  std::vector<InputSpec>* inputs;
  std::vector<OutputSpec>* tensor_outputs;
  size_t returned;                    // how many of tensor_outputs forward returns
  std::vector<int>* output_index;     // value that forward returns -> index in tensor_outputs, or -1
  std::vector<int>* input_index;      // argument -> index in inputs, or -1
  std::vector<int>* gradient_mapped;  // tensor argument -> index of the tensor output whose gradient's memory
                                      // its gradient is declared to be, or -1
  std::vector<char>* gradient_warned;    // one flag per tensor argument
  std::vector<Access>* gradient_access;  // one per tensor output that forward returns
};

extern PyTypeObject* site_type;
bool InitSite(PyObject* module);

inline Site* AsSite(PyObject* self) { return reinterpret_cast<Site*>(self); }

}  // namespace torch2ort
