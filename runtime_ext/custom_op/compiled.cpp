// Runs a node that stands for a fused region: memory of the runtime's in and out, no Python and no torch.
#include <algorithm>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

constexpr size_t kAlignment = 64;

size_t Aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// Memory for the length of one call.
class Scratch {
 public:
  explicit Scratch(size_t size) : data_(size > 0 ? TakeBlock(size) : nullptr) {}
  ~Scratch() {
    if (data_ != nullptr) ReturnBlock(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* get() const { return static_cast<char*>(data_); }

 private:
  void* data_;
};

class RegionComputation {
 public:
  RegionComputation(const Kernel& kernel, const CompiledRegion& region, OrtKernelContext* context)
      : kernel_(kernel),
        region_(region),
        context_(context),
        memory_(region.inputs.size() + region.outputs.size() + region.temporaries.size()) {}

  bool Run(OrtStatus** status);

 private:
  OrtStatus* ReadInputs(bool* fits);
  OrtStatus* MakeOutputs();
  size_t OutputSize(size_t index) const;

  const Kernel& kernel_;
  const CompiledRegion& region_;
  OrtKernelContext* context_;
  DLDevice device_{kDLCPU, 0};
  Sizes sizes_;
  SmallArray<char*, 32> memory_;
};

// `fits`: whether the library was compiled for tensors of these sizes.
OrtStatus* RegionComputation::ReadInputs(bool* fits) {
  for (size_t i = 0; i < region_.inputs.size(); ++i) {
    DLTensor tensor{};
    T2O_RETURN_IF_ERROR(ReadInput(kernel_, context_, i, &device_, &sizes_, &tensor));
    const CompiledRegion::Sizes& expected = region_.inputs[i];
    auto rank = static_cast<size_t>(tensor.ndim);
    *fits = rank == expected.size() && std::equal(expected.begin(), expected.end(), tensor.shape);
    if (!*fits) return nullptr;
    memory_[i] = static_cast<char*>(tensor.data);
  }
  return nullptr;
}

// Leaves out those that nobody reads.
OrtStatus* RegionComputation::MakeOutputs() {
  for (size_t i = 0; i < region_.outputs.size(); ++i) {
    const CompiledRegion::Sizes& sizes = region_.outputs[i];
    OrtValue* value = nullptr;
    void* target = nullptr;
    T2O_RETURN_IF_ERROR(
        kernel_.api->KernelContext_GetOutput(context_, i + 1, sizes.data(), sizes.size(), &value));
    if (value == nullptr) continue;
    T2O_RETURN_IF_ERROR(kernel_.api->GetTensorMutableData(value, &target));
    memory_[region_.inputs.size() + i] = static_cast<char*>(target);
  }
  return nullptr;
}

size_t RegionComputation::OutputSize(size_t index) const {
  const DLDataType& dtype = (*AsSite(kernel_.callee)->tensor_outputs)[index].dtype;
  size_t size = dtype.bits / 8;
  for (int64_t dimension : region_.outputs[index]) size *= static_cast<size_t>(dimension);
  return size;
}

bool RegionComputation::Run(OrtStatus** status) {
  bool fits = true;
  *status = ReadInputs(&fits);
  if (*status != nullptr || !fits) return *status != nullptr;
  *status = MakeOutputs();
  if (*status != nullptr) return true;
  // What has no memory yet: outputs that nobody reads, and temporaries.
  size_t first = region_.inputs.size(), count = region_.outputs.size(), total = 0;
  SmallArray<size_t, 16> needed(count + region_.temporaries.size());
  for (size_t i = 0; i < needed.size(); ++i) {
    bool is_output = i < count;
    if (is_output && memory_[first + i] != nullptr) continue;
    needed[i] = Aligned(is_output ? OutputSize(i) : region_.temporaries[i - count]);
    total += needed[i];
  }
  Scratch scratch(total);
  char* next = scratch.get();
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed[i] == 0) continue;
    memory_[first + i] = next;
    next += needed[i];
  }
  return region_.function(memory_.data()) == 0;
}

}  // namespace

bool ComputeRegion(const Kernel& kernel, const CompiledRegion& region, OrtKernelContext* context,
                   OrtStatus** status) {
  return RegionComputation(kernel, region, context).Run(status);
}

}  // namespace torch2ort
