// The Python module torch2ort._native: documented in torch2ort/_native.pyi.
#include "c_method_patch.h"
#include "call/function_call.h"
#include "call/function_chain.h"
#include "call/run_state.h"
#include "custom_op/custom_op.h"
#include "direct/aten_call.h"
#include "graph_guards.h"
#include "settings_snapshot.h"
#include "step/step_session.h"
#include "tensors/tensor_refcounts.h"
#include "tensors/tensor_snapshot.h"

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

// ---- the policy without a runtime: torch tensors in, torch tensors out ----

bool LendTensors(PyObject* given, Loans* loans) {
  for (size_t i = 0; i < loans->size(); ++i) {
    PyObject* tensor = PyTuple_GetItem(given, static_cast<Py_ssize_t>(i));
    if (tensor == Py_None) continue;
    if (!IsTensor(tensor)) {
      PyErr_Format(PyExc_TypeError, "item %zu of the tensors is of type %.200s", i, TypeName(tensor).c_str());
      return false;
    }
    Managed managed = ExportTensor(tensor);
    if (!managed) return false;
    (*loans)[i] = LendVersioned(managed.release());
  }
  return true;
}

// Takes tensors as a runtime does: as copies, except for one that is declared to share an argument's memory.
template <typename IsMapped>
Ref TakeTensors(std::vector<Managed> tensors, IsMapped is_mapped) {
  Ref results = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; results && i < tensors.size(); ++i) {
    Ref tensor = tensors[i] == nullptr ? Ref::Share(Py_None) : ImportManaged(std::move(tensors[i]));
    if (tensor && tensor.get() != Py_None && !is_mapped(i))
      tensor = CallMethod(tensor.get(), method_names.clone);
    if (!tensor) return {};
    PyList_SetItem(results.get(), static_cast<Py_ssize_t>(i), tensor.release());
  }
  return results;
}

// Parses the arguments of a call, with `callee` borrowed.
bool ReadCall(PyObject* args, const char* format, PyObject** callee, Ref* tensors) {
  PyObject* given;
  if (!PyArg_ParseTuple(args, format, callee, &given)) return false;
  if (!IsCallable(*callee)) {
    PyErr_Format(PyExc_TypeError, "expected a Site or a Chain, got %.200s", TypeName(*callee).c_str());
    return false;
  }
  *tensors = Ref::Steal(PySequence_Tuple(given));
  return static_cast<bool>(*tensors);
}

PyObject* CallForward(PyObject*, PyObject* args) {
  PyObject* callee;
  Ref given;
  if (!ReadCall(args, "OO:call_forward", &callee, &given)) return nullptr;
  Loans loans(static_cast<size_t>(PyTuple_Size(given.get())));
  std::vector<Managed> outputs;
  std::vector<Ref> storages;
  if (!LendTensors(given.get(), &loans) || !RunForward(callee, loans, &outputs, &storages)) return nullptr;
  const auto& specs = OutputsOf(callee);
  return TakeTensors(std::move(outputs), [&](size_t i) { return specs[i].mapped_input >= 0; }).release();
}

PyObject* CallBackward(PyObject*, PyObject* args) {
  PyObject* callee;
  Ref given;
  if (!ReadCall(args, "OO:call_backward", &callee, &given)) return nullptr;
  Loans loans(static_cast<size_t>(PyTuple_Size(given.get())));
  std::vector<Managed> gradients;
  std::vector<Ref> storages;
  if (!LendTensors(given.get(), &loans) || !RunBackward(callee, loans, &gradients, &storages)) {
    return nullptr;
  }
  bool site = PyObject_TypeCheck(callee, site_type) != 0;
  auto is_mapped = [&](size_t i) { return site && (*AsSite(callee)->gradient_mapped)[i] >= 0; };
  return TakeTensors(std::move(gradients), is_mapped).release();
}

PyMethodDef methods[] = {
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Configure)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"find_layout", LearnLayout, METH_VARARGS, nullptr},
    {"holders", CountHolders, METH_O, nullptr},
    {"writes", CountWrites, METH_O, nullptr},
    {"begin", Begin, METH_O, nullptr},
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
