// Runs one node: reads its inputs, calls the policy, writes its outputs.
#include <cstring>
#include <vector>

#include "call/function_call.h"
#include "call/run_state.h"
#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

constexpr int32_t kDLCUDA = 2;

// Disables gradient recording, as eager PyTorch does around a Function's forward, and enables it at the end.
class NoGrad {
 public:
  NoGrad() {
    Ref enabled = Ref::Steal(PyObject_CallNoArgs(custom_op_config.is_grad_enabled));
    failed_ = !enabled;
    if (enabled.get() == Py_True && Set(Py_False)) was_enabled_ = true;
  }
  ~NoGrad() {
    if (was_enabled_ && !Set(Py_True)) PyErr_Clear();
  }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;
  bool failed() const { return failed_; }

 private:
  bool Set(PyObject* value) {
    failed_ |= !Ref::Steal(CallOne(custom_op_config.set_grad_enabled, value));
    return !failed_;
  }

  bool was_enabled_ = false;
  bool failed_ = false;
};

// On CUDA, makes ONNX Runtime's stream torch's current one: both queue their work on it, without waiting.
class OnStream {
 public:
  bool Enter(void* stream, int device) {
    stream_ = Ref::Steal(PyObject_CallFunction(custom_op_config.stream, "Ki",
                                               reinterpret_cast<unsigned long long>(stream), device));
    if (!stream_ || !Ref::Steal(PyObject_CallMethod(stream_.get(), "__enter__", nullptr))) {
      stream_.reset();
      return false;
    }
    return true;
  }
  ~OnStream() {
    if (!stream_) return;
    if (!Ref::Steal(PyObject_CallMethod(stream_.get(), "__exit__", "OOO", Py_None, Py_None, Py_None)))
      PyErr_Clear();
  }

 private:
  Ref stream_;
};

class Computation {
 public:
  Computation(const Kernel& kernel, OrtKernelContext* context)
      : kernel_(kernel), api_(kernel.api), context_(context), loans_(kernel.tensors) {
    // The device of a node without inputs is not determined by them.
    if (kernel.on_cuda) device_.device_type = kDLCUDA;
  }

  OrtStatus* Run();

 private:
  OrtStatus* Lend(size_t index);
  OrtStatus* EnterStream(OnStream* stream);
  OrtStatus* Write(size_t index, const DLTensor& tensor, Managed* gift);
  OrtStatus* WriteOutputs(std::vector<Managed>* outputs, std::vector<Ref>* storages);
  OrtStatus* WriteGradients(std::vector<Managed>* gradients, std::vector<Ref>* storages);
  OrtStatus* Give(size_t index, Managed* result, Ref* storage);
  OrtStatus* WriteSizes(size_t index, const DLTensor& tensor);
  OrtStatus* HandOn(size_t index, const DLTensor& gradient, const DLTensor& memory);
  OrtStatus* WriteContext();
  OrtStatus* CopyOnDevice(const DLTensor& from, const DLTensor& to);
  OrtStatus* PythonError() { return StatusOfException(api_, kernel_.where, kernel_.keeps_errors); }

  const Kernel& kernel_;
  const OrtApi* api_;
  OrtKernelContext* context_;
  DLDevice device_{kDLCPU, 0};
  Sizes sizes_;
  Loans loans_;
};

OrtStatus* Computation::Lend(size_t index) {
  DLTensor tensor{};
  T2O_RETURN_IF_ERROR(ReadInput(kernel_, context_, index, &device_, &sizes_, &tensor));
  PyObject* feed = kernel_.backward ? nullptr : FeedAt(tensor.data);
  Loan* loan = feed == nullptr ? torch2ort::Lend(tensor, nullptr, nullptr) : LendFeed(tensor, feed);
  loans_[kernel_.slots[index]] = loan;
  return loan == nullptr ? PythonError() : nullptr;
}

OrtStatus* Computation::EnterStream(OnStream* stream) {
  if (!kernel_.on_cuda) return nullptr;
  void* pointer = nullptr;
  T2O_RETURN_IF_ERROR(api_->KernelContext_GetGPUComputeStream(context_, &pointer));
  return stream->Enter(pointer, device_.device_id) ? nullptr : PythonError();
}

OrtStatus* Computation::CopyOnDevice(const DLTensor& from, const DLTensor& to) {
  // Both are borrowed for a call that only queues the copy: the stream keeps the order with all later work.
  Loan* loans[] = {torch2ort::Lend(from, nullptr, nullptr), torch2ort::Lend(to, nullptr, nullptr)};
  Ref source = Ref::Steal(ImportLoan(loans[0]));
  Ref target = source ? Ref::Steal(ImportLoan(loans[1])) : Ref();
  bool good = target && Ref::Steal(PyObject_CallMethod(target.get(), "copy_", "OO", source.get(), Py_True));
  for (Loan* loan : loans) loan->Drop();
  return good ? nullptr : PythonError();
}

