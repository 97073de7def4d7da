// Runs a node for a fused region: inputs and outputs are in the runtime's memory, without Python and torch.
#include <algorithm>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

constexpr size_t kAlignment = 64;

size_t Aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// Memory for the duration of one call.
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
        given_(region.input_dimensions),
        varying_(region.varying.size()),
        told_(region.tell == nullptr ? 0 : region.numbers.size()),
        memory_(region.inputs.size() + region.outputs.size() + region.temporaries) {}

  bool Run(OrtStatus** status);

 private:
  OrtStatus* ReadInputs(bool* fits);
  bool FitSizes();
  OrtStatus* MakeOutputs();
  size_t OutputSize(size_t index) const;

  const Kernel& kernel_;
  const CompiledRegion& region_;
  OrtKernelContext* context_;
  DLDevice device_{kDLCPU, 0};
  Sizes sizes_;
  SmallArray<int64_t, 32> given_;  // dimensions of all inputs
  SmallArray<int64_t, 8> varying_;
  SmallArray<int64_t, 64> told_;
  const int64_t* numbers_ = nullptr;  // as `CompiledRegion::numbers`, all of them known
  SmallArray<char*, 32> memory_;
};

// `fits`: true if the library was compiled for tensors of these sizes.
OrtStatus* RegionComputation::ReadInputs(bool* fits) {
  int64_t* next = given_.data();
  for (size_t i = 0; i < region_.inputs.size(); ++i) {
    DLTensor tensor{};
    T2O_RETURN_IF_ERROR(ReadInput(kernel_, context_, i, &device_, &sizes_, &tensor));
    *fits = static_cast<size_t>(tensor.ndim) == region_.inputs[i].rank;
    if (!*fits) return nullptr;
    next = std::copy(tensor.shape, tensor.shape + tensor.ndim, next);
    memory_[i] = static_cast<char*>(tensor.data);
  }
  *fits = FitSizes();
  return nullptr;
}

bool RegionComputation::FitSizes() {
  numbers_ = region_.numbers.data();
  if (region_.tell != nullptr) {
    for (size_t i = 0; i < varying_.size(); ++i) {
      varying_[i] = given_[region_.varying[i]];
      if (varying_[i] < kSmallestSize) return false;
    }
    region_.tell(varying_.data(), told_.data());
    numbers_ = told_.data();
  }
  return std::equal(given_.begin(), given_.end(), numbers_);
}

// Skips outputs that are unused.
OrtStatus* RegionComputation::MakeOutputs() {
  for (size_t i = 0; i < region_.outputs.size(); ++i) {
    const CompiledRegion::Shape& shape = region_.outputs[i];
    OrtValue* value = nullptr;
    void* target = nullptr;
    T2O_RETURN_IF_ERROR(
        kernel_.api->KernelContext_GetOutput(context_, i + 1, numbers_ + shape.begin, shape.rank, &value));
    if (value == nullptr) continue;
    T2O_RETURN_IF_ERROR(kernel_.api->GetTensorMutableData(value, &target));
    memory_[region_.inputs.size() + i] = static_cast<char*>(target);
  }
  return nullptr;
}

size_t RegionComputation::OutputSize(size_t index) const {
  const DLDataType& dtype = (*AsSite(kernel_.callee)->tensor_outputs)[index].dtype;
  size_t size = dtype.bits / 8;
  const CompiledRegion::Shape& shape = region_.outputs[index];
  for (size_t d = 0; d < shape.rank; ++d) size *= static_cast<size_t>(numbers_[shape.begin + d]);
  return size;
}

bool RegionComputation::Run(OrtStatus** status) {
  bool fits = true;
  *status = ReadInputs(&fits);
  if (*status != nullptr || !fits) return *status != nullptr;
  *status = MakeOutputs();
  if (*status != nullptr) return true;
  // The remaining tensors need memory: unused outputs, and temporaries.
  size_t first = region_.inputs.size(), count = region_.outputs.size(), total = 0;
  const int64_t* bytes = numbers_ + region_.numbers.size() - region_.temporaries;
  SmallArray<size_t, 16> needed(count + region_.temporaries);
  for (size_t i = 0; i < needed.size(); ++i) {
    bool is_output = i < count;
    if (is_output && memory_[first + i] != nullptr) continue;
    needed[i] = Aligned(is_output ? OutputSize(i) : static_cast<size_t>(bytes[i - count]));
    total += needed[i];
  }
  Scratch scratch(total);
  char* next = scratch.get();
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed[i] == 0) continue;
    memory_[first + i] = next;
    next += needed[i];
  }
  return region_.function(memory_.data(), varying_.data()) == 0;
}

}  // namespace

bool ComputeRegion(const Kernel& kernel, const CompiledRegion& region, OrtKernelContext* context,
                   OrtStatus** status) {
  return RegionComputation(kernel, region, context).Run(status);
}

}  // namespace torch2ort
