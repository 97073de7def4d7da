#include "step/ort_value.h"

#include <algorithm>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

// The result of a method without arguments.
Ref Asked(PyObject* tensor, PyObject* method) {
  return Ref::Steal(PyObject_CallMethodObjArgs(tensor, method, nullptr));
}

OrtElementType ElementTypeOf(DLDataType dtype) {
  for (int32_t type = kOrtFloat; type <= kOrtFloat8E5M2FNUZ; ++type) {
    DLDataType known;
    if (ToDLDataType(static_cast<OrtElementType>(type), &known) && known == dtype)
      return static_cast<OrtElementType>(type);
  }
  return kOrtUndefined;
}

// The memory of all values on the CPU; created once, and never released.
const OrtMemoryInfo* CpuMemory() {
  static OrtMemoryInfo* const info = [] {
    OrtMemoryInfo* made = nullptr;
    bool good = Succeeded(ort_api->CreateMemoryInfo("Cpu", kOrtDeviceAllocator, 0, kOrtMemoryDefault, &made));
    return good ? made : nullptr;
  }();
  return info;
}

// Describes sizes and type of a value on the CPU, over its memory. False with an exception set on failure.
bool Describe(const Value& value, std::vector<int64_t>* shape_and_strides, DLTensor* tensor) {
  OrtElementType type = kOrtUndefined;
  const int64_t* sizes = nullptr;
  size_t rank = 0;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (has_shape_reference) {
    if (!Succeeded(ort_api->GetTensorElementTypeAndShapeDataReference(value.ort, &type, &sizes, &rank)))
      return false;
    shape_and_strides->assign(sizes, sizes + rank);
  } else {
    if (!Succeeded(ort_api->GetTensorTypeAndShape(value.ort, &info))) return false;
    OrtStatus* status = ort_api->GetTensorElementType(info, &type);
    if (status == nullptr) status = ort_api->GetDimensionsCount(info, &rank);
    shape_and_strides->resize(rank);
    if (status == nullptr) status = ort_api->GetDimensions(info, shape_and_strides->data(), rank);
    ort_api->ReleaseTensorTypeAndShapeInfo(info);
    if (!Succeeded(status)) return false;
  }
  *tensor = {};
  tensor->device = {kDLCPU, 0};
  tensor->ndim = static_cast<int32_t>(rank);
  if (!ToDLDataType(type, &tensor->dtype)) {
    PyErr_Format(config.error_type, "a session gave a value of ONNX type %d, which is no type of torch's",
                 static_cast<int>(type));
    return false;
  }
  if (!Succeeded(ort_api->GetTensorMutableData(value.ort, &tensor->data))) return false;
  shape_and_strides->resize(2 * rank);
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    (*shape_and_strides)[rank + i] = stride;
    stride *= std::max<int64_t>((*shape_and_strides)[i], 1);
  }
  return true;
}

// A value that is exported; `Base` is one of DLPack's two structs.
template <typename Base>
struct Output : Base {
  ValuePtr value;
  std::vector<int64_t> shape_and_strides;

  static void Delete(Base* self) { delete static_cast<Output*>(self); }
};

template <typename Base>
std::unique_ptr<Output<Base>> OutputOf(const ValuePtr& value) {
  auto output = std::make_unique<Output<Base>>();
  static_cast<Base&>(*output) = {};
  if (!Describe(*value, &output->shape_and_strides, &output->dl_tensor)) return nullptr;
  output->dl_tensor.shape = output->shape_and_strides.data();
  output->dl_tensor.strides = output->shape_and_strides.data() + output->dl_tensor.ndim;
  output->value = value;
  output->deleter = Output<Base>::Delete;
  return output;
}

}  // namespace

Value::~Value() {
  if (ort != nullptr) ort_api->ReleaseValue(ort);
  // Without an interpreter, torch could not free it.
  if (tensor && !PythonRuns()) static_cast<void>(tensor.release());
}

ValuePtr ValueOf(PyObject* tensor) {
  // Another tensor over the same memory, as the caller's may get other memory (`tensor.data = ...`). The
  // memory may have the negative bit set, which DLPack does not represent: that of torch.imag(x.conj()), for
  // example.
  static PyObject* const detach = PyUnicode_InternFromString("detach");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const resolve_neg = PyUnicode_InternFromString("resolve_neg");
  Ref alias = Asked(tensor, detach);
  Ref negative = alias ? Asked(alias.get(), is_neg) : Ref();
  if (negative.get() == Py_True) alias = Asked(alias.get(), resolve_neg);
  if (!negative || !alias) return nullptr;
  auto value = std::make_shared<Value>();
  value->tensor = ExportTensor(alias.get());
  if (!value->tensor || CpuMemory() == nullptr) return nullptr;
  const DLTensor& given = value->tensor->dl_tensor;
  OrtElementType type = ElementTypeOf(given.dtype);
  if (type == kOrtUndefined) {
    PyErr_Format(config.error_type, "a tensor of %s cannot be given to onnxruntime",
                 DTypeName(given.dtype).c_str());
    return nullptr;
  }
  // A tensor without elements may have no address, which the runtime would interpret as no memory.
  static char nowhere[64];
  Span span = SpanOf(given);
  void* data = span.size() > 0 ? reinterpret_cast<void*>(span.begin) : nowhere;
  if (!Succeeded(ort_api->CreateTensorWithDataAsOrtValue(CpuMemory(), data, static_cast<size_t>(span.size()),
                                                         given.shape, static_cast<size_t>(given.ndim), type,
                                                         &value->ort)))
    return nullptr;
  return value;
}

Ref TensorOf(const ValuePtr& value) {
  auto output = OutputOf<DLManagedTensorVersioned>(value);
  if (!output) return {};
  output->version = {kDLPackMajor, 0};
  return ImportManaged(Managed(output.release()));
}

DLManagedTensor* DonationOf(const ValuePtr& value) { return OutputOf<DLManagedTensor>(value).release(); }

std::string StatusText(OrtStatus* status) {
  // The wording of onnxruntime's Python package.
  static const char* const names[] = {"SUCCESS",           "FAIL",
                                      "INVALID_ARGUMENT",  "NO_SUCHFILE",
                                      "NO_MODEL",          "ENGINE_ERROR",
                                      "RUNTIME_EXCEPTION", "INVALID_PROTOBUF",
                                      "MODEL_LOADED",      "NOT_IMPLEMENTED",
                                      "INVALID_GRAPH",     "EP_FAIL"};
  auto code = static_cast<size_t>(ort_api->GetErrorCode(status));
  std::string text = "[ONNXRuntimeError] : " + std::to_string(code) + " : " +
                     (code < std::size(names) ? names[code] : "GENERAL ERROR") + " : " +
                     ort_api->GetErrorMessage(status);
  ort_api->ReleaseStatus(status);
  return text;
}

bool Succeeded(OrtStatus* status) {
  if (status == nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, StatusText(status).c_str());
  return false;
}

}  // namespace torch2ort
