// com.microsoft::PythonOp for any ONNX Runtime: an operator that runs Functions through the call policy.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "call/function_chain.h"
#include "custom_op/ort_api.h"
#include "direct/aten_call.h"
#include "python.h"

namespace torch2ort {

// Adds configure_custom_op and take_custom_op_error to the module.
bool InitCustomOp(PyObject* module);

// The way in which a node runs.
enum class Way : char {
  kPython,
  kUntried,  // in Python at first, and by its DirectCall once a call has succeeded
  kDirect,
};

// One node of a session.
struct Kernel {
  const OrtApi* api;
  bool has_shape_reference;
  bool keeps_errors;  // the session's caller retrieves the exceptions
  bool on_cuda;
  bool backward;               // true for a PythonOpGrad
  bool gives_memory;           // its session may use outputs without a copy
  bool writes_context;         // the first output, which represents the context, may be read
  std::string where;           // Function and node, for messages
  PyObject* callee = nullptr;  // owned
  PyObject* direct = nullptr;  // owned; a DirectCall beside the callee, or null
  std::atomic<Way> way{Way::kPython};
  std::vector<DLDataType> input_dtypes;
  size_t tensors = 0;           // the number of tensors that the call expects; some inputs may be missing
  std::vector<size_t> slots;    // index of each input's tensor among them
  std::vector<bool> handed_on;  // by output: it shares an input's memory, and the node writes only its sizes
};

// The arguments of configure_custom_op(). All of them live as long as the process.
struct CustomOpConfiguration {
  PyObject* resolve = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* set_grad_enabled = nullptr;
  PyObject* stream = nullptr;
  PyObject* is_sole_holder = nullptr;
};
extern CustomOpConfiguration custom_op_config;

// The function table of the runtime that loaded this library, and whether it has the newest slot in use.
extern const OrtApi* ort_api;
extern bool has_shape_reference;

// True if Python code can run: false outside of a Python process and while the interpreter shuts down.
bool PythonRuns();

// A status that makes the run, or the creation of the session, fail.
OrtStatus* Fail(const OrtApi* api, std::string message);

// Returns the result of `call`, or a status for an exception that it throws: no exception may pass through
// ONNX Runtime's C interface.
template <typename Call>
OrtStatus* WithoutExceptions(const OrtApi* api, Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return api->CreateStatus(kOrtFail, error.what());
  }
}

// Makes a status from the pending exception, and clears that. `keep`: stores the exception for
// take_custom_op_error(), which finds it by the number in the message.
OrtStatus* StatusOfException(const OrtApi* api, const std::string& where, bool keep);

// Removes and returns the stored exception of a run with this message; empty if there is none.
Ref KeptError(const std::string& message);

// Name of the capsules around a session's options.
constexpr const char* kOptionsName = "torch2ort.session_options";

// DLPack's code of an element type; false for a type without one.
bool ToDLDataType(OrtElementType type, DLDataType* dtype);

// ---- outputs without a copy ----

// During its lifetime, the next allocation of the tensor's size by ONNX Runtime on this thread returns the
// tensor's own memory, if the session uses the allocator that lend_allocator() registered. `tensor` may be
// null.
class Gift {
 public:
  Gift(Managed* tensor, Span memory);
  ~Gift();
  Gift(const Gift&) = delete;
  Gift& operator=(const Gift&) = delete;

  void* Take(size_t size);

 private:
  Managed* tensor_;
  Span memory_;
};

// True while the allocator is registered with ONNX Runtime: between LendAllocator() and WithdrawAllocator().
// Only sessions that are created meanwhile can use it.
extern bool allocator_lent;

// True if nodes may run on CUDA, which was not tested on a GPU: false until try_cuda().
extern bool cuda_tried;

// Allocates memory as that allocator does, for any caller. Throws if there is none.
void* TakeBlock(size_t size);
void ReturnBlock(void* data);
// Gives the memory that waits to be used again back to the system.
void UnmapFreeBlocks();

// Registers the allocator with the environment that all sessions of the process share. Returns True, or False
// where the runtime does not support it.
PyObject* LendAllocator(PyObject* module, PyObject*);
// Removes it from the environment. Sessions that were created with it still use it.
PyObject* WithdrawAllocator(PyObject* module, PyObject*);

// ---- the callbacks of the operator ----

OrtStatus* InferOutputs(const OrtCustomOp* op, OrtShapeInferContext* context);
// Sets element type and rank of each output, from attributes; the first of them is output `first`.
OrtStatus* InferTensors(OrtShapeInferContext* context, size_t first);
// The same for a single output that has the sizes of the first input.
OrtStatus* InferAsInput(OrtShapeInferContext* context);
OrtStatus* CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out);
OrtStatus* ComputeKernel(void* object, OrtKernelContext* context);
// Runs a node by its DirectCall. False if that failed without an effect on the runtime that the call in
// Python could not repeat; else `status` is the result of the run.
bool ComputeDirectly(const Kernel& kernel, OrtKernelContext* context, OrtStatus** status);
// The same for a node whose DirectCall is a fused region.
bool ComputeRegion(const Kernel& kernel, const CompiledRegion& region, OrtKernelContext* context,
                   OrtStatus** status);
void DestroyKernel(void* object);

// Sizes that the runtime does not lend, kept as long as tensors point to them.
using Sizes = std::vector<std::unique_ptr<int64_t[]>>;
// Reads the sizes of a value. `by_reference`: the runtime lends them.
OrtStatus* SizesOf(const OrtApi* api, bool by_reference, const OrtValue* value, Sizes* kept,
                   const int64_t** sizes, size_t* rank);
// Reads an input in the runtime's memory. `device`: gets the device's number on CUDA.
OrtStatus* ReadInput(const Kernel& kernel, OrtKernelContext* context, size_t index, DLDevice* device,
                     Sizes* kept, DLTensor* tensor);

// An operator with one variadic parameter of tensors of any types for inputs and for outputs; the caller sets
// the rest.
OrtCustomOp VariadicOp();

// The operator by which a backward session gets the values that its forward donated.
OrtCustomOp DonatedOp();

// The operators by which Functions write to an input's memory, and return it as an output's.
OrtCustomOp OwnedOp();
OrtCustomOp AliasedOp();

// Returns an error to the caller.
#define T2O_RETURN_IF_ERROR(expression)                    \
  do {                                                     \
    if (OrtStatus* status_ = (expression)) return status_; \
  } while (false)

}  // namespace torch2ort