OrtStatus* Computation::Write(size_t index, const DLTensor& tensor, Managed* gift) {
  Span span = SpanOf(tensor);
  OrtValue* value = nullptr;
  void* target = nullptr;
  {
    Gift offer(gift, span);
    auto rank = static_cast<size_t>(tensor.ndim);
    T2O_RETURN_IF_ERROR(api_->KernelContext_GetOutput(context_, index, tensor.shape, rank, &value));
  }
  if (value == nullptr || span.size() == 0) return nullptr;  // the output is unused, or is empty
  if (gift != nullptr && *gift == nullptr) return nullptr;
  T2O_RETURN_IF_ERROR(api_->GetTensorMutableData(value, &target));
  if (tensor.device.device_type != device_.device_type || tensor.device.device_id != device_.device_id) {
    std::string message = kernel_.where + ": output " + std::to_string(index - 1) +
                          " of forward is on another device than its inputs; return it on theirs";
    return Fail(api_, message);
  }
  if (kernel_.on_cuda) {
    DLTensor copy = tensor;
    copy.data = target;
    copy.byte_offset = 0;
    copy.strides = nullptr;
    return CopyOnDevice(tensor, copy);
  }
  auto bytes = static_cast<size_t>(span.size());
  if (span.size() < kLargeOutputBytes) {
    std::memcpy(target, reinterpret_cast<void*>(span.begin), bytes);
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS;
  std::memcpy(target, reinterpret_cast<void*>(span.begin), bytes);
  Py_END_ALLOW_THREADS;
  return nullptr;
}

// Writes a result, or gives the runtime its memory if there is no other holder.
OrtStatus* Computation::Give(size_t index, Managed* result, Ref* storage) {
  // The tensor is destroyed when the runtime gets it, but its fields are read afterwards.
  DLTensor tensor = (*result)->dl_tensor;
  bool give = kernel_.gives_memory && *storage;
  if (give) {
    Ref sole = Ref::Steal(CallOne(custom_op_config.is_sole_holder, storage->get()));
    if (!sole) return PythonError();
    give = sole.get() == Py_True;
    storage->reset();
  }
  return Write(index, tensor, give ? result : nullptr);
}

OrtStatus* Computation::WriteOutputs(std::vector<Managed>* outputs, std::vector<Ref>* storages) {
  for (size_t i = 0; i < outputs->size(); ++i) {
    Managed& output = (*outputs)[i];
    T2O_RETURN_IF_ERROR(kernel_.handed_on[i + 1] ? WriteSizes(i + 1, output->dl_tensor)
                                                 : Give(i + 1, &output, &(*storages)[i]));
  }
  return nullptr;
}

// Writes the sizes of an output that shares an input's memory, for the node that returns that memory.
OrtStatus* Computation::WriteSizes(size_t index, const DLTensor& tensor) {
  int64_t rank = tensor.ndim;
  return Write(index, {tensor.shape, device_, 1, {kDLInt, 64, 1}, &rank, nullptr, 0}, nullptr);
}

// A gradient that is declared to share the memory of an output's gradient, which this node owns. It does not
// share it where autograd has no gradient, and zeros replace it.
OrtStatus* Computation::HandOn(size_t index, const DLTensor& gradient, const DLTensor& memory) {
  Span from = SpanOf(gradient), to = SpanOf(memory);
  if (from.size() > to.size()) {
    return Fail(api_, kernel_.where + ": gradient " + std::to_string(index - 1) +
                          " is larger than the gradient whose memory it is declared to be");
  }
  if (from.size() > 0 && from.begin != to.begin) {
    std::memmove(reinterpret_cast<void*>(to.begin), reinterpret_cast<void*>(from.begin),
                 static_cast<size_t>(from.size()));
  }
  return WriteSizes(index, gradient);
}

// Writes one output per tensor argument that needs a gradient.
OrtStatus* Computation::WriteGradients(std::vector<Managed>* gradients, std::vector<Ref>* storages) {
  storages->resize(gradients->size());
  size_t index = 0;
  for (size_t i = 0; i < gradients->size(); ++i) {
    Managed& gradient = (*gradients)[i];
    if (gradient == nullptr) continue;
    if (kernel_.handed_on[++index]) {
      auto memory = static_cast<size_t>((*AsSite(kernel_.callee)->gradient_mapped)[i]);
      T2O_RETURN_IF_ERROR(HandOn(index, gradient->dl_tensor, loans_[memory]->dl_tensor));
    } else {
      T2O_RETURN_IF_ERROR(Give(index, &gradient, &(*storages)[i]));
    }
  }
  return nullptr;
}

// The first output represents the context, which inference does not need; its memory must be initialised.
OrtStatus* Computation::WriteContext() {
  int64_t zero = 0, one = 1;
  DLTensor tensor{&zero, device_, 1, {kDLInt, 64, 1}, &one, nullptr, 0};
  if (!kernel_.on_cuda) return Write(0, tensor, nullptr);
  OrtValue* value = nullptr;
  return api_->KernelContext_GetOutput(context_, 0, &one, 1, &value);
}

OrtStatus* Computation::Run() {
  for (size_t i = 0; i < kernel_.slots.size(); ++i) T2O_RETURN_IF_ERROR(Lend(i));
  OnStream stream;
  T2O_RETURN_IF_ERROR(EnterStream(&stream));
  NoGrad no_grad;
  std::vector<Managed> outputs;
  std::vector<Ref> storages;
  if (kernel_.backward) {
    if (no_grad.failed() || !RunBackward(kernel_.callee, loans_, &outputs, &storages)) return PythonError();
    return WriteGradients(&outputs, &storages);
  }
  if (no_grad.failed() || !RunForward(kernel_.callee, loans_, &outputs, &storages)) {
    return PythonError();
  }
  if (kernel_.writes_context) T2O_RETURN_IF_ERROR(WriteContext());
  return WriteOutputs(&outputs, &storages);
}

OrtStatus* ComputeInPython(const Kernel& kernel, OrtKernelContext* context) {
  if (!PythonRuns()) {
    return Fail(kernel.api, kernel.where + ": the Python interpreter has ended");
  }
  Gil gil;
  try {
    return Computation(kernel, context).Run();
  } catch (const std::exception& error) {
    return Fail(kernel.api, kernel.where + ": " + error.what());
  }
}

}  // namespace

