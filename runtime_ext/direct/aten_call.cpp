#include "direct/aten_call.h"

#include <algorithm>
#include <memory>

namespace torch2ort {

PyTypeObject* direct_call_type = nullptr;

namespace {

// ---- the call ----

class GradMode {
 public:
  GradMode(const TorchAbi& torch, bool enabled)
      : torch_(torch), enabled_(enabled), was_enabled_(torch.grad_mode_is_enabled()) {
    if (was_enabled_ != enabled_) torch_.grad_mode_set_enabled(enabled_);
  }
  ~GradMode() {
    if (was_enabled_ != enabled_) torch_.grad_mode_set_enabled(was_enabled_);
  }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  const TorchAbi& torch_;
  bool enabled_, was_enabled_;
};

bool CallByName(const Plan& plan, const DLTensor* tensors, std::vector<OwnedTensor>* results) {
  size_t size = std::max(plan.arguments.size(), plan.results.size());
  SmallArray<StableValue, 16> stack(size);
  for (size_t i = 0; i < plan.arguments.size(); ++i) {
    if (!MakeArgument(*plan.torch, plan.arguments[i], tensors, &stack[i])) return false;
  }
  const TorchAbi& torch = *plan.torch;
  if (torch.call_dispatcher(plan.name.c_str(), plan.overload.c_str(), stack.data(), torch.version()) != 0)
    return false;
  for (size_t i = 0; i < plan.results.size(); ++i) {
    results->emplace_back(torch, reinterpret_cast<TensorHandle>(stack[i]));
  }
  return true;
}

using H = TensorHandle;

// Functions of the C interface by their numbers of tensors and of numbers.
TorchError CallFunction(const Plan& plan, const std::vector<OwnedTensor>& given, H* result) {
  const std::vector<double>& n = plan.numbers;
  auto tensor = [&](size_t i) { return given[i].get(); };
  if (plan.written) {
    auto* call = reinterpret_cast<TorchError (*)(H, H, H, H, double, double)>(plan.function);
    return call(tensor(0), tensor(1), tensor(2), tensor(3), n[0], n[1]);
  }
  if (given.size() == 2) {
    auto* call = reinterpret_cast<TorchError (*)(H, H, double, H*)>(plan.function);
    return call(tensor(0), tensor(1), n[0], result);
  }
  if (n.size() == 2) {
    auto* call = reinterpret_cast<TorchError (*)(H, double, double, H*)>(plan.function);
    return call(tensor(0), n[0], n[1], result);
  }
  auto* call = reinterpret_cast<TorchError (*)(H, double, H*)>(plan.function);
  return call(tensor(0), n[0], result);
}

bool CallByFunction(const Plan& plan, const DLTensor* tensors, std::vector<OwnedTensor>* results) {
  const TorchAbi& torch = *plan.torch;
  std::vector<OwnedTensor> given;
  given.reserve(plan.arguments.size());
  for (const Argument& argument : plan.arguments) {
    given.emplace_back(torch, Borrow(torch, tensors[argument.tensor], argument.order));
    if (!given.back()) return false;
  }
  H result = nullptr;
  if (CallFunction(plan, given, &result) != 0) return false;
  if (!plan.written) results->emplace_back(torch, result);
  return true;
}

// ---- the Python type ----

bool Complain(const char* what) {
  PyErr_Format(PyExc_ValueError, "DirectCall: %s", what);
  return false;
}

bool ParseResults(PyObject* results, Plan* plan) {
  for (Py_ssize_t i = 0; i < PyList_Size(results); ++i) {
    PyObject* order = nullptr;
    int computed = 0;
    PyObject* item = PyList_GetItem(results, i);
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "pO!", &computed, &PyTuple_Type, &order)) {
      return PyErr_Occurred() == nullptr ? Complain("a result is a tuple of a bool and an order") : false;
    }
    DirectResult result{computed != 0, {}};
    for (Py_ssize_t d = 0; d < PyTuple_Size(order); ++d) {
      long long dimension = PyLong_AsLongLong(PyTuple_GetItem(order, d));
      if (dimension < 0 || dimension >= PyTuple_Size(order)) return Complain("not an order of dimensions");
      result.order.push_back(dimension);
    }
    plan->results.push_back(std::move(result));
  }
  return true;
}

