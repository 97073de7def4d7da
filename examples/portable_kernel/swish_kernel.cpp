// A kernel of the operator swish::Swish for ONNX Runtime. Its headers (onnxruntime_c_api.h) declare the same
// names; they come with a release of ONNX Runtime, not with its wheel.
#include <cmath>

#include "custom_op/ort_api.h"

using namespace torch2ort;

static const OrtApi* api;
static long long runs;

struct Swish {
  float beta;

  void Compute(OrtKernelContext* context) {
    const OrtValue* x;
    OrtTensorTypeAndShapeInfo* info;
    size_t rank, count = 1;
    int64_t sizes[8];
    OrtValue* y;
    float *from, *to;
    api->KernelContext_GetInput(context, 0, &x);
    api->GetTensorTypeAndShape(x, &info);
    api->GetDimensionsCount(info, &rank);
    api->GetDimensions(info, sizes, rank);
    api->ReleaseTensorTypeAndShapeInfo(info);
    api->KernelContext_GetOutput(context, 0, sizes, rank, &y);
    api->GetTensorMutableData(const_cast<OrtValue*>(x), reinterpret_cast<void**>(&from));
    api->GetTensorMutableData(y, reinterpret_cast<void**>(&to));
    for (size_t i = 0; i < rank; ++i) count *= sizes[i];
    for (size_t i = 0; i < count; ++i) to[i] = from[i] / (1.0f + std::exp(-beta * from[i]));
    ++runs;
  }
};

static OrtCustomOp Describe() {
  OrtCustomOp op = {};
  op.version = kOrtApiVersion;
  op.GetName = [](const OrtCustomOp*) { return "Swish"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputType = op.GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtFloat; };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) {
    return OrtCharacteristic(0);
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kOrtMemoryDefault; };
  op.CreateKernel = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info) -> void* {
    float beta;
    api->KernelInfoGetAttribute_float(info, "beta", &beta);  // forward's argument of that name
    return new Swish{beta};
  };
  op.KernelCompute = [](void* kernel, OrtKernelContext* context) { static_cast<Swish*>(kernel)->Compute(context); };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Swish*>(kernel); };
  op.GetStartVersion = op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

// ONNX Runtime calls this function of a library that SessionOptions.register_custom_ops_library opens.
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  static const OrtCustomOp op = Describe();
  static OrtCustomOpDomain* domain = nullptr;
  api = base->GetApi(kOrtApiVersion);
  if (domain == nullptr) {
    if (OrtStatus* failed = api->CreateCustomOpDomain("swish", &domain)) return failed;
    if (OrtStatus* failed = api->CustomOpDomain_Add(domain, &op)) return failed;
  }
  return api->AddCustomOpDomain(options, domain);
}

extern "C" long long CountRuns() { return runs; }
