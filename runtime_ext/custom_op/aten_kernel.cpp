// Runs one node without Python: the inputs are in the runtime's memory, an operator of PyTorch runs, and the
// outputs are in memory of the runtime's or of torch's.
#include <cstring>
#include <vector>

#include "call/function_call.h"
#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

// A tensor of torch's, as described to the runtime.
struct Result {
  OwnedTensor tensor;
  DLTensor view{};
  std::vector<int64_t> sizes, strides;
  bool own = false;  // no other tensor has its memory, which is in the order of its elements
};

// The runtime's handle on a tensor whose memory it was given.
struct Given : DLManagedTensorVersioned {
  OwnedTensor owner;
};

Managed Give(Result* result) {
  auto* given = new Given{};
  given->version = {kDLPackMajor, 0};
  given->dl_tensor = result->view;
  given->owner = std::move(result->tensor);
  given->deleter = [](DLManagedTensorVersioned* tensor) { delete static_cast<Given*>(tensor); };
  return Managed(given);
}

class DirectComputation {
 public:
  DirectComputation(const Kernel& kernel, OrtKernelContext* context)
      : kernel_(kernel),
        api_(kernel.api),
        context_(context),
        plan_(*AsDirectCall(kernel.direct)->plan),
        specs_(*AsSite(kernel.callee)->tensor_outputs),
        given_(kernel.slots.size()),
        inputs_(given_ + 1) {}

  bool Run(OrtStatus** status);

 private:
  bool CallToWrite(OrtStatus** status);
  bool Describe(size_t index, Result* result);
  void FindOwners();
  OrtStatus* Write(size_t index, Result* result);
  OrtStatus* WriteNothing(size_t index);
  OrtStatus* CopyTo(void* target, const Result& result);

  const Kernel& kernel_;
  const OrtApi* api_;
  OrtKernelContext* context_;
  const Plan& plan_;
  const std::vector<OutputSpec>& specs_;
  DLDevice device_{kDLCPU, 0};
  Sizes sizes_;
  size_t given_;
  SmallArray<DLTensor, 8> inputs_;  // after the inputs there is room for the result
  std::vector<Result> results_;
};

bool DirectComputation::Run(OrtStatus** status) {
  for (size_t i = 0; i < given_; ++i) {
    *status = ReadInput(kernel_, context_, i, &device_, &sizes_, &inputs_[i]);
    if (*status != nullptr) return true;
  }
  if (plan_.written) return CallToWrite(status);
  std::vector<OwnedTensor> found;
  if (!CallOperator(plan_, inputs_.data(), &found)) return false;
  results_.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    results_[i].tensor = std::move(found[i]);
    if (plan_.results[i].computed && !Describe(i, &results_[i])) return false;
  }
  FindOwners();
  for (size_t i = 0; i < results_.size() && *status == nullptr; ++i) {
    *status = plan_.results[i].computed ? Write(i, &results_[i]) : WriteNothing(i);
  }
  return true;
}

// Makes the operator write into the runtime's own memory.
bool DirectComputation::CallToWrite(OrtStatus** status) {
  std::vector<int64_t> sizes;
  if (!SizesOfWritten(plan_, inputs_.data(), &sizes)) return false;
  OrtValue* value = nullptr;
  void* target = nullptr;
  *status = api_->KernelContext_GetOutput(context_, 1, sizes.data(), sizes.size(), &value);
  if (*status != nullptr) return true;
  if (value == nullptr) return false;
  *status = api_->GetTensorMutableData(value, &target);
  if (*status != nullptr) return true;
  inputs_[given_] = {target,  device_, static_cast<int32_t>(sizes.size()), specs_[0].dtype, sizes.data(),
                     nullptr, 0};
  std::vector<OwnedTensor> found;
  return CallOperator(plan_, inputs_.data(), &found);
}

