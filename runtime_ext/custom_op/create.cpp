// Creates the kernel of one node when a session is created: finds the node's site, and compares the two.
#include <cstring>
#include <new>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

// Reads a string that ONNX Runtime returns in two steps; empty if it has none.
template <typename Get>
std::string ReadString(const OrtApi* api, Get get) {
  size_t size = 0;
  OrtStatus* status = get(nullptr, &size);
  std::string text(size, '\0');
  if (status == nullptr && size > 0) status = get(text.data(), &size);
  if (status != nullptr) {
    api->ReleaseStatus(status);
    return {};
  }
  text.resize(size > 0 ? size - 1 : 0);  // it ends with a NUL
  return text;
}

std::string ReadAttribute(const OrtApi* api, const OrtKernelInfo* info, const char* name) {
  return ReadString(api, [&](char* out, size_t* size) {
    return api->KernelInfoGetAttribute_string(info, name, out, size);
  });
}

// Calls the resolver that torch2ort set: it alone decides which class a name in a file refers to.
PyObject* Resolve(const std::string& name, const std::string& key, const std::string& description) {
  if (custom_op_config.resolve == nullptr) {
    PyErr_SetString(PyExc_RuntimeError,
                    "torch2ort is not imported; import torch2ort before the session is made");
    return nullptr;
  }
  Ref callee = Ref::Steal(PyObject_CallFunction(
      custom_op_config.resolve, "s#s#s#", name.data(), static_cast<Py_ssize_t>(name.size()), key.data(),
      static_cast<Py_ssize_t>(key.size()), description.data(), static_cast<Py_ssize_t>(description.size())));
  if (callee && !IsCallable(callee.get()) && !PyObject_TypeCheck(callee.get(), direct_call_type)) {
    PyErr_Format(PyExc_TypeError, "the resolver returned %.200s, no Site, Chain or DirectCall",
                 TypeName(callee.get()).c_str());
    return nullptr;
  }
  return callee.release();
}

// Reads the element type of one of the node's tensors; returns an error status if it differs from the site's.
OrtStatus* CheckType(const Kernel& kernel, OrtTypeInfo* info, const char* what, size_t index,
                     DLDataType expected) {
  const OrtApi* api = kernel.api;
  OrtTypeKind kind{};
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  OrtElementType type = kOrtUndefined;
  OrtStatus* status = api->GetOnnxTypeFromTypeInfo(info, &kind);
  if (status == nullptr && kind == kOrtTensor) status = api->CastTypeInfoToTensorInfo(info, &tensor);
  if (status == nullptr && tensor != nullptr) status = api->GetTensorElementType(tensor, &type);
  api->ReleaseTypeInfo(info);
  if (status != nullptr) return status;
  DLDataType given{};
  if (ToDLDataType(type, &given) && given == expected) return nullptr;
  return Fail(api, kernel.where + ": " + what + " " + std::to_string(index) + " is " +
                       (given.bits == 0 ? "no numeric tensor" : "a tensor of " + DTypeName(given)) +
                       " in the graph, but its site was exported with " + DTypeName(expected) +
                       "; export the model again");
}

OrtStatus* CheckCount(const Kernel& kernel, const char* what, size_t given, size_t expected) {
  if (given == expected) return nullptr;
  return Fail(kernel.api, kernel.where + ": the node has " + std::to_string(given) + " " + what +
                              ", but its site was exported with " + std::to_string(expected) +
                              "; export the model again");
}

// Checks the attribute from which onnxruntime infers the outputs; onnxruntime ignores a damaged one.
OrtStatus* CheckAttribute(const Kernel& kernel, const OrtKernelInfo* info, const char* name,
                          bool (*fits)(const OutputSpec&, int64_t)) {
  const OrtApi* api = kernel.api;
  const auto& outputs = OutputsOf(kernel.callee);
  size_t count = 0;
  OrtStatus* status = api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &count);
  std::vector<int64_t> values(count);
  if (status == nullptr && count > 0) {
    status = api->KernelInfoGetAttributeArray_int64(info, name, values.data(), &count);
  }
  bool good = status == nullptr && values.size() == outputs.size();
  if (status != nullptr) api->ReleaseStatus(status);
  for (size_t i = 0; good && i < values.size(); ++i) {
    good = kernel.handed_on[i + 1] || fits(outputs[i], values[i]);
  }
  if (good) return nullptr;
  return Fail(api, kernel.where + ": its attribute '" + name + "' is damaged; export the model again");
}

