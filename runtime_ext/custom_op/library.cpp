#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

CustomOpConfiguration custom_op_config;
const OrtApi* ort_api = nullptr;
bool has_shape_reference = false;
bool cuda_tried = false;

namespace {

constexpr const char* kName = "PythonOp";
constexpr const char* kGradName = "PythonOpGrad";
// In files, Functions of the user are in the first domain, and operators that torch2ort itself left to
// PyTorch's kernels in the second.
constexpr const char* kDomain = "com.microsoft";
constexpr const char* kAtenDomain = "org.pytorch.aten";
constexpr const char* kAtenName = "ATen";
// Marks options that have the operators already: ONNX Runtime refuses to register them twice.
constexpr const char* kRegisteredEntry = "torch2ort.custom_ops";
constexpr size_t kMaxKeptErrors = 64;
constexpr const char* kErrorMark = "[torch2ort error ";
// The options for which this thread registered the operators last.
thread_local OrtSessionOptions* registered_options = nullptr;

// ---- exceptions that are stored for the session's caller ----

// Guarded by the GIL; never destroyed, as statics are destroyed after the interpreter.
auto& kept_errors = *new std::map<long long, PyObject*>;
long long error_count = 0;

long long KeepException(PyObject* exception) {
  if (kept_errors.size() == kMaxKeptErrors) {
    Ref oldest = Ref::Steal(kept_errors.begin()->second);
    kept_errors.erase(kept_errors.begin());
  }
  kept_errors[++error_count] = Ref::Share(exception).release();
  return error_count;
}

Ref TakeKeptException(long long number) {
  auto found = kept_errors.find(number);
  if (found == kept_errors.end()) return {};
  Ref exception = Ref::Steal(found->second);
  kept_errors.erase(found);
  return exception;
}

PyObject* TakeCustomOpError(PyObject*, PyObject* number) {
  long long key = PyLong_AsLongLong(number);
  if (key == -1 && PyErr_Occurred()) return nullptr;
  Ref exception = TakeKeptException(key);
  return exception ? exception.release() : Ref::Share(Py_None).release();
}

std::string TextOf(PyObject* exception) {
  std::string text = TypeName(exception);
  Ref message = Ref::Steal(PyObject_Str(exception));
  const char* utf8 = message ? PyUnicode_AsUTF8AndSize(message.get(), nullptr) : nullptr;
  if (utf8 == nullptr) PyErr_Clear();
  return utf8 == nullptr || *utf8 == '\0' ? text : text + ": " + utf8;
}

// ---- the operator ----

const char* PythonOpName(const OrtCustomOp*) { return kName; }
const char* GradOpName(const OrtCustomOp*) { return kGradName; }
const char* AtenOpName(const OrtCustomOp*) { return kAtenName; }

OrtCustomOp MakeOp(const char* (*name)(const OrtCustomOp*), const char* (*provider)(const OrtCustomOp*)) {
  OrtCustomOp op = VariadicOp();
  op.version = kOrtApiVersion;
  op.GetName = name;
  op.GetExecutionProviderType = provider;
  op.CreateKernelV2 = CreateKernel;
  op.KernelComputeV2 = ComputeKernel;
  op.KernelDestroy = DestroyKernel;
  op.InferOutputShapeFn = InferOutputs;
  return op;
}

const char* Cpu(const OrtCustomOp*) { return "CPUExecutionProvider"; }
const char* Cuda(const OrtCustomOp*) { return "CUDAExecutionProvider"; }

// Creates both domains with their operators, one per provider; once, as sessions hold pointers to them.
OrtStatus* MakeDomains(std::vector<OrtCustomOpDomain*>* domains) {
  static const OrtCustomOp ops[2][2] = {{MakeOp(PythonOpName, Cpu), MakeOp(PythonOpName, Cuda)},
                                        {MakeOp(AtenOpName, Cpu), MakeOp(AtenOpName, Cuda)}};
  static const OrtCustomOp backward[2] = {MakeOp(GradOpName, Cpu), MakeOp(GradOpName, Cuda)};
  static const OrtCustomOp memory[] = {DonatedOp(), OwnedOp(), AliasedOp()};
  const char* names[] = {kDomain, kAtenDomain};
  for (int i = 0; i < 2; ++i) {
    OrtCustomOpDomain* domain = nullptr;
    T2O_RETURN_IF_ERROR(ort_api->CreateCustomOpDomain(names[i], &domain));
    for (const OrtCustomOp& op : ops[i]) T2O_RETURN_IF_ERROR(ort_api->CustomOpDomain_Add(domain, &op));
    for (const OrtCustomOp& op : backward) {
      if (i == 0) T2O_RETURN_IF_ERROR(ort_api->CustomOpDomain_Add(domain, &op));
    }
    for (const OrtCustomOp& op : memory) {
      if (i == 0) T2O_RETURN_IF_ERROR(ort_api->CustomOpDomain_Add(domain, &op));
    }
    domains->push_back(domain);
  }
  return nullptr;
}

OrtStatus* Register(OrtSessionOptions* options) {
  registered_options = options;
  static std::mutex mutex;
  static auto& domains = *new std::vector<OrtCustomOpDomain*>;
  std::lock_guard<std::mutex> lock(mutex);
  int registered = 0;
  T2O_RETURN_IF_ERROR(ort_api->HasSessionConfigEntry(options, kRegisteredEntry, &registered));
  if (registered != 0) return nullptr;
  if (domains.empty()) T2O_RETURN_IF_ERROR(MakeDomains(&domains));
  for (OrtCustomOpDomain* domain : domains) T2O_RETURN_IF_ERROR(ort_api->AddCustomOpDomain(options, domain));
  return ort_api->AddSessionConfigEntry(options, kRegisteredEntry, "1");
}

PyObject* ConfigureCustomOp(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"resolve", "is_grad_enabled", "set_grad_enabled",
                                "stream",  "is_sole_holder",  nullptr};
  CustomOpConfiguration given;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOO:configure_custom_op", const_cast<char**>(names),
                                   &given.resolve, &given.is_grad_enabled, &given.set_grad_enabled,
                                   &given.stream, &given.is_sole_holder)) {
    return nullptr;
  }
  // Never released, as well as those of an earlier call: a kernel may be using them.
  for (PyObject* object :
       {given.resolve, given.is_grad_enabled, given.set_grad_enabled, given.stream, given.is_sole_holder}) {
    Py_INCREF(object);
  }
  custom_op_config = given;
  Py_RETURN_NONE;
}

