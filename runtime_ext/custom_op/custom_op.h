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

// How a node is run.
enum class Way : char {
  kPython,
  kUntried,  // in Python, as for any first call, and by its DirectCall once that has succeeded
  kDirect,
};

// One node of a session.
struct Kernel {
  const OrtApi* api;
  bool has_shape_reference;
  bool keeps_errors;  // the session's caller asks for them
  bool on_cuda;
  bool backward;               // it is a PythonOpGrad
  bool gives_memory;           // its session may take outputs without a copy
  bool writes_context;         // somebody may read the first output, which stands for the context
  std::string where;           // Function and node, for messages
  PyObject* callee = nullptr;  // owned
  PyObject* direct = nullptr;  // owned; a DirectCall beside the callee, or null
  std::atomic<Way> way{Way::kPython};
  std::vector<DLDataType> input_dtypes;
  size_t tensors = 0;           // that the call takes; some of them may be missing
  std::vector<size_t> slots;    // which of them each input is
  std::vector<bool> handed_on;  // by output: it is an input's memory, and the node gives its sizes alone
};

// What configure_custom_op() was given. All of it lives as long as the process.
struct CustomOpConfiguration {
  PyObject* resolve = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* set_grad_enabled = nullptr;
  PyObject* stream = nullptr;
  PyObject* is_sole_holder = nullptr;
};
extern CustomOpConfiguration custom_op_config;

// The table of the runtime that loaded this library, and whether it has the newest of the slots in use.
extern const OrtApi* ort_api;
extern bool has_shape_reference;

// Whether Python code can run: false outside of a Python process and while the interpreter goes away.
bool PythonRuns();

// A status that the run, or the making of the session, failed.
OrtStatus* Fail(const OrtApi* api, std::string message);

// What `call` returns, or a status of the exception that it throws: none may cross ONNX Runtime's C
// interface.
template <typename Call>
OrtStatus* WithoutExceptions(const OrtApi* api, Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return api->CreateStatus(kOrtFail, error.what());
  }
}

// A status from the pending exception, which it takes. `keep`: the exception waits for
// take_custom_op_error(), which finds it by the number in the message.
OrtStatus* StatusOfException(const OrtApi* api, const std::string& where, bool keep);

// The exception that waits for the caller of a run with this message, which is then the caller's; empty if
// there is none.
Ref KeptError(const std::string& message);

// Name of the capsules around a session's options.
constexpr const char* kOptionsName = "torch2ort.session_options";

// DLPack's name for an element type; false for one without.
bool ToDLDataType(OrtElementType type, DLDataType* dtype);

// ---- outputs without a copy ----

// While it lives, the next memory of the tensor's size that ONNX Runtime asks this thread for is the tensor's
// own, if the session allocates with the allocator that lend_allocator() gave it. `tensor` may be null.
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

// Whether sessions that are made now can allocate with it.
extern bool allocator_lent;

// Whether nodes may run on CUDA, which nobody has tried: off until try_cuda().
extern bool cuda_tried;

// Memory as that allocator has it, for anybody. Throws if there is none.
void* TakeBlock(size_t size);
void ReturnBlock(void* data);
// Gives the memory that waits to be used again back to the system.
void UnmapFreeBlocks();

PyObject* LendAllocator(PyObject* module, PyObject*);
PyObject* WithdrawAllocator(PyObject* module, PyObject*);

// ---- the callbacks of the operator ----

OrtStatus* InferOutputs(const OrtCustomOp* op, OrtShapeInferContext* context);
// Element type and rank of each output, from attributes; the first of them stands at position `first`.
OrtStatus* InferTensors(OrtShapeInferContext* context, size_t first);
// The same for an only output that has the sizes of the first input.
OrtStatus* InferAsInput(OrtShapeInferContext* context);
OrtStatus* CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out);
OrtStatus* ComputeKernel(void* object, OrtKernelContext* context);
// Runs a node by its DirectCall. False if that did not work and nothing was given to the runtime that the
// Python way could not give again; else `status` is what the run came to.
bool ComputeDirectly(const Kernel& kernel, OrtKernelContext* context, OrtStatus** status);
// The same for a node whose DirectCall is a fused region.
bool ComputeRegion(const Kernel& kernel, const CompiledRegion& region, OrtKernelContext* context,
                   OrtStatus** status);
void DestroyKernel(void* object);

// Sizes that the runtime does not lend, for as long as tensors point to them.
using Sizes = std::vector<std::unique_ptr<int64_t[]>>;
// The sizes of a value. `by_reference`: the runtime lends them.
OrtStatus* SizesOf(const OrtApi* api, bool by_reference, const OrtValue* value, Sizes* kept,
                   const int64_t** sizes, size_t* rank);
// An input as it lies in the runtime's memory. `device`: gets its number on CUDA.
OrtStatus* ReadInput(const Kernel& kernel, OrtKernelContext* context, size_t index, DLDevice* device,
                     Sizes* kept, DLTensor* tensor);

// An operator with one variadic parameter of tensors of any types each way; its maker fills in the rest.
OrtCustomOp VariadicOp();

// The operator by which a backward session gets what its forward left for it alone.
OrtCustomOp DonatedOp();

// The operators by which Functions write to an input's memory, and give it as an output's.
OrtCustomOp OwnedOp();
OrtCustomOp AliasedOp();

// Hands an early return to the caller.
#define T2O_RETURN_IF_ERROR(expression)                    \
  do {                                                     \
    if (OrtStatus* status_ = (expression)) return status_; \
  } while (false)

}  // namespace torch2ort