OrtStatus* CheckAttributes(const Kernel& kernel, const OrtKernelInfo* info) {
  T2O_RETURN_IF_ERROR(
      CheckAttribute(kernel, info, "output_tensor_types", [](const OutputSpec& output, int64_t value) {
        DLDataType dtype;
        auto type = static_cast<OrtElementType>(value);
        return type == value && ToDLDataType(type, &dtype) && dtype == output.dtype;
      }));
  return CheckAttribute(kernel, info, "output_tensor_ranks",
                        [](const OutputSpec& output, int64_t value) { return value == output.rank; });
}

// Reads which outputs share an input's memory, for a node that torch2ort prepared: a file cannot contain it.
OrtStatus* ReadHandedOn(Kernel* kernel, const OrtKernelInfo* info) {
  const OrtApi* api = kernel->api;
  size_t outputs = 0, count = 0;
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetOutputCount(info, &outputs));
  kernel->handed_on.assign(outputs, false);
  if (!kernel->keeps_errors) return nullptr;
  if (OrtStatus* status = api->KernelInfoGetAttributeArray_int64(info, "handed_on", nullptr, &count)) {
    api->ReleaseStatus(status);  // the node does not have this attribute
    return nullptr;
  }
  std::vector<int64_t> positions(count);
  T2O_RETURN_IF_ERROR(api->KernelInfoGetAttributeArray_int64(info, "handed_on", positions.data(), &count));
  bool good = !kernel->on_cuda && PyObject_TypeCheck(kernel->callee, site_type);
  for (int64_t position : positions) {
    good = good && position > 0 && static_cast<size_t>(position) < outputs;
    if (good) kernel->handed_on[static_cast<size_t>(position)] = true;
  }
  return good ? nullptr : Fail(api, kernel->where + ": its attribute 'handed_on' is of no such node");
}

// Checks that node and site agree in every type, so no call has to check types again.
OrtStatus* CheckNode(Kernel* node, const OrtKernelInfo* info) {
  const Kernel& kernel = *node;
  const OrtApi* api = kernel.api;
  const auto& inputs = kernel.input_dtypes;
  const auto& outputs = OutputsOf(kernel.callee);
  size_t input_count = 0, output_count = 0;
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputCount(info, &input_count));
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetOutputCount(info, &output_count));
  T2O_RETURN_IF_ERROR(CheckCount(kernel, "inputs", input_count, inputs.size()));
  T2O_RETURN_IF_ERROR(CheckCount(kernel, "outputs", output_count, outputs.size() + 1));
  OrtTypeInfo* type = nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputTypeInfo(info, i, &type));
    T2O_RETURN_IF_ERROR(CheckType(kernel, type, "input", i, inputs[i]));
  }
  for (size_t i = 0; i < output_count; ++i) {
    std::string name = ReadString(
        api, [&](char* out, size_t* size) { return api->KernelInfo_GetOutputName(info, i, out, size); });
    if (i == 0) node->writes_context = !name.empty();
    if (name.empty()) continue;
    T2O_RETURN_IF_ERROR(api->KernelInfo_GetOutputTypeInfo(info, i, &type));
    bool of_sizes = i == 0 || kernel.handed_on[i];
    DLDataType expected = of_sizes ? DLDataType{kDLInt, 64, 1} : outputs[i - 1].dtype;
    T2O_RETURN_IF_ERROR(CheckType(kernel, type, "output", i, expected));
  }
  return nullptr;
}

