// An operator of PyTorch that a node calls in C++: without Python, its lock, or objects for the tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "call/site.h"
#include "direct/argument.h"
#include "direct/compiled_region.h"

namespace torch2ort {

// The result of the call for one result of the operator.
struct DirectResult {
  bool computed = true;  // false for one that a mask omits: it is unused
  std::vector<int64_t> order;
};

// A replacement for the call of a site's forward.
struct DirectCall {
  PyObject_HEAD PyObject* weak_references;
  PyObject* site;
  struct Plan* plan;
};

// A result that the operator writes into the runtime's own memory: the tensor after those of the site.
struct WrittenResult {
  bool is_product;  // of the matrices in `argument` and the next one; else of the sizes of `argument`
  size_t argument;
};

// The plan of a call, made once. The operator is called through torch's dispatcher by its name, or by a
// function of its own if it has numbers that the dispatcher's C interface cannot pass.
struct Plan {
  const TorchAbi* torch = nullptr;
  std::string name, overload;
  std::vector<Argument> arguments;
  std::vector<DirectResult> results;
  void* function = nullptr;
  std::optional<WrittenResult> written;
  bool grad_mode = false;                // enabled while the operator runs: its kernel reads it
  size_t result_tensor = 0;              // the index of the tensor that is written, after the site's
  std::vector<double> numbers;           // the function's last arguments; its tensors are in `arguments`
  std::optional<CompiledRegion> region;  // a library's function instead of torch's: nothing else is set
};

extern PyTypeObject* direct_call_type;
bool InitDirectCall(PyObject* module);

inline DirectCall* AsDirectCall(PyObject* self) { return reinterpret_cast<DirectCall*>(self); }

// Calls the operator; no tensor requires a gradient. `tensors`: the site's, and after them the result of a
// plan that writes. Returns one tensor per result, without a handle where the operator omitted it; the
// tensors of a plan that writes are unused. False if torch raised.
bool CallOperator(const Plan& plan, const DLTensor* tensors, std::vector<OwnedTensor>* results);

// The sizes of the result of a plan that writes; false if the tensors do not fit each other.
bool SizesOfWritten(const Plan& plan, const DLTensor* tensors, std::vector<int64_t>* sizes);

}  // namespace torch2ort
