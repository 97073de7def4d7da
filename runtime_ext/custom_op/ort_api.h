// The part of ONNX Runtime's C interface that this module uses, declared here so that one binary supports
// every release: https://onnxruntime.ai/docs/api/c/struct_ort_api.html
//
// The table of functions is append-only: a function keeps its slot. The slots below are those of ORT 1.17 and
// later, except where noted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch2ort {

struct OrtEnv;
struct OrtStatus;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtCustomOpDomain;
struct OrtValue;
struct OrtMemoryInfo;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtOpAttr;

enum OrtErrorCode : int32_t { kOrtFail = 1, kOrtInvalidArgument = 2, kOrtNotImplemented = 9 };
enum OrtOpAttrType : int32_t { kOrtAttributeInts = 2 };
enum OrtLoggingLevel : int32_t { kOrtLogError = 3 };
enum OrtAllocatorKind : int32_t { kOrtDeviceAllocator = 0 };
enum OrtTypeKind : int32_t { kOrtUnknown = 0, kOrtTensor = 1 };
enum OrtMemoryType : int32_t { kOrtMemoryDefault = 0 };
enum OrtDeviceKind : int32_t { kOrtCpu = 0, kOrtGpu = 1 };
enum OrtCharacteristic : int32_t { kOrtVariadic = 2 };

// onnx.TensorProto.DataType.
enum OrtElementType : int32_t {
  kOrtUndefined = 0,
  kOrtFloat = 1,
  kOrtUint8 = 2,
  kOrtInt8 = 3,
  kOrtUint16 = 4,
  kOrtInt16 = 5,
  kOrtInt32 = 6,
  kOrtInt64 = 7,
  kOrtBool = 9,
  kOrtFloat16 = 10,
  kOrtDouble = 11,
  kOrtUint32 = 12,
  kOrtUint64 = 13,
  kOrtComplex64 = 14,
  kOrtComplex128 = 15,
  kOrtBfloat16 = 16,
  kOrtFloat8E4M3FN = 17,
  kOrtFloat8E4M3FNUZ = 18,
  kOrtFloat8E5M2 = 19,
  kOrtFloat8E5M2FNUZ = 20,
};

// The oldest table that has every slot in use except the last, and an OrtCustomOp of the layout below.
constexpr uint32_t kOrtApiVersion = 17;
constexpr int kOrtMinorOfShapeReference = 24;  // of ORT 1.x

struct OrtCustomOp;

struct OrtAllocator {
  uint32_t version;
  void* (*Alloc)(OrtAllocator* self, size_t size);
  void (*Free)(OrtAllocator* self, void* data);
  const OrtMemoryInfo* (*Info)(const OrtAllocator* self);
  // Read from version 18 on.
  void* (*Reserve)(OrtAllocator* self, size_t size);
};