// Reads, for a PythonOpGrad, which outputs of forward have a gradient, and the types of its tensors.
// torch2ort created the node in this process, from the site that it calls.
OrtStatus* BindBackward(Kernel* kernel, const OrtKernelInfo* info) {
  const OrtApi* api = kernel->api;
  const auto& outputs = OutputsOf(kernel->callee);
  size_t count = 0, given = 0, taken = 0;
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputCount(info, &given));
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetOutputCount(info, &taken));
  T2O_RETURN_IF_ERROR(api->KernelInfoGetAttributeArray_int64(info, "gradients", nullptr, &count));
  std::vector<int64_t> positions(count);
  T2O_RETURN_IF_ERROR(api->KernelInfoGetAttributeArray_int64(info, "gradients", positions.data(), &count));
  size_t needed = 0;
  for (const InputSpec* input : InputsOf(kernel->callee)) needed += input->needs_grad;
  T2O_RETURN_IF_ERROR(CheckCount(*kernel, "inputs", given, positions.size()));
  T2O_RETURN_IF_ERROR(CheckCount(*kernel, "outputs", taken, needed + 1));
  kernel->tensors = outputs.size();
  OrtTypeInfo* type = nullptr;
  for (size_t i = 0; i < positions.size(); ++i) {
    auto slot = static_cast<size_t>(positions[i]);
    if (slot >= outputs.size()) return CheckCount(*kernel, "outputs of forward", slot + 1, outputs.size());
    kernel->slots.push_back(slot);
    kernel->input_dtypes.push_back(outputs[slot].dtype);
    T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputTypeInfo(info, i, &type));
    T2O_RETURN_IF_ERROR(CheckType(*kernel, type, "gradient", i, outputs[slot].dtype));
  }
  return nullptr;
}

OrtStatus* Bind(Kernel* kernel, const OrtKernelInfo* info) {
  const OrtApi* api = kernel->api;
  std::string name = ReadAttribute(api, info, "func_name");
  std::string node =
      ReadString(api, [&](char* out, size_t* size) { return api->KernelInfo_GetNodeName(info, out, size); });
  kernel->where = (kernel->backward ? "PythonOpGrad " : "PythonOp ") + name + " (node '" + node + "')";
  if (kernel->on_cuda && !cuda_tried) {
    return Fail(
        api,
        kernel->where +
            ": Functions on the CUDAExecutionProvider were never run on a GPU by torch2ort's tests; use the "
            "CPUExecutionProvider, or call torch2ort.runtime.stock.try_cuda() and compare with eager");
  }
  if (!PythonRuns()) return Fail(api, kernel->where + ": its Function needs a running Python interpreter");
  std::string key = ReadAttribute(api, info, "site_key");
  kernel->keeps_errors = !key.empty();
  kernel->gives_memory = kernel->keeps_errors && allocator_lent && !kernel->on_cuda;
  Gil gil;
  kernel->callee = Resolve(name, key, ReadAttribute(api, info, "site"));
  if (kernel->callee == nullptr) return StatusOfException(api, kernel->where, kernel->keeps_errors);
  if (PyObject_TypeCheck(kernel->callee, direct_call_type)) {
    kernel->direct = kernel->callee;
    kernel->callee = Ref::Share(AsDirectCall(kernel->direct)->site).release();
    if (!kernel->on_cuda && !kernel->backward) kernel->way = Way::kUntried;
  }
  T2O_RETURN_IF_ERROR(ReadHandedOn(kernel, info));
  if (kernel->backward) return BindBackward(kernel, info);
  for (const InputSpec* input : InputsOf(kernel->callee)) {
    kernel->slots.push_back(kernel->tensors++);
    kernel->input_dtypes.push_back(input->dtype);
  }
  T2O_RETURN_IF_ERROR(CheckNode(kernel, info));
  return CheckAttributes(*kernel, info);
}

}  // namespace

OrtStatus* CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  auto* kernel = new (std::nothrow) Kernel;
  if (kernel == nullptr) return api->CreateStatus(kOrtFail, "torch2ort: no memory for a kernel");
  kernel->api = api;
  kernel->has_shape_reference = has_shape_reference;
  kernel->on_cuda = std::strcmp(op->GetExecutionProviderType(op), "CUDAExecutionProvider") == 0;
  kernel->backward = std::strcmp(op->GetName(op), "PythonOpGrad") == 0;
  OrtStatus* status = WithoutExceptions(api, [&] { return Bind(kernel, info); });
  if (status != nullptr) {
    DestroyKernel(kernel);
    return status;
  }
  *out = kernel;
  return nullptr;
}

void DestroyKernel(void* object) {
  auto* kernel = static_cast<Kernel*>(object);
  // A session that outlives the interpreter does not release its sites.
  if (kernel->callee != nullptr && PythonRuns()) {
    Gil gil;
    Py_DECREF(kernel->callee);
    Py_XDECREF(kernel->direct);
  }
  delete kernel;
}

}  // namespace torch2ort
