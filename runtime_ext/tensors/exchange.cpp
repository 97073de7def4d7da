#include "tensors/exchange.h"

#include <algorithm>
#include <cstring>

namespace torch2ort {

Configuration config;

bool CheckConfigured() {
  if (config.exchange != nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, "torch2ort._native is not configured: call configure() first");
  return false;
}

void Loan::Drop() {
  if (holders.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (give_back != nullptr) give_back(owner);
  delete this;
}

Loan* Lend(const DLTensor& tensor, void* owner, void (*give_back)(void* owner)) {
  auto* loan = new Loan;
  loan->version = {kDLPackMajor, 0};
  loan->manager_ctx = nullptr;
  loan->deleter = [](DLManagedTensorVersioned* self) { static_cast<Loan*>(self)->Drop(); };
  loan->flags = 0;
  loan->dl_tensor = tensor;
  loan->holders.store(1, std::memory_order_relaxed);
  loan->owner = owner;
  loan->give_back = give_back;
  return loan;
}

Loan* LendVersioned(DLManagedTensorVersioned* tensor) {
  return Lend(tensor->dl_tensor, tensor,
              [](void* owner) { ReleaseManaged()(static_cast<DLManagedTensorVersioned*>(owner)); });
}

PyObject* ImportLoan(Loan* loan) {
  loan->Hold();
  void* tensor = nullptr;
  // On failure, it is unknown whether torch ran the deleter: the memory is leaked rather than freed twice.
  if (config.exchange->managed_tensor_to_py_object_no_sync(loan, &tensor) != 0) return nullptr;
  return static_cast<PyObject*>(tensor);
}

Loan* LendFeed(const DLTensor& tensor, PyObject* feed) {
  Managed owner = ExportTensor(feed);
  if (owner == nullptr) return nullptr;
  Loan* loan = LendVersioned(owner.release());
  loan->dl_tensor = tensor;
  loan->lasting = true;
  return loan;
}

namespace {

struct LoanOutput : DLManagedTensorVersioned {
  std::unique_ptr<int64_t[]> shape_and_strides;
};

}  // namespace

DLManagedTensorVersioned* ExportLoan(Loan* loan, const DLTensor& view) {
  auto* output = new LoanOutput;
  output->version = {kDLPackMajor, 0};
  output->manager_ctx = loan;
  output->deleter = [](DLManagedTensorVersioned* self) {
    static_cast<Loan*>(self->manager_ctx)->Drop();
    delete static_cast<LoanOutput*>(self);
  };
  output->flags = 0;
  output->dl_tensor = view;
  size_t rank = static_cast<size_t>(view.ndim);
  output->shape_and_strides = std::make_unique<int64_t[]>(2 * rank);
  std::copy_n(view.shape, rank, output->shape_and_strides.get());
  output->dl_tensor.shape = output->shape_and_strides.get();
  if (view.strides != nullptr) {
    std::copy_n(view.strides, rank, output->shape_and_strides.get() + rank);
    output->dl_tensor.strides = output->shape_and_strides.get() + rank;
  }
  loan->Hold();
  return output;
}

Managed ExportTensor(PyObject* tensor) {
  DLManagedTensorVersioned* managed = nullptr;
  if (config.exchange->managed_tensor_from_py_object_no_sync(tensor, &managed) != 0) return nullptr;
  return Managed(managed);
}

Ref ImportManaged(Managed tensor) {
  void* object = nullptr;
  if (config.exchange->managed_tensor_to_py_object_no_sync(tensor.release(), &object) != 0) return {};
  return Ref::Steal(static_cast<PyObject*>(object));
}

Ref Zeros(const int64_t* shape, int32_t rank, DLDataType dtype, DLDevice device) {
  DLTensor prototype{};
  prototype.device = device;
  prototype.ndim = rank;
  prototype.dtype = dtype;
  prototype.shape = const_cast<int64_t*>(shape);
  DLManagedTensorVersioned* managed = nullptr;
  auto set_error = [](void*, const char* kind, const char* message) {
    PyErr_Format(PyExc_RuntimeError, "%s: %s", kind, message);
  };
  if (config.exchange->managed_tensor_allocator(&prototype, &managed, nullptr, set_error) != 0) return {};
  Span span = SpanOf(managed->dl_tensor);
  if (device.device_type == kDLCPU) {
    if (span.begin != 0 && span.size() > 0)
      std::memset(reinterpret_cast<void*>(span.begin), 0, static_cast<size_t>(span.size()));
    return ImportManaged(Managed(managed));
  }
  Ref tensor = ImportManaged(Managed(managed));
  if (!tensor) return {};
  return Ref::Steal(PyObject_CallMethod(tensor.get(), "zero_", nullptr));
}

namespace {

// Beside a zero, the other sizes are arbitrary: their product may overflow.
bool IsEmpty(const DLTensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

}  // namespace

int64_t ElementCount(const DLTensor& tensor) {
  if (IsEmpty(tensor)) return 0;
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  return count;
}

Span SpanOf(const DLTensor& tensor) {
  if (IsEmpty(tensor)) return {};
  int64_t last = 0;
  int64_t stride = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    last += (tensor.shape[i] - 1) * (tensor.strides != nullptr ? tensor.strides[i] : stride);
    stride *= tensor.shape[i];
  }
  auto begin = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  auto bytes = static_cast<uintptr_t>(last + 1) * ((tensor.dtype.bits * tensor.dtype.lanes + 7) / 8);
  return {begin, begin + bytes};
}

bool IsContiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr || IsEmpty(tensor)) return true;
  int64_t expected = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

namespace {

struct NamedDType {
  const char* name;
  DLDataType dtype;
};

constexpr NamedDType kDTypes[] = {
    {"float32", {kDLFloat, 32, 1}},
    {"float64", {kDLFloat, 64, 1}},
    {"float16", {kDLFloat, 16, 1}},
    {"bfloat16", {kDLBfloat, 16, 1}},
    {"int64", {kDLInt, 64, 1}},
    {"int32", {kDLInt, 32, 1}},
    {"int16", {kDLInt, 16, 1}},
    {"int8", {kDLInt, 8, 1}},
    {"uint8", {kDLUInt, 8, 1}},
    {"uint16", {kDLUInt, 16, 1}},
    {"uint32", {kDLUInt, 32, 1}},
    {"uint64", {kDLUInt, 64, 1}},
    {"bool", {kDLBool, 8, 1}},
    {"complex32", {kDLComplex, 32, 1}},
    {"complex64", {kDLComplex, 64, 1}},
    {"complex128", {kDLComplex, 128, 1}},
    {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e4m3fnuz", {kDLFloat8_e4m3fnuz, 8, 1}},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
    {"float8_e5m2fnuz", {kDLFloat8_e5m2fnuz, 8, 1}},
};

}  // namespace

bool ParseDType(PyObject* name, DLDataType* dtype) {
  const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, nullptr) : nullptr;
  for (const NamedDType& known : kDTypes) {
    if (text != nullptr && std::strcmp(text, known.name) == 0) {
      *dtype = known.dtype;
      return true;
    }
  }
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_ValueError, "unknown dtype %R: expected a name such as 'float32'", name);
  return false;
}

std::string DTypeName(DLDataType dtype) {
  for (const NamedDType& known : kDTypes) {
    if (known.dtype == dtype) return known.name;
  }
  return "DLPack dtype code " + std::to_string(dtype.code) + " with " + std::to_string(dtype.bits) + " bits";
}

std::string ShapeText(const int64_t* shape, int32_t rank) {
  std::string text = "[";
  for (int32_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::string DeviceName(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  constexpr int32_t kCuda = 2, kRocm = 10;  // torch uses one name for both
  return (device.device_type == kCuda || device.device_type == kRocm
              ? "cuda:"
              : "DLPack device type " + std::to_string(device.device_type) + ", number ") +
         std::to_string(device.device_id);
}

}  // namespace torch2ort