// clang-format off
struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message);  // slot 0
  OrtErrorCode (*GetErrorCode)(const OrtStatus* status);  // 1
  const char* (*GetErrorMessage)(const OrtStatus* status);  // 2
  OrtStatus* (*CreateEnv)(OrtLoggingLevel level, const char* name, OrtEnv** out);  // 3; the process's, if there is one
  void* unused_4[3];
  OrtStatus* (*CreateSession)(const OrtEnv* environment, const char* path, const OrtSessionOptions* options, OrtSession** out);  // 7
  OrtStatus* (*CreateSessionFromArray)(const OrtEnv* environment, const void* model, size_t size, const OrtSessionOptions* options, OrtSession** out);  // 8
  OrtStatus* (*Run)(OrtSession* session, const OrtRunOptions* options, const char* const* input_names, const OrtValue* const* inputs, size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs);  // 9
  void* unused_10[16];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);  // 26
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);  // 27
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);  // 28
  void* unused_29[20];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo* info, void* data, size_t bytes, const int64_t* sizes, size_t rank, OrtElementType type, OrtValue** out);  // 49
  void* unused_50;
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);  // 51
  void* unused_52[3];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo* info, const OrtTensorTypeAndShapeInfo** out);  // 55
  OrtStatus* (*GetOnnxTypeFromTypeInfo)(const OrtTypeInfo* info, OrtTypeKind* out);  // 56
  OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** out);  // 57
  OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* info, OrtElementType type);  // 58
  OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo* info, const int64_t* sizes, size_t rank);  // 59
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, OrtElementType* out);  // 60
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);  // 61
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* sizes, size_t rank);  // 62
  OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank);  // 63
  void* unused_64;
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);  // 65
  void* unused_66[2];
  OrtStatus* (*CreateMemoryInfo)(const char* name, OrtAllocatorKind kind, int id, OrtMemoryType type, OrtMemoryInfo** out);  // 68
  void* unused_69[3];
  OrtStatus* (*MemoryInfoGetId)(const OrtMemoryInfo* info, int* out);  // 72
  void* unused_73[12];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name, float* out);  // 85
  void* unused_86;
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo* info, const char* name, char* out, size_t* size);  // 87
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext* context, size_t* out);  // 88
  OrtStatus* (*KernelContext_GetOutputCount)(const OrtKernelContext* context, size_t* out);  // 89
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index, const OrtValue** out);  // 90
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank, OrtValue** out);  // 91
  void (*ReleaseEnv)(OrtEnv* environment);  // 92
  void (*ReleaseStatus)(OrtStatus* status);  // 93
  void* unused_94;
  void (*ReleaseSession)(OrtSession* session);  // 95
  void (*ReleaseValue)(OrtValue* value);  // 96
  void* unused_97;
  void (*ReleaseTypeInfo)(OrtTypeInfo* info);  // 98
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);  // 99
  void* unused_100[30];
  OrtStatus* (*AddSessionConfigEntry)(OrtSessionOptions* options, const char* key, const char* value);  // 130
  void* unused_131[32];
  OrtStatus* (*KernelInfoGetAttributeArray_int64)(const OrtKernelInfo* info, const char* name, int64_t* out, size_t* count);  // 163
  void* unused_164[12];
  OrtStatus* (*RegisterAllocator)(OrtEnv* environment, OrtAllocator* allocator);  // 176
  OrtStatus* (*UnregisterAllocator)(OrtEnv* environment, const OrtMemoryInfo* info);  // 177
  void* unused_178[15];
  OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext* context, void** out);  // 193
  OrtStatus* (*GetTensorMemoryInfo)(const OrtValue* value, const OrtMemoryInfo** out);  // 194
  void* unused_195[30];
  void (*MemoryInfoGetDeviceType)(const OrtMemoryInfo* info, OrtDeviceKind* out);  // 225
  void* unused_226[4];
  OrtStatus* (*KernelInfo_GetInputCount)(const OrtKernelInfo* info, size_t* out);  // 230
  OrtStatus* (*KernelInfo_GetOutputCount)(const OrtKernelInfo* info, size_t* out);  // 231
  void* unused_232;
  OrtStatus* (*KernelInfo_GetOutputName)(const OrtKernelInfo* info, size_t index, char* out, size_t* size);  // 233
  OrtStatus* (*KernelInfo_GetInputTypeInfo)(const OrtKernelInfo* info, size_t index, OrtTypeInfo** out);  // 234
  OrtStatus* (*KernelInfo_GetOutputTypeInfo)(const OrtKernelInfo* info, size_t index, OrtTypeInfo** out);  // 235
  void* unused_236;
  OrtStatus* (*HasSessionConfigEntry)(const OrtSessionOptions* options, const char* key, int* out);  // 237
  void* unused_238[6];
  OrtStatus* (*KernelInfo_GetNodeName)(const OrtKernelInfo* info, char* out, size_t* size);  // 244
  void* unused_245[23];
  OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext* context, size_t index, OrtTensorTypeAndShapeInfo** out);  // 268; the context's
  OrtStatus* (*ShapeInferContext_GetAttribute)(const OrtShapeInferContext* context, const char* name, const OrtOpAttr** out);  // 269
  OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext* context, size_t index, const OrtTensorTypeAndShapeInfo* info);  // 270
  OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank);  // 271
  OrtStatus* (*ReadOpAttr)(const OrtOpAttr* attribute, OrtOpAttrType type, void* out, size_t size, size_t* needed);  // 272
  void* unused_273[141];
  // From 1.24 on; the sizes live as long as the value.
  OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(const OrtValue* value, OrtElementType* type, const int64_t** sizes, size_t* rank);  // 414
};
// clang-format on
static_assert(offsetof(OrtApi, Run) == 9 * sizeof(void*));
static_assert(offsetof(OrtApi, GetTensorTypeAndShape) == 65 * sizeof(void*));
static_assert(offsetof(OrtApi, CreateTensorWithDataAsOrtValue) == 49 * sizeof(void*));
static_assert(offsetof(OrtApi, ReleaseValue) == 96 * sizeof(void*));
static_assert(offsetof(OrtApi, CreateMemoryInfo) == 68 * sizeof(void*));
static_assert(offsetof(OrtApi, RegisterAllocator) == 176 * sizeof(void*));
static_assert(offsetof(OrtApi, KernelContext_GetOutput) == 91 * sizeof(void*));
static_assert(offsetof(OrtApi, KernelContext_GetGPUComputeStream) == 193 * sizeof(void*));
static_assert(offsetof(OrtApi, ReadOpAttr) == 272 * sizeof(void*));
static_assert(offsetof(OrtApi, GetTensorElementTypeAndShapeDataReference) == 414 * sizeof(void*));

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null if the runtime is older
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtMemoryType (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  // Read from version 18 on.
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace torch2ort
