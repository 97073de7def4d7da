// The Python module torch2ort._native: documented in torch2ort/_native.pyi.
#include "call/chain.h"
#include "call/policy.h"
#include "call/run.h"
#include "custom_op/custom_op.h"
#include "direct/direct_call.h"
#include "guards.h"
#include "interception.h"
#include "step/half.h"
#include "switches.h"
#include "tensors/layout.h"
#include "tensors/noted.h"
#include "training_kernel/training_kernel.h"

namespace torch2ort {

namespace {

bool Replace(PyObject** slot, PyObject* value) {
  Ref old = Ref::Steal(std::exchange(*slot, Ref::Share(value).release()));
  return true;
}

PyObject* Configure(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"exchange_api", "tensor_type",        "privatize",
                                "warn_alias",   "is_base_held",       "use_count",
                                "error_type",   "inplace_error_type", nullptr};
  PyObject *exchange_api, *tensor_type, *privatize, *warn_alias, *is_base_held, *use_count;
  PyObject *error_type, *inplace_error_type;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OO!OOOOOO:configure", const_cast<char**>(names),
                                   &exchange_api, &PyType_Type, &tensor_type, &privatize, &warn_alias,
                                   &is_base_held, &use_count, &error_type, &inplace_error_type)) {
    return nullptr;
  }
  auto* exchange =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api"));
  if (exchange == nullptr) return nullptr;
  if (exchange->header.version.major != kDLPackMajor ||
      exchange->dltensor_from_py_object_no_sync == nullptr) {
    PyErr_Format(PyExc_RuntimeError,
                 "torch speaks DLPack %u.%u, but torch2ort._native needs version 1 in full",
                 exchange->header.version.major, exchange->header.version.minor);
    return nullptr;
  }
  Replace(reinterpret_cast<PyObject**>(&config.tensor_type), tensor_type);
  Replace(&config.privatize, privatize);
  Replace(&config.warn_alias, warn_alias);
  Replace(&config.is_base_held, is_base_held);
  Replace(&config.use_count, use_count);
  Replace(&config.error_type, error_type);
  Replace(&config.inplace_error_type, inplace_error_type);
  config.exchange = exchange;
  Py_RETURN_NONE;
}

PyObject* LearnLayout(PyObject*, PyObject* args) {
  PyObject *own, *foreign;
  if (!CheckConfigured() ||
      !PyArg_ParseTuple(args, "O!O!:find_layout", &PyTuple_Type, &own, &PyTuple_Type, &foreign)) {
    return nullptr;
  }
  int found = FindLayout(own, foreign, config.use_count);
  return found < 0 ? nullptr : PyBool_FromLong(found);
}

PyObject* CountHolders(PyObject*, PyObject* tensor) {
  if (!CheckConfigured()) return nullptr;
  if (!IsTensor(tensor)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor, got %.200s", TypeName(tensor).c_str());
    return nullptr;
  }
  return PyLong_FromLong(HoldersOfOwnMemory(tensor));
}

PyObject* CountWrites(PyObject*, PyObject* tensor) {
  if (!CheckConfigured()) return nullptr;
  if (!IsTensor(tensor)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor, got %.200s", TypeName(tensor).c_str());
    return nullptr;
  }
  return PyLong_FromLong(CountedWrites(tensor));
}

// The policy without a runtime: torch tensors in, torch tensors out, through the same exchange structs.
PyObject* CallDirectly(PyObject* args, const char* format,
                       bool (*policy)(Site*, Loans&, std::vector<Managed>*)) {
  PyObject *site, *given;
  if (!PyArg_ParseTuple(args, format, site_type, &site, &given)) return nullptr;
  Ref tensors = Ref::Steal(PySequence_Tuple(given));
  if (!tensors) return nullptr;
  auto count = static_cast<size_t>(PyTuple_Size(tensors.get()));
  Loans loans(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GetItem(tensors.get(), static_cast<Py_ssize_t>(i));
    if (tensor == Py_None) continue;
    if (!IsTensor(tensor)) {
      PyErr_Format(PyExc_TypeError, "item %zu of the tensors is of type %.200s", i, TypeName(tensor).c_str());
      return nullptr;
    }
    Managed managed = ExportTensor(tensor);
    if (!managed) return nullptr;
    loans[i] = LendVersioned(managed.release());
  }
  std::vector<Managed> outputs;
  if (!policy(AsSite(site), loans, &outputs)) return nullptr;
  Ref results = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(outputs.size())));
  for (size_t i = 0; results && i < outputs.size(); ++i) {
    Ref tensor = outputs[i] == nullptr ? Ref::Share(Py_None) : ImportManaged(std::move(outputs[i]));
    if (!tensor) return nullptr;
    PyList_SetItem(results.get(), static_cast<Py_ssize_t>(i), tensor.release());
  }
  return results.release();
}

PyObject* CallForward(PyObject*, PyObject* args) {
  return CallDirectly(args, "O!O:call_forward", RunForward);
}
PyObject* CallBackward(PyObject*, PyObject* args) {
  return CallDirectly(args, "O!O:call_backward", RunBackward);
}

PyMethodDef methods[] = {
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Configure)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"find_layout", LearnLayout, METH_VARARGS, nullptr},
    {"holders", CountHolders, METH_O, nullptr},
    {"writes", CountWrites, METH_O, nullptr},
    {"begin", Begin, METH_O, nullptr},
    {"take_error", TakeError, METH_NOARGS, nullptr},
    {"training_runners", TrainingRunners, METH_NOARGS, nullptr},
    {"aten_executor", AtenExecutor, METH_NOARGS, nullptr},
    {"call_forward", CallForward, METH_VARARGS, nullptr},
    {"call_backward", CallBackward, METH_VARARGS, nullptr},
    {"intercept", Intercept, METH_VARARGS, nullptr},
    {"end_interception", EndInterception, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "torch2ort._native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace torch2ort

PyMODINIT_FUNC PyInit__native() {
  using namespace torch2ort;
  Ref module = Ref::Steal(PyModule_Create(&definition));
  if (!module || !InitPolicy() || !InitContext(module.get()) || !InitSite(module.get()) ||
      !InitChain(module.get()) || !InitRun(module.get()) || !InitGuards(module.get()) ||
      !InitDirectCall(module.get()) || !InitCustomOp(module.get()) || !InitHalf(module.get()) ||
      !InitNoted(module.get()) || !InitSwitches(module.get())) {
    return nullptr;
  }
  return module.release();
}