// Removes the numbers from the end of the arguments.
bool ParseFunction(const std::string& function, PyObject* numbers, Plan* plan) {
  for (Py_ssize_t i = 0; i < PyList_Size(numbers); ++i) {
    double number = PyFloat_AsDouble(PyList_GetItem(numbers, i));
    if (number == -1 && PyErr_Occurred() != nullptr) return false;
    plan->numbers.push_back(number);
  }
  size_t tensors = plan->arguments.size(), count = plan->numbers.size();
  bool known = plan->written ? tensors == 4 && count == 2
                             : (tensors == 2 && count == 1) || (tensors == 1 && count >= 1 && count <= 2);
  for (const Argument& argument : plan->arguments) known &= argument.kind == Argument::Kind::kTensor;
  if (!known || plan->results.size() != 1 || !plan->results[0].order.empty()) {
    return Complain("no function of the C interface takes such arguments");
  }
  plan->function = FindTorchFunction(function);
  return true;
}

// None, or ("like" or "product", the argument that determines the sizes).
bool ParseWritten(PyObject* written, Plan* plan) {
  if (written == Py_None) return true;
  const char* rule = nullptr;
  Py_ssize_t argument = 0;
  if (!PyTuple_Check(written) || !PyArg_ParseTuple(written, "sn", &rule, &argument)) {
    return PyErr_Occurred() == nullptr ? Complain("what is written is a rule and an argument") : false;
  }
  bool is_product = std::string(rule) == "product";
  if (argument < 0 || (!is_product && std::string(rule) != "like")) return Complain("no rule of sizes");
  plan->written = WrittenResult{is_product, static_cast<size_t>(argument)};
  return true;
}

// Checks that the arguments that determine the sizes of a written result are tensors.
bool HasWrittenSizes(const Plan& plan, const WrittenResult& written) {
  size_t last = written.argument + (written.is_product ? 1 : 0);
  bool fits = last < plan.arguments.size() && plan.results.size() == 1 && plan.results[0].order.empty();
  for (size_t i = written.argument; fits && i <= last; ++i) {
    fits = plan.arguments[i].kind == Argument::Kind::kTensor;
  }
  return fits || Complain("no arguments tell the sizes of the result");
}

// False without an exception where this torch does not support the call.
bool FillPlan(Plan* plan, Site* site, PyObject* arguments, PyObject* results, const std::string& function,
              PyObject* numbers) {
  plan->torch = FindTorchAbi();
  if (plan->torch == nullptr) return false;
  plan->result_tensor = site->inputs->size();
  for (const InputSpec& input : *site->inputs) {
    if (TorchDType(*plan->torch, input.dtype) < 0) return false;
  }
  for (const OutputSpec& output : *site->tensor_outputs) {
    if (TorchDType(*plan->torch, output.dtype) < 0) return false;
  }
  for (Py_ssize_t i = 0; i < PyList_Size(arguments); ++i) {
    auto argument =
        ParseArgument(PyList_GetItem(arguments, i), plan->result_tensor + (plan->written ? 1 : 0));
    if (!argument) return false;
    plan->arguments.push_back(std::move(*argument));
  }
  if (!ParseResults(results, plan)) return false;
  if (plan->results.size() != site->tensor_outputs->size()) {
    return Complain("the operator's results are not the site's outputs");
  }
  if (plan->written && !HasWrittenSizes(*plan, *plan->written)) return false;
  if (function.empty()) return true;
  return ParseFunction(function, numbers, plan) && plan->function != nullptr;
}

PyObject* Make(PyTypeObject* type, PyObject* site, std::unique_ptr<Plan> plan) {
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  AsDirectCall(self.get())->site = Ref::Share(site).release();
  AsDirectCall(self.get())->plan = plan.release();
  return self.release();
}

PyObject* DirectCallNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"site",     "operator", "overload", "arguments", "results",
                                "function", "numbers",  "written",  "grad_mode", nullptr};
  PyObject *site, *arguments, *results, *numbers, *written;
  const char *name, *overload, *function;
  int grad_mode = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O!ssO!O!sO!Op:DirectCall", const_cast<char**>(names),
                                   site_type, &site, &name, &overload, &PyList_Type, &arguments, &PyList_Type,
                                   &results, &function, &PyList_Type, &numbers, &written, &grad_mode)) {
    return nullptr;
  }
  auto plan = std::make_unique<Plan>();
  plan->grad_mode = grad_mode != 0;
  if (!ParseWritten(written, plan.get())) return nullptr;
  plan->name = name;
  plan->overload = overload;
  if (!FillPlan(plan.get(), AsSite(site), arguments, results, function, numbers)) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_Format(PyExc_NotImplementedError, "this torch cannot be asked for %s in C", name);
    }
    return nullptr;
  }
  return Make(type, site, std::move(plan));
}

