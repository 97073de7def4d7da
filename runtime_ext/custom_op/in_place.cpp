// com.microsoft::Owned and com.microsoft::Aliased: the nodes by which in-place maps become part of ONNX
// Runtime's memory plan.
//
// A Function that writes to an argument gets Owned's output: the argument's memory if ONNX Runtime plans no
// later use of it, else a copy. A result in an argument's memory is passed on as Aliased's output: the same
// memory, which ONNX Runtime then keeps for both values, or a copy for an output of the graph.
#include <cstring>
#include <new>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

// ONNX Runtime reads the maps of an operator from this version on.
constexpr uint32_t kReadsMaps = 18;

struct Memory {
  const OrtApi* api;
  bool has_shape_reference;
  bool takes_sizes;  // true for Aliased, whose second input contains the sizes
  int64_t item_bytes;
};

// Checks that the tensor of `info`, which it frees, has elements of that type.
OrtStatus* CheckType(const OrtApi* api, OrtTypeInfo* info, OrtElementType expected) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  OrtElementType type = kOrtUndefined;
  OrtStatus* status = api->CastTypeInfoToTensorInfo(info, &tensor);
  if (status == nullptr && tensor != nullptr) status = api->GetTensorElementType(tensor, &type);
  api->ReleaseTypeInfo(info);
  if (status != nullptr || type == expected) return status;
  return api->CreateStatus(kOrtInvalidArgument, "torch2ort: an in-place node has an input of another type");
}

OrtStatus* Create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  int64_t number = 0;
  size_t count = 1, inputs = 0;
  T2O_RETURN_IF_ERROR(api->KernelInfoGetAttributeArray_int64(info, "output_tensor_types", &number, &count));
  T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputCount(info, &inputs));
  bool takes_sizes = std::strcmp(op->GetName(op), "Aliased") == 0;
  auto type = static_cast<OrtElementType>(number);
  DLDataType dtype{};
  if (!ToDLDataType(type, &dtype) || inputs != (takes_sizes ? 2 : 1)) {
    return api->CreateStatus(kOrtInvalidArgument, "torch2ort: an in-place node is damaged");
  }
  for (size_t i = 0; i < inputs; ++i) {
    OrtTypeInfo* given = nullptr;
    T2O_RETURN_IF_ERROR(api->KernelInfo_GetInputTypeInfo(info, i, &given));
    T2O_RETURN_IF_ERROR(CheckType(api, given, i == 0 ? type : kOrtInt64));
  }
  *out = new (std::nothrow) Memory{api, has_shape_reference, takes_sizes, dtype.bits / 8};
  return *out == nullptr ? api->CreateStatus(kOrtFail, "torch2ort: no memory for a kernel") : nullptr;
}

// A value in the runtime's memory.
struct View {
  const int64_t* sizes = nullptr;
  size_t rank = 0;
  void* data = nullptr;

  // The number of elements; negative for sizes that no tensor has.
  int64_t Count() const {
    int64_t count = 1;
    for (size_t i = 0; i < rank; ++i) {
      if (sizes[i] < 0 || __builtin_mul_overflow(count, sizes[i], &count)) return -1;
    }
    return count;
  }
};

OrtStatus* Read(const Memory& memory, OrtKernelContext* context, size_t index, Sizes* kept, View* view) {
  const OrtValue* value = nullptr;
  T2O_RETURN_IF_ERROR(memory.api->KernelContext_GetInput(context, index, &value));
  if (value == nullptr) return memory.api->CreateStatus(kOrtFail, "torch2ort: an in-place node has no input");
  T2O_RETURN_IF_ERROR(
      SizesOf(memory.api, memory.has_shape_reference, value, kept, &view->sizes, &view->rank));
  return memory.api->GetTensorMutableData(const_cast<OrtValue*>(value), &view->data);
}

OrtStatus* Give(const Memory& memory, OrtKernelContext* context) {
  Sizes kept;
  View from, sizes;
  T2O_RETURN_IF_ERROR(Read(memory, context, 0, &kept, &from));
  View to = from;
  if (memory.takes_sizes) {
    T2O_RETURN_IF_ERROR(Read(memory, context, 1, &kept, &sizes));
    to = {static_cast<const int64_t*>(sizes.data), static_cast<size_t>(sizes.Count()), nullptr};
  }
  int64_t count = to.Count();
  if (count < 0 || count > from.Count()) {
    return memory.api->CreateStatus(kOrtFail, "torch2ort: an output is larger than the memory that it is in");
  }
  OrtValue* output = nullptr;
  T2O_RETURN_IF_ERROR(memory.api->KernelContext_GetOutput(context, 0, to.sizes, to.rank, &output));
  if (output == nullptr || count == 0 || from.data == nullptr) return nullptr;
  T2O_RETURN_IF_ERROR(memory.api->GetTensorMutableData(output, &to.data));
  if (to.data != from.data) std::memcpy(to.data, from.data, static_cast<size_t>(count * memory.item_bytes));
  return nullptr;
}

OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
  const auto& memory = *static_cast<Memory*>(kernel);
  return WithoutExceptions(memory.api, [&] { return Give(memory, context); });
}

OrtStatus* InferOwned(const OrtCustomOp*, OrtShapeInferContext* context) {
  return WithoutExceptions(ort_api, [&] { return InferAsInput(context); });
}

OrtStatus* InferAliased(const OrtCustomOp*, OrtShapeInferContext* context) {
  return WithoutExceptions(ort_api, [&] { return InferTensors(context, 0); });
}

int first = 0;

size_t None(int**, int**) { return 0; }
size_t First(int** inputs, int** outputs) {
  *inputs = *outputs = &first;
  return 1;
}

OrtCustomOp MemoryOp() {
  OrtCustomOp op = VariadicOp();
  op.version = kReadsMaps;
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.CreateKernelV2 = Create;
  op.KernelComputeV2 = Compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Memory*>(kernel); };
  op.GetMayInplace = op.GetAliasMap = None;
  op.ReleaseMayInplace = op.ReleaseAliasMap = [](int*, int*) {};
  return op;
}

}  // namespace

OrtCustomOp OwnedOp() {
  OrtCustomOp op = MemoryOp();
  op.GetName = [](const OrtCustomOp*) { return "Owned"; };
  op.InferOutputShapeFn = InferOwned;
  op.GetMayInplace = First;
  return op;
}

OrtCustomOp AliasedOp() {
  OrtCustomOp op = MemoryOp();
  op.GetName = [](const OrtCustomOp*) { return "Aliased"; };
  op.InferOutputShapeFn = InferAliased;
  op.GetAliasMap = First;
  return op;
}

}  // namespace torch2ort
