// Types and ranks of a node's outputs, for ONNX Runtime's shape inference.
#include <atomic>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

bool ToDLDataType(OrtElementType type, DLDataType* dtype) {
  auto give = [&](uint8_t code, uint8_t bits) {
    *dtype = {code, bits, 1};
    return true;
  };
  switch (type) {
    case kOrtFloat:
      return give(kDLFloat, 32);
    case kOrtUint8:
      return give(kDLUInt, 8);
    case kOrtInt8:
      return give(kDLInt, 8);
    case kOrtUint16:
      return give(kDLUInt, 16);
    case kOrtInt16:
      return give(kDLInt, 16);
    case kOrtInt32:
      return give(kDLInt, 32);
    case kOrtInt64:
      return give(kDLInt, 64);
    case kOrtBool:
      return give(kDLBool, 8);
    case kOrtFloat16:
      return give(kDLFloat, 16);
    case kOrtDouble:
      return give(kDLFloat, 64);
    case kOrtUint32:
      return give(kDLUInt, 32);
    case kOrtUint64:
      return give(kDLUInt, 64);
    case kOrtComplex64:
      return give(kDLComplex, 64);
    case kOrtComplex128:
      return give(kDLComplex, 128);
    case kOrtBfloat16:
      return give(kDLBfloat, 16);
    case kOrtFloat8E4M3FN:
      return give(kDLFloat8_e4m3fn, 8);
    case kOrtFloat8E4M3FNUZ:
      return give(kDLFloat8_e4m3fnuz, 8);
    case kOrtFloat8E5M2:
      return give(kDLFloat8_e5m2, 8);
    case kOrtFloat8E5M2FNUZ:
      return give(kDLFloat8_e5m2fnuz, 8);
    default:
      return false;
  }
}

namespace {

OrtStatus* ReadInts(const OrtShapeInferContext* context, const char* name, std::vector<int64_t>* values) {
  const OrtOpAttr* attribute = nullptr;
  T2O_RETURN_IF_ERROR(ort_api->ShapeInferContext_GetAttribute(context, name, &attribute));
  size_t bytes = 0;
  // With no space given, the call returns the size that is needed, and fails unless that is zero.
  OrtStatus* status = ort_api->ReadOpAttr(attribute, kOrtAttributeInts, nullptr, 0, &bytes);
  if (status == nullptr) return nullptr;
  if (bytes == 0) return status;
  ort_api->ReleaseStatus(status);
  values->resize(bytes / sizeof(int64_t));
  return ort_api->ReadOpAttr(attribute, kOrtAttributeInts, values->data(), bytes, &bytes);
}

// A size without a name would be the number -1. Each call makes a new name, as sizes with equal names are
// considered equal when memory is reused.
std::string NewName() {
  static std::atomic<uint64_t> serial{0};
  return "torch2ort_size_" + std::to_string(serial++);
}

// `known`: names of sizes, empty for a number or a size without a name so far.
OrtStatus* SetOutput(OrtShapeInferContext* context, size_t index, OrtElementType type,
                     std::vector<int64_t> sizes, std::vector<std::string> known = {}) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  T2O_RETURN_IF_ERROR(ort_api->CreateTensorTypeAndShapeInfo(&info));
  known.resize(sizes.size());
  std::vector<const char*> names;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 && known[i].empty()) known[i] = NewName();
    names.push_back(known[i].c_str());
  }
  OrtStatus* status = ort_api->SetTensorElementType(info, type);
  if (status == nullptr) status = ort_api->SetDimensions(info, sizes.data(), sizes.size());
  if (status == nullptr) status = ort_api->SetSymbolicDimensions(info, names.data(), names.size());
  if (status == nullptr) status = ort_api->ShapeInferContext_SetOutputTypeShape(context, index, info);
  ort_api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

}  // namespace

OrtStatus* InferTensors(OrtShapeInferContext* context, size_t first) {
  std::vector<int64_t> types, ranks;
  T2O_RETURN_IF_ERROR(ReadInts(context, "output_tensor_types", &types));
  T2O_RETURN_IF_ERROR(ReadInts(context, "output_tensor_ranks", &ranks));
  if (types.size() != ranks.size()) {
    std::string message = "torch2ort: a PythonOp node has " + std::to_string(types.size()) +
                          " output_tensor_types but " + std::to_string(ranks.size()) +
                          " output_tensor_ranks; export the model again";
    return ort_api->CreateStatus(kOrtInvalidArgument, message.c_str());
  }
  for (size_t i = 0; i < types.size(); ++i) {
    auto type = static_cast<OrtElementType>(types[i]);
    DLDataType dtype;
    if (types[i] != static_cast<int64_t>(type) || !ToDLDataType(type, &dtype) || ranks[i] < 0 ||
        ranks[i] > kMaxRank) {
      std::string message = "torch2ort: output " + std::to_string(i) +
                            " of a PythonOp node has element type " + std::to_string(types[i]) +
                            " and rank " + std::to_string(ranks[i]) +
                            ", which no tensor has; export the model again";
      return ort_api->CreateStatus(kOrtInvalidArgument, message.c_str());
    }
    T2O_RETURN_IF_ERROR(
        SetOutput(context, first + i, type, std::vector<int64_t>(static_cast<size_t>(ranks[i]), -1)));
  }
  return nullptr;
}

OrtStatus* InferAsInput(OrtShapeInferContext* context) {
  T2O_RETURN_IF_ERROR(InferTensors(context, 0));
  std::vector<int64_t> types, ranks;
  T2O_RETURN_IF_ERROR(ReadInts(context, "output_tensor_types", &types));
  T2O_RETURN_IF_ERROR(ReadInts(context, "output_tensor_ranks", &ranks));
  OrtTensorTypeAndShapeInfo* given = nullptr;
  T2O_RETURN_IF_ERROR(ort_api->ShapeInferContext_GetInputTypeShape(context, 0, &given));
  size_t rank = 0;
  T2O_RETURN_IF_ERROR(ort_api->GetDimensionsCount(given, &rank));
  // An input without a shape has rank 0 here.
  if (types.size() != 1 || static_cast<int64_t>(rank) != ranks[0]) return nullptr;
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank, "");
  T2O_RETURN_IF_ERROR(ort_api->GetDimensions(given, sizes.data(), rank));
  T2O_RETURN_IF_ERROR(ort_api->GetSymbolicDimensions(given, names.data(), rank));
  return SetOutput(context, 0, static_cast<OrtElementType>(types[0]), sizes, {names.begin(), names.end()});
}

OrtStatus* InferOutputs(const OrtCustomOp*, OrtShapeInferContext* context) {
  return WithoutExceptions(ort_api, [&] {
    // The context's type and sizes in ONNX Runtime's own schema.
    OrtStatus* status = SetOutput(context, 0, kOrtInt64, {1});
    return status == nullptr ? InferTensors(context, 1) : status;
  });
}

}  // namespace torch2ort