// Describes a result; false if it differs from the site's types.
bool DirectComputation::Describe(size_t index, Result* result) {
  const TorchAbi& torch = *plan_.torch;
  const OutputSpec& spec = specs_[index];
  TensorHandle tensor = result->tensor.get();
  bool defined = false;
  int32_t dtype = 0, layout = 0;
  int64_t rank = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  if (torch.is_defined(tensor, &defined) != 0 || !defined) return false;
  if (torch.get_layout(tensor, &layout) != 0 || layout != torch.strided) return false;
  if (torch.get_dtype(tensor, &dtype) != 0 || dtype != TorchDType(torch, spec.dtype)) return false;
  if (torch.get_dim(tensor, &rank) != 0 || rank != spec.rank) return false;
  if (torch.get_sizes(tensor, &sizes) != 0 || torch.get_strides(tensor, &strides) != 0) return false;
  if (torch.get_data_ptr(tensor, &data) != 0) return false;
  const std::vector<int64_t>& order = plan_.results[index].order;
  if (!order.empty() && order.size() != static_cast<size_t>(rank)) return false;
  for (size_t i = 0; i < static_cast<size_t>(rank); ++i) {
    size_t d = order.empty() ? i : static_cast<size_t>(order[i]);
    result->sizes.push_back(sizes[d]);
    result->strides.push_back(strides[d]);
  }
  result->view = {
      data, device_, static_cast<int32_t>(rank), spec.dtype, result->sizes.data(), result->strides.data(), 0};
  // torch allocates no memory for some zeros, such as the derivative of `sgn`: Python handles them.
  return data != nullptr || ElementCount(result->view) == 0;
}

// An argument's memory is the runtime's already, and of two results with one memory, only one may have it.
void DirectComputation::FindOwners() {
  for (size_t i = 0; i < results_.size(); ++i) {
    Result& result = results_[i];
    if (!plan_.results[i].computed) continue;
    Span span = SpanOf(result.view);
    result.own = IsContiguous(result.view);
    for (size_t j = 0; j < given_; ++j) result.own &= !span.Overlaps(SpanOf(inputs_[j]));
    for (size_t j = 0; j < results_.size(); ++j) {
      bool other = j != i && plan_.results[j].computed;
      if (other) result.own &= !span.Overlaps(SpanOf(results_[j].view));
    }
  }
}

OrtStatus* DirectComputation::Write(size_t index, Result* result) {
  Span span = SpanOf(result->view);
  bool give = kernel_.gives_memory && result->own && span.size() >= kLargeOutputBytes;
  Managed gift = give ? Give(result) : nullptr;
  OrtValue* value = nullptr;
  {
    Gift offer(give ? &gift : nullptr, span);
    T2O_RETURN_IF_ERROR(api_->KernelContext_GetOutput(context_, index + 1, result->sizes.data(),
                                                      result->sizes.size(), &value));
  }
  bool taken = give && gift == nullptr;
  if (value == nullptr || span.size() == 0 || taken) return nullptr;
  void* target = nullptr;
  T2O_RETURN_IF_ERROR(api_->GetTensorMutableData(value, &target));
  return CopyTo(target, *result);
}

OrtStatus* DirectComputation::CopyTo(void* target, const Result& result) {
  Span span = SpanOf(result.view);
  if (IsContiguous(result.view)) {
    std::memcpy(target, reinterpret_cast<void*>(span.begin), static_cast<size_t>(span.size()));
    return nullptr;
  }
  const TorchAbi& torch = *plan_.torch;
  DLTensor copy = result.view;
  copy.data = target;
  copy.strides = nullptr;
  OwnedTensor from(torch, Borrow(torch, result.view, {})), to(torch, Borrow(torch, copy, {}));
  if (from && to && torch.copy(to.get(), from.get(), 0) == 0) return nullptr;
  return Fail(api_, kernel_.where + ": torch could not copy a result");
}

// An output that a mask omits is unused.
OrtStatus* DirectComputation::WriteNothing(size_t index) {
  std::vector<int64_t> sizes(static_cast<size_t>(specs_[index].rank));
  OrtValue* value = nullptr;
  return api_->KernelContext_GetOutput(context_, index + 1, sizes.data(), sizes.size(), &value);
}

}  // namespace

bool ComputeDirectly(const Kernel& kernel, OrtKernelContext* context, OrtStatus** status) {
  try {
    const auto& region = AsDirectCall(kernel.direct)->plan->region;
    if (region) return ComputeRegion(kernel, *region, context, status);
    return DirectComputation(kernel, context).Run(status);
  } catch (const std::exception& error) {
    *status = Fail(kernel.api, kernel.where + ": " + error.what());
    return true;
  }
}

}  // namespace torch2ort
