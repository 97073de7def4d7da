#include "training_kernel/training_kernel.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "call/chain.h"
#include "call/policy.h"
#include "call/run.h"

namespace torch2ort {

namespace {

constexpr const char* kCapsule = "dltensor";
constexpr const char* kUsedCapsule = "used_dltensor";

// Takes the tensor out of a capsule of ORT's, which is then empty.
Loan* LendCapsule(PyObject* capsule) {
  auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (tensor == nullptr || PyCapsule_SetName(capsule, kUsedCapsule) != 0) return nullptr;
  return LendLegacy(tensor);
}

void DestroyCapsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kCapsule)) return;
  auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsule));
  tensor->deleter(tensor);
}

PyObject* MakeCapsule(Managed managed) {
  auto* tensor = new DLManagedTensor;
  tensor->dl_tensor = managed->dl_tensor;
  // DLPack's older form knows no bool; ORT takes the type from its graph.
  if (tensor->dl_tensor.dtype.code == kDLBool) tensor->dl_tensor.dtype.code = kDLUInt;
  // It is contiguous; ORT reads more into the strides of a tensor without elements.
  tensor->dl_tensor.strides = nullptr;
  tensor->manager_ctx = managed.release();
  tensor->deleter = [](DLManagedTensor* self) {
    ReleaseManaged()(static_cast<DLManagedTensorVersioned*>(self->manager_ctx));
    delete self;
  };
  PyObject* capsule = PyCapsule_New(tensor, kCapsule, DestroyCapsule);
  if (capsule == nullptr) tensor->deleter(tensor);
  return capsule;
}

bool LendArguments(const std::vector<PyObject*>& args, size_t first, Loans* loans) {
  for (size_t i = 0; i < loans->size(); ++i) {
    if (args[first + i] == Py_None) continue;
    (*loans)[i] = LendCapsule(args[first + i]);
    if ((*loans)[i] == nullptr) return false;
  }
  return true;
}

bool AppendCapsules(std::vector<Managed>* tensors, std::vector<PyObject*>* results) {
  for (Managed& tensor : *tensors) {
    PyObject* result = tensor == nullptr ? Ref::Share(Py_None).release() : MakeCapsule(std::move(tensor));
    if (result == nullptr) return false;
    results->push_back(result);
  }
  return true;
}

bool Forward(PyObject* callee, bool training, const std::vector<PyObject*>& args,
             std::vector<PyObject*>* results) {
  Loans loans(args.size());
  std::vector<Managed> tensors;
  if (!LendArguments(args, 0, &loans) || !RunForward(callee, loans, &tensors, nullptr)) return false;
  results->reserve(tensors.size() + 1);
  // ORT wants an object with two holders; the true context waits in the run. A None it keeps without owning
  // it, and releases it in the end: the extra reference is for that.
  results->push_back(Ref::Share(training ? callee : Py_None).release());
  if (!AppendCapsules(&tensors, results)) return false;
  if (!training) Py_INCREF(Py_None);
  return true;
}

bool Backward(PyObject* callee, const std::vector<PyObject*>& args, std::vector<PyObject*>* results) {
  if (args.empty()) {
    PyErr_Format(config.error_type, "%R: ONNX Runtime called backward without a context", callee);
    return false;
  }
  Loans loans(args.size() - 1);
  std::vector<Managed> tensors;
  if (!LendArguments(args, 1, &loans) || !RunBackward(callee, loans, &tensors)) return false;
  results->reserve(tensors.size());
  return AppendCapsules(&tensors, results);
}

// Runs `call` under the GIL; on failure keeps the exception and leaves no result, which makes ORT's run fail.
template <typename Call>
std::vector<PyObject*> Guard(const char* name, void* callback, Call call) {
  Gil gil;
  std::vector<PyObject*> results;
  bool good = false;
  auto* callee = static_cast<PyObject*>(callback);
  if (callee == nullptr || !IsCallable(callee)) {
    PyErr_Format(PyExc_TypeError, "the callback registered for %s is neither a Site nor a Chain", name);
  } else {
    try {
      good = call(callee, &results);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    }
  }
  if (!good) {
    KeepError();
    for (PyObject* result : results) Py_DECREF(result);
    results.clear();
  }
  return results;
}

std::vector<PyObject*> ForwardRunner(const char* name, void* callback, const std::vector<int64_t>&,
                                     const std::vector<int64_t>&, bool training, const std::vector<int64_t>&,
                                     const char*, bool, const std::vector<PyObject*>& args) {
  return Guard(name, callback, [&](PyObject* callee, std::vector<PyObject*>* results) {
    return Forward(callee, training, args, results);
  });
}

std::vector<PyObject*> BackwardRunner(const char* name, void* callback, const std::vector<int64_t>&,
                                      const std::vector<int64_t>&, bool, const std::vector<int64_t>&,
                                      const char*, bool, const std::vector<PyObject*>& args) {
  return Guard(name, callback, [&](PyObject* callee, std::vector<PyObject*>* results) {
    return Backward(callee, args, results);
  });
}

bool IsCpuArgument(const char*, const char*, size_t, bool) { return false; }

// "detach" is the one operator that the training graphs need: an identity that ORT's gradient builder stops
// at.
void ExecuteAten(const char* name, const char*, size_t input_count, DLManagedTensor** inputs,
                 size_t output_count, DLManagedTensor** outputs) {
  if (std::strcmp(name, "detach") != 0 || input_count != 1 || output_count != 1) {
    // ONNX Runtime turns it into the run's error.
    throw std::runtime_error("torch2ort executes no ATen operator but detach, not " + std::string(name));
  }
  outputs[0] = inputs[0];
}

PyObject* Addresses(uintptr_t first, uintptr_t second) {
  return Py_BuildValue("KK", static_cast<unsigned long long>(first), static_cast<unsigned long long>(second));
}

}  // namespace

PyObject* TrainingRunners(PyObject*, PyObject*) {
  return Addresses(reinterpret_cast<uintptr_t>(&ForwardRunner), reinterpret_cast<uintptr_t>(&BackwardRunner));
}

PyObject* AtenExecutor(PyObject*, PyObject*) {
  return Addresses(reinterpret_cast<uintptr_t>(&IsCpuArgument), reinterpret_cast<uintptr_t>(&ExecuteAten));
}

}  // namespace torch2ort