OrtStatus* SizesOf(const OrtApi* api, bool by_reference, const OrtValue* value, Sizes* kept,
                   const int64_t** sizes, size_t* rank) {
  if (by_reference) {
    OrtElementType type;
    return api->GetTensorElementTypeAndShapeDataReference(value, &type, sizes, rank);
  }
  OrtTensorTypeAndShapeInfo* info = nullptr;
  T2O_RETURN_IF_ERROR(api->GetTensorTypeAndShape(value, &info));
  OrtStatus* status = api->GetDimensionsCount(info, rank);
  if (status == nullptr) {
    kept->push_back(std::make_unique<int64_t[]>(*rank));
    *sizes = kept->back().get();
    status = api->GetDimensions(info, kept->back().get(), *rank);
  }
  api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

OrtStatus* ReadInput(const Kernel& kernel, OrtKernelContext* context, size_t index, DLDevice* device,
                     Sizes* kept, DLTensor* tensor) {
  const OrtApi* api = kernel.api;
  const OrtValue* value = nullptr;
  T2O_RETURN_IF_ERROR(api->KernelContext_GetInput(context, index, &value));
  if (value == nullptr) {
    return Fail(api, kernel.where + ": input " + std::to_string(index) + " is missing");
  }
  const int64_t* sizes = nullptr;
  size_t rank = 0;
  void* data = nullptr;
  T2O_RETURN_IF_ERROR(SizesOf(api, kernel.has_shape_reference, value, kept, &sizes, &rank));
  T2O_RETURN_IF_ERROR(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  if (kernel.on_cuda) {
    const OrtMemoryInfo* memory = nullptr;
    T2O_RETURN_IF_ERROR(api->GetTensorMemoryInfo(value, &memory));
    T2O_RETURN_IF_ERROR(api->MemoryInfoGetId(memory, &device->device_id));
  }
  *tensor = {
      data,    *device, static_cast<int32_t>(rank), kernel.input_dtypes[index], const_cast<int64_t*>(sizes),
      nullptr, 0};
  return nullptr;
}

OrtStatus* ComputeKernel(void* object, OrtKernelContext* context) {
  Kernel& kernel = *static_cast<Kernel*>(object);
  Way way = kernel.way.load(std::memory_order_relaxed);
  OrtStatus* status = nullptr;
  if (way == Way::kDirect && ComputeDirectly(kernel, context, &status)) return status;
  status = ComputeInPython(kernel, context);
  // By now, the call policy has determined that the operator writes to no argument. A call that fails only in
  // C++ is not tried again.
  if (way != Way::kPython && status == nullptr) {
    kernel.way.store(way == Way::kUntried ? Way::kDirect : Way::kPython, std::memory_order_relaxed);
  }
  return status;
}

}  // namespace torch2ort
