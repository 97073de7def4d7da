// An operator of PyTorch that a node calls in C++: without Python, its lock, or objects for the tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "call/site.h"
#include "direct/argument.h"
#include "direct/compiled_region.h"

namespace torch2ort {

// What one result of the operator becomes.
struct DirectResult {
  bool computed = true;  // or left out by a mask: nobody reads it
  std::vector<int64_t> order;
};

// Beside a site: what the site's forward does, so that it need not be called.
struct DirectCall {
  PyObject_HEAD PyObject* weak_references;
  PyObject* site;
  struct Plan* plan;
};

// A result that the operator writes into the runtime's own memory: the tensor behind those of the site.
struct WrittenResult {
  bool is_product;  // of the matrices in `argument` and the next one; else of the sizes of `argument`
  size_t argument;
};

// Decided once. The operator is called through torch's dispatcher by its name, or by a function of its own
// where it takes numbers that the dispatcher's C interface cannot pass.
struct Plan {
  const TorchAbi* torch = nullptr;
  std::string name, overload;
  std::vector<Argument> arguments;
  std::vector<DirectResult> results;
  void* function = nullptr;
  std::optional<WrittenResult> written;
  bool grad_mode = false;                // on while the operator runs: its kernel asks for it
  size_t result_tensor = 0;              // the number of the tensor that is written, behind the site's
  std::vector<double> numbers;           // the function's last arguments; the tensors stand in `arguments`
  std::optional<CompiledRegion> region;  // a library's function instead of torch's: nothing else is set
};

extern PyTypeObject* direct_call_type;
bool InitDirectCall(PyObject* module);

inline DirectCall* AsDirectCall(PyObject* self) { return reinterpret_cast<DirectCall*>(self); }

// Calls the operator; no tensor requires a gradient. `tensors`: the site's, and behind them the result of a
// plan that writes. Gives one tensor a result, or one without handle where the operator left it out; what a
// plan that writes gives is of no use. False if torch raised.
bool CallOperator(const Plan& plan, const DLTensor* tensors, std::vector<OwnedTensor>* results);

// The sizes of the result of a plan that writes; false if the tensors do not fit each other.
bool SizesOfWritten(const Plan& plan, const DLTensor* tensors, std::vector<int64_t>* sizes);

}  // namespace torch2ort