// False with an exception set if the region is for other tensors than the site.
bool FitsSite(const CompiledRegion& region, Site* site) {
  bool fits =
      region.inputs.size() == site->inputs->size() && region.outputs.size() == site->tensor_outputs->size();
  for (size_t i = 0; fits && i < region.outputs.size(); ++i) {
    fits = (*site->tensor_outputs)[i].rank == static_cast<int32_t>(region.outputs[i].rank);
  }
  return fits || Complain("the region's tensors are not the site's");
}

PyObject* DirectCallOfRegion(PyObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"site",        "address", "inputs",  "outputs",
                                "temporaries", "numbers", "varying", nullptr};
  PyObject *site, *address, *inputs, *outputs, *temporaries, *numbers, *varying;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O!O!O!O!O!O!O!:of_region", const_cast<char**>(names),
                                   site_type, &site, &PyLong_Type, &address, &PyList_Type, &inputs,
                                   &PyList_Type, &outputs, &PyList_Type, &temporaries, &PyLong_Type, &numbers,
                                   &PyList_Type, &varying)) {
    return nullptr;
  }
  auto plan = std::make_unique<Plan>();
  plan->region = ParseCompiledRegion(address, inputs, outputs, temporaries, numbers, varying);
  if (!plan->region || !FitsSite(*plan->region, AsSite(site))) return nullptr;
  return Make(reinterpret_cast<PyTypeObject*>(type), site, std::move(plan));
}

int DirectCallTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(AsDirectCall(self)->site);
  return 0;
}

int DirectCallClear(PyObject* self) {
  Py_CLEAR(AsDirectCall(self)->site);
  return 0;
}

void DirectCallDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  DirectCall* call = AsDirectCall(self);
  if (call->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  DirectCallClear(self);
  delete call->plan;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"site", T_OBJECT_EX, offsetof(DirectCall, site), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(DirectCall, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"of_region", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(DirectCallOfRegion)),
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(DirectCallNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DirectCallDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(DirectCallTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(DirectCallClear)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.DirectCall", sizeof(DirectCall), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

}  // namespace

bool InitDirectCall(PyObject* module) {
  direct_call_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (direct_call_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "DirectCall", reinterpret_cast<PyObject*>(direct_call_type)) == 0;
}

bool CallOperator(const Plan& plan, const DLTensor* tensors, std::vector<OwnedTensor>* results) {
  GradMode mode(*plan.torch, plan.grad_mode);
  if (plan.function != nullptr) return CallByFunction(plan, tensors, results);
  return CallByName(plan, tensors, results);
}

bool SizesOfWritten(const Plan& plan, const DLTensor* tensors, std::vector<int64_t>* sizes) {
  auto sizes_of = [&](const Argument& given) {
    const DLTensor& tensor = tensors[given.tensor];
    std::vector<int64_t> found(tensor.shape, tensor.shape + tensor.ndim);
    for (size_t i = 0; i < given.order.size(); ++i) found[i] = tensor.shape[given.order[i]];
    return found;
  };
  if (!plan.written) return false;
  const WrittenResult& written = *plan.written;
  auto is_given = [&](const Argument& argument) {
    return argument.kind == Argument::Kind::kTensor && argument.tensor < plan.result_tensor;
  };
  for (const Argument& given : plan.arguments) {
    if (!is_given(given) || given.order.empty()) continue;
    if (given.order.size() != static_cast<size_t>(tensors[given.tensor].ndim)) return false;
  }
  *sizes = sizes_of(plan.arguments[written.argument]);
  if (written.is_product) {
    std::vector<int64_t> second = sizes_of(plan.arguments[written.argument + 1]);
    if (second.size() != sizes->size() || (second.size() != 2 && second.size() != 3)) return false;
    sizes->back() = second.back();
    return true;
  }
  // Others would be broadcast.
  for (const Argument& given : plan.arguments) {
    if (is_given(given) && sizes_of(given) != *sizes) return false;
  }
  return true;
}

}  // namespace torch2ort
