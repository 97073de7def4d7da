// com.microsoft::Donated: a value that a forward session donated to this backward session.
//
// An input of a session stays alive until the run ends. The output of a node is free after its last use, so
// backward frees activations while it runs.
#include <cstring>
#include <new>
#include <string>

#include "call/run_state.h"
#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

struct Donation {
  const OrtApi* api;
  size_t index;  // among the values that the run's forward donated
};

OrtStatus* Create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  int64_t index = 0;
  size_t count = 1;
  T2O_RETURN_IF_ERROR(api->KernelInfoGetAttributeArray_int64(info, "index", &index, &count));
  *out = new (std::nothrow) Donation{api, static_cast<size_t>(index)};
  return *out == nullptr ? api->CreateStatus(kOrtFail, "torch2ort: no memory for a kernel") : nullptr;
}

OrtStatus* Hand(const Donation& donation, OrtKernelContext* context) {
  const OrtApi* api = donation.api;
  Gil gil;
  Managed value = TakeDonated(donation.index);
  if (!value) return StatusOfException(api, "Donated", true);
  if (value->dl_tensor.device.device_type != kDLCPU) {
    return Fail(api, "Donated: value " + std::to_string(donation.index) + " of forward is on " +
                         DeviceName(value->dl_tensor.device) + ", and a node on the CPU cannot hand it over");
  }
  bool copies = KeepsContexts();
  // The memory belongs to the runtime once it has taken it; the sizes then no longer exist.
  DLTensor tensor = value->dl_tensor;
  std::vector<int64_t> sizes(tensor.shape, tensor.shape + tensor.ndim);
  tensor.shape = sizes.data();
  Span span = SpanOf(tensor);
  OrtValue* output = nullptr;
  {
    Gift offer(copies ? nullptr : &value, span);
    T2O_RETURN_IF_ERROR(api->KernelContext_GetOutput(context, 0, sizes.data(), sizes.size(), &output));
  }
  if (output == nullptr || value == nullptr || span.size() == 0) return nullptr;
  void* target = nullptr;
  T2O_RETURN_IF_ERROR(api->GetTensorMutableData(output, &target));
  std::memcpy(target, reinterpret_cast<void*>(span.begin), static_cast<size_t>(span.size()));
  return nullptr;
}

OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
  const auto& donation = *static_cast<Donation*>(kernel);
  if (!PythonRuns()) return Fail(donation.api, "Donated: the Python interpreter has ended");
  return WithoutExceptions(donation.api, [&] { return Hand(donation, context); });
}

OrtStatus* Infer(const OrtCustomOp*, OrtShapeInferContext* context) {
  return WithoutExceptions(ort_api, [&] { return InferTensors(context, 0); });
}

}  // namespace

OrtCustomOp DonatedOp() {
  OrtCustomOp op{};
  op.version = kOrtApiVersion;
  op.GetName = [](const OrtCustomOp*) { return "Donated"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{0}; };
  // As for PythonOp: the only kind of output whose type ONNX Runtime lets a node determine.
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtUndefined; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kOrtVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.CreateKernelV2 = Create;
  op.KernelComputeV2 = Compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Donation*>(kernel); };
  op.InferOutputShapeFn = Infer;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  return op;
}

}  // namespace torch2ort