PyObject* RegisteredOptions(PyObject*, PyObject*) {
  if (registered_options == nullptr) Py_RETURN_NONE;
  return PyCapsule_New(registered_options, kOptionsName, nullptr);
}

PyObject* TryCuda(PyObject*, PyObject*) {
  cuda_tried = true;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"configure_custom_op", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ConfigureCustomOp)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"take_custom_op_error", TakeCustomOpError, METH_O, nullptr},
    {"try_cuda", TryCuda, METH_NOARGS, nullptr},
    {"registered_options", RegisteredOptions, METH_NOARGS, nullptr},
    {"lend_allocator", LendAllocator, METH_NOARGS, nullptr},
    {"withdraw_allocator", WithdrawAllocator, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

OrtCustomOp VariadicOp() {
  OrtCustomOp op{};
  op.GetInputType = op.GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtUndefined; };
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetInputCharacteristic =
      op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kOrtVariadic; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kOrtMemoryDefault; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  return op;
}

bool InitCustomOp(PyObject* module) { return PyModule_AddFunctions(module, methods) == 0; }

bool PythonRuns() {
  // Python 3.13 has a public name for it; the stable ABI of earlier versions has none.
  using Query = int (*)();
  static const Query finalizing = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    return reinterpret_cast<Query>(found != nullptr ? found : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"));
  }();
  return Py_IsInitialized() != 0 && (finalizing == nullptr || finalizing() == 0);
}

OrtStatus* Fail(const OrtApi* api, std::string message) {
  // Names in a file may contain a NUL, which would end the message.
  std::replace(message.begin(), message.end(), '\0', ' ');
  return api->CreateStatus(kOrtFail, message.c_str());
}

OrtStatus* StatusOfException(const OrtApi* api, const std::string& where, bool keep) {
  Ref exception = Ref::Steal(TakeRaised());
  std::string message =
      where + ": " + (exception ? TextOf(exception.get()) : "an error without an exception");
  if (exception && keep)
    message += std::string(" ") + kErrorMark + std::to_string(KeepException(exception.get())) + "]";
  return Fail(api, std::move(message));
}

Ref KeptError(const std::string& message) {
  size_t mark = message.rfind(kErrorMark);
  if (mark == std::string::npos) return {};
  return TakeKeptException(std::strtoll(message.c_str() + mark + std::strlen(kErrorMark), nullptr, 10));
}

}  // namespace torch2ort

// The function that SessionOptions.register_custom_ops_library looks up in a library.
extern "C" __attribute__((visibility("default"))) torch2ort::OrtStatus* RegisterCustomOps(
    torch2ort::OrtSessionOptions* options, const torch2ort::OrtApiBase* base) {
  using namespace torch2ort;
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api != nullptr) {
    ort_api = api;
    // The version is parsed instead of asking for the newer table, as an older runtime would report an error
    // on stderr.
    char* rest = nullptr;
    long major = std::strtol(base->GetVersionString(), &rest, 10);
    long minor = *rest == '.' ? std::strtol(rest + 1, nullptr, 10) : 0;
    has_shape_reference = major > 1 || minor >= kOrtMinorOfShapeReference;
    return Register(options);
  }
  std::string message =
      std::string("torch2ort needs onnxruntime 1.19.2 or later, and this is ") + base->GetVersionString();
  api = base->GetApi(1);
  return api == nullptr ? nullptr : api->CreateStatus(kOrtFail, message.c_str());
}
