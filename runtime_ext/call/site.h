// A site: one call of a Function in an exported model, with everything about it that is decided once.
#pragma once

#include <string>
#include <vector>

#include "python.h"
#include "tensors/exchange.h"

namespace torch2ort {

// Of torch's tensors.
constexpr int64_t kMaxRank = 64;

// How a Function gets a tensor of the runtime's.
enum class Access : char {
  kProbed,  // first call: a copy, to see whether the Function keeps it or writes to it
  kShared,  // the runtime's own memory
  kCopied,  // a private copy, as the Function was seen to keep it or to write to it
};

// One tensor argument.
struct InputSpec {
  Py_ssize_t argument;  // position among all arguments of apply
  DLDataType dtype;
  bool needs_grad;
  bool requires_grad;  // needs_grad and of a dtype that can
  bool mutated;        // forward writes into it
  bool mapped;         // some output is declared to be its memory
  int original;        // number of the run's original that forward gets in its place, or -1
  Access access;
  Ref torch_dtype;  // of its gradient
};

// One tensor output. Those after Site::returned are mutated arguments that forward does not return.
struct OutputSpec {
  Py_ssize_t position;  // among the values that forward returns; a mutated argument counts as one more
  DLDataType dtype;
  int32_t rank;
  bool differentiable;
  int mapped_input;      // index of the tensor argument whose memory it is declared to be, or -1
  bool gradient_mapped;  // some gradient is declared to be the memory of this output's gradient
  bool warned;
};

struct Site {
  PyObject_HEAD PyObject* weak_references;
  PyObject* name;
  PyObject* key;
  PyObject* forward;
  PyObject* setup_context;  // null in the style without
  PyObject* backward;
  PyObject* arguments;
  PyObject* needs_input_grad;
  PyObject* outputs;
  bool returns_tuple;
  bool training;
  bool trusted;  // torch2ort's own Function: it keeps nothing unseen, and no user could declare a map for it
  bool executable;  // training, and some input needs a gradient: eager would record the call
  int64_t calls;
  int64_t copied_bytes;
  std::string* backward_name;  // what torch calls the gradient node: "MyFunctionBackward"
  std::vector<InputSpec>* inputs;
  std::vector<OutputSpec>* tensor_outputs;
  size_t returned;                    // how many of tensor_outputs forward returns
  std::vector<int>* output_index;     // value that forward returns -> index in tensor_outputs, or -1
  std::vector<int>* input_index;      // argument -> index in inputs, or -1
  std::vector<int>* gradient_mapped;  // tensor argument -> index of the tensor output whose gradient's memory
                                      // its gradient is declared to be, or -1
  std::vector<char>* gradient_warned;    // one flag a tensor argument
  std::vector<Access>* gradient_access;  // one a tensor output that forward returns
};

extern PyTypeObject* site_type;
bool InitSite(PyObject* module);

inline Site* AsSite(PyObject* self) { return reinterpret_cast<Site*>(self); }

}  // namespace torch2ort
