#include "call/site.h"

#include <utility>

namespace torch2ort {

PyTypeObject* site_type = nullptr;

namespace {

// The constructor's arguments, borrowed.
struct Given {
  PyObject *name, *key, *forward, *setup_context, *backward, *arguments, *tensor_positions, *needs_input_grad;
  PyObject *input_dtypes, *outputs, *tensor_outputs, *output_dtypes, *output_ranks;
  PyObject *non_differentiable, *mutated, *forward_map, *backward_map, *originals;
  int returns_tuple, training, probed;
};

bool Complain(const char* what) {
  PyErr_Format(PyExc_ValueError, "Site: %s", what);
  return false;
}

bool ParseInt(PyObject* object, Py_ssize_t* value) {
  *value = PyNumber_AsSsize_t(object, PyExc_OverflowError);
  return *value != -1 || !PyErr_Occurred();
}

bool ParseInts(PyObject* tuple, std::vector<Py_ssize_t>* values) {
  if (tuple == nullptr) return true;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) {
    Py_ssize_t value;
    if (!ParseInt(PyTuple_GetItem(tuple, i), &value)) return false;
    values->push_back(value);
  }
  return true;
}

// Parses increasing positions below `limit`, and builds the inverse: position -> index or -1.
bool ParsePositions(PyObject* tuple, Py_ssize_t limit, const char* what, std::vector<Py_ssize_t>* positions,
                    std::vector<int>* index) {
  if (!ParseInts(tuple, positions)) return false;
  index->assign(static_cast<size_t>(limit), -1);
  Py_ssize_t last = -1;
  for (Py_ssize_t position : *positions) {
    if (position <= last || position >= limit) return Complain(what);
    last = position;
  }
  for (size_t i = 0; i < positions->size(); ++i)
    (*index)[static_cast<size_t>((*positions)[i])] = static_cast<int>(i);
  return true;
}

// The index of `position`, or -1 with ValueError set.
int Lookup(const std::vector<int>& index, Py_ssize_t position, const char* what) {
  if (position >= 0 && position < static_cast<Py_ssize_t>(index.size())) {
    int found = index[static_cast<size_t>(position)];
    if (found >= 0) return found;
  }
  Complain(what);
  return -1;
}

Ref TorchDType(PyObject* name) {
  Ref torch = Ref::Steal(PyImport_ImportModule("torch"));
  return torch ? Ref::Steal(PyObject_GetAttr(torch.get(), name)) : Ref();
}

bool ParseInputs(Site* site, const Given& given) {
  std::vector<Py_ssize_t> positions;
  if (!ParsePositions(given.tensor_positions, PyTuple_Size(given.arguments),
                      "tensor_positions must be increasing positions of arguments", &positions,
                      site->input_index)) {
    return false;
  }
  if (PyTuple_Size(given.needs_input_grad) != PyTuple_Size(given.arguments)) {
    return Complain("needs_input_grad needs one entry an argument");
  }
  if (PyTuple_Size(given.input_dtypes) != static_cast<Py_ssize_t>(positions.size())) {
    return Complain("input_dtypes needs one entry a tensor argument");
  }
  site->inputs->resize(positions.size());
  for (size_t i = 0; i < positions.size(); ++i) {
    InputSpec& input = (*site->inputs)[i];
    PyObject* dtype = PyTuple_GetItem(given.input_dtypes, static_cast<Py_ssize_t>(i));
    input.argument = positions[i];
    input.original = -1;
    if (!ParseDType(dtype, &input.dtype)) return false;
    input.torch_dtype = TorchDType(dtype);
    if (!input.torch_dtype) return false;
    int needs = PyObject_IsTrue(PyTuple_GetItem(given.needs_input_grad, positions[i]));
    if (needs < 0) return false;
    input.needs_grad = needs != 0;
    input.requires_grad = needs != 0 && (IsFloating(input.dtype) || input.dtype.code == kDLComplex);
    site->executable |= input.needs_grad && site->training;
  }
  return true;
}

bool ParseInputFlags(Site* site, const Given& given) {
  std::vector<Py_ssize_t> mutated;
  if (!ParseInts(given.mutated, &mutated)) return false;
  for (Py_ssize_t argument : mutated) {
    int i = Lookup(*site->input_index, argument, "mutated must hold positions of tensor arguments");
    if (i < 0) return false;
    (*site->inputs)[static_cast<size_t>(i)].mutated = true;
  }
  for (InputSpec& input : *site->inputs) {
    bool shared = input.mapped || (!given.probed && !input.mutated);
    input.access = shared ? Access::kShared : input.mutated ? Access::kCopied : Access::kProbed;
  }
  return true;
}

bool ParseOutputs(Site* site, const Given& given) {
  std::vector<Py_ssize_t> positions, ranks;
  if (!ParsePositions(given.tensor_outputs, PyTuple_Size(given.outputs),
                      "tensor_outputs must be increasing positions of outputs", &positions,
                      site->output_index) ||
      !ParseInts(given.output_ranks, &ranks)) {
    return false;
  }
  site->returned = positions.size();
  auto count = static_cast<size_t>(PyTuple_Size(given.output_dtypes));
  if (count < positions.size() || ranks.size() != count) {
    return Complain(
        "output_dtypes and output_ranks need one entry a tensor output, mutated arguments that forward "
        "does not return included");
  }
  for (size_t i = 0; i < count; ++i) {
    if (ranks[i] < 0 || ranks[i] > kMaxRank) return Complain("output_ranks must hold numbers from 0 to 64");
    OutputSpec output{};
    Py_ssize_t extra = static_cast<Py_ssize_t>(i) - static_cast<Py_ssize_t>(positions.size());
    output.position = extra < 0 ? positions[i] : PyTuple_Size(given.outputs) + extra;
    output.rank = static_cast<int32_t>(ranks[i]);
    output.differentiable = true;
    output.mapped_input = -1;
    if (!ParseDType(PyTuple_GetItem(given.output_dtypes, static_cast<Py_ssize_t>(i)), &output.dtype))
      return false;
    site->tensor_outputs->push_back(output);
  }
  std::vector<Py_ssize_t> non_differentiable;
  if (!ParseInts(given.non_differentiable, &non_differentiable)) return false;
  for (Py_ssize_t position : non_differentiable) {
    int i = Lookup(*site->output_index, position, "non_differentiable must hold positions of tensor outputs");
    if (i < 0) return false;
    (*site->tensor_outputs)[static_cast<size_t>(i)].differentiable = false;
  }
  return true;
}

bool ParseOriginals(Site* site, const Given& given) {
  PyObject *key, *value;
  Py_ssize_t cursor = 0, argument, number;
  while (given.originals != nullptr && PyDict_Next(given.originals, &cursor, &key, &value)) {
    if (!ParseInt(key, &argument) || !ParseInt(value, &number)) return false;
    int i =
        Lookup(*site->input_index, argument, "originals must map positions of tensor arguments to numbers");
    if (i < 0) return false;
    (*site->inputs)[static_cast<size_t>(i)].original = static_cast<int>(number);
  }
  return true;
}

bool ParseMaps(Site* site, const Given& given) {
  PyObject *key, *value;
  Py_ssize_t cursor = 0, output, argument;
  const char* forward_rule =
      "forward_map must map positions of tensor outputs to positions of tensor arguments";
  while (given.forward_map != nullptr && PyDict_Next(given.forward_map, &cursor, &key, &value)) {
    if (!ParseInt(key, &output) || !ParseInt(value, &argument)) return false;
    int o = Lookup(*site->output_index, output, forward_rule);
    int i = o < 0 ? -1 : Lookup(*site->input_index, argument, forward_rule);
    if (i < 0) return false;
    (*site->tensor_outputs)[static_cast<size_t>(o)].mapped_input = i;
    (*site->inputs)[static_cast<size_t>(i)].mapped = true;
  }
  const char* backward_rule =
      "backward_map must map positions of tensor arguments to positions of tensor outputs";
  site->gradient_mapped->assign(site->inputs->size(), -1);
  site->gradient_warned->assign(site->inputs->size(), 0);
  cursor = 0;
  while (given.backward_map != nullptr && PyDict_Next(given.backward_map, &cursor, &key, &value)) {
    if (!ParseInt(key, &argument) || !ParseInt(value, &output)) return false;
    int i = Lookup(*site->input_index, argument, backward_rule);
    int o = i < 0 ? -1 : Lookup(*site->output_index, output, backward_rule);
    if (o < 0) return false;
    (*site->gradient_mapped)[static_cast<size_t>(i)] = o;
    (*site->tensor_outputs)[static_cast<size_t>(o)].gradient_mapped = true;
  }
  for (size_t o = 0; o < site->returned; ++o) {
    bool mapped = (*site->tensor_outputs)[o].gradient_mapped;
    site->gradient_access->push_back(mapped || !given.probed ? Access::kShared : Access::kProbed);
  }
  return true;
}

// torch names a Function's gradient node after the class, without module and enclosing scopes.
bool NameBackward(Site* site) {
  const char* text = PyUnicode_AsUTF8AndSize(site->name, nullptr);
  if (text == nullptr) return false;
  std::string name = text;
  name = name.substr(0, name.find('#'));
  name = name.substr(name.rfind('.') + 1);
  *site->backward_name = name + "Backward";
  return true;
}

void SetObject(PyObject** slot, PyObject* object) {
  Py_XINCREF(object);
  *slot = object;
}

bool Fill(Site* site, const Given& given) {
  SetObject(&site->name, given.name);
  SetObject(&site->key, given.key);
  SetObject(&site->forward, given.forward);
  SetObject(&site->setup_context, given.setup_context == Py_None ? nullptr : given.setup_context);
  SetObject(&site->backward, given.backward);
  SetObject(&site->arguments, given.arguments);
  SetObject(&site->needs_input_grad, given.needs_input_grad);
  SetObject(&site->outputs, given.outputs);
  site->returns_tuple = given.returns_tuple != 0;
  site->training = given.training != 0;
  site->trusted = given.probed == 0;
  site->backward_name = new std::string;
  site->inputs = new std::vector<InputSpec>;
  site->tensor_outputs = new std::vector<OutputSpec>;
  site->output_index = new std::vector<int>;
  site->input_index = new std::vector<int>;
  site->gradient_mapped = new std::vector<int>;
  site->gradient_warned = new std::vector<char>;
  site->gradient_access = new std::vector<Access>;
  if (!site->returns_tuple && PyTuple_Size(given.outputs) != 1) {
    return Complain("outputs needs exactly one entry when returns_tuple is False");
  }
  return NameBackward(site) && ParseInputs(site, given) && ParseOutputs(site, given) &&
         ParseMaps(site, given) && ParseOriginals(site, given) && ParseInputFlags(site, given);
}

// Checks that every required argument was given; setup_context and those after `training` have defaults.
bool CheckGiven(const Given& given) {
  const std::pair<const char*, const void*> required[] = {
      {"name", given.name},
      {"key", given.key},
      {"forward", given.forward},
      {"backward", given.backward},
      {"arguments", given.arguments},
      {"tensor_positions", given.tensor_positions},
      {"needs_input_grad", given.needs_input_grad},
      {"input_dtypes", given.input_dtypes},
      {"outputs", given.outputs},
      {"tensor_outputs", given.tensor_outputs},
      {"output_dtypes", given.output_dtypes},
      {"output_ranks", given.output_ranks},
      {"returns_tuple", given.returns_tuple < 0 ? nullptr : &given},
      {"training", given.training < 0 ? nullptr : &given},
  };
  for (const auto& [name, value] : required) {
    if (value != nullptr) continue;
    PyErr_Format(PyExc_TypeError, "Site() missing required keyword-only argument: '%s'", name);
    return false;
  }
  return true;
}

PyObject* SiteNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"name",         "key",           "forward",          "setup_context",
                                "backward",     "arguments",     "tensor_positions", "needs_input_grad",
                                "input_dtypes", "outputs",       "tensor_outputs",   "output_dtypes",
                                "output_ranks", "returns_tuple", "training",         "non_differentiable",
                                "mutated",      "forward_map",   "backward_map",     "probed",
                                "originals",    nullptr};
  Given given{};
  given.returns_tuple = given.training = -1;
  given.probed = 1;
  if (!CheckConfigured()) return nullptr;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "|$UUOOOO!O!O!O!O!O!O!O!ppO!O!O!O!pO!:Site", const_cast<char**>(names), &given.name,
          &given.key, &given.forward, &given.setup_context, &given.backward, &PyTuple_Type, &given.arguments,
          &PyTuple_Type, &given.tensor_positions, &PyTuple_Type, &given.needs_input_grad, &PyTuple_Type,
          &given.input_dtypes, &PyTuple_Type, &given.outputs, &PyTuple_Type, &given.tensor_outputs,
          &PyTuple_Type, &given.output_dtypes, &PyTuple_Type, &given.output_ranks, &given.returns_tuple,
          &given.training, &PyTuple_Type, &given.non_differentiable, &PyTuple_Type, &given.mutated,
          &PyDict_Type, &given.forward_map, &PyDict_Type, &given.backward_map, &given.probed, &PyDict_Type,
          &given.originals) ||
      !CheckGiven(given)) {
    return nullptr;
  }
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self || !Fill(AsSite(self.get()), given)) return nullptr;
  return self.release();
}

int SiteTraverse(PyObject* self, visitproc visit, void* arg) {
  Site* site = AsSite(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(site->forward);
  Py_VISIT(site->setup_context);
  Py_VISIT(site->backward);
  Py_VISIT(site->arguments);
  Py_VISIT(site->needs_input_grad);
  Py_VISIT(site->outputs);
  return 0;
}

int SiteClear(PyObject* self) {
  Site* site = AsSite(self);
  Py_CLEAR(site->forward);
  Py_CLEAR(site->setup_context);
  Py_CLEAR(site->backward);
  Py_CLEAR(site->arguments);
  Py_CLEAR(site->needs_input_grad);
  Py_CLEAR(site->outputs);
  return 0;
}

void SiteDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Site* site = AsSite(self);
  if (site->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  SiteClear(self);
  Py_CLEAR(site->name);
  Py_CLEAR(site->key);
  delete site->backward_name;
  delete site->inputs;
  delete site->tensor_outputs;
  delete site->output_index;
  delete site->input_index;
  delete site->gradient_mapped;
  delete site->gradient_warned;
  delete site->gradient_access;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* SiteRepr(PyObject* self) {
  return PyUnicode_FromFormat("<Site %U of %U>", AsSite(self)->key, AsSite(self)->name);
}

PyMemberDef members[] = {
    {"name", T_OBJECT_EX, offsetof(Site, name), READONLY, nullptr},
    {"key", T_OBJECT_EX, offsetof(Site, key), READONLY, nullptr},
    {"calls", T_LONGLONG, offsetof(Site, calls), READONLY, nullptr},
    {"copied_bytes", T_LONGLONG, offsetof(Site, copied_bytes), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Site, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(SiteNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(SiteDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(SiteTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(SiteClear)},
    {Py_tp_repr, reinterpret_cast<void*>(SiteRepr)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Site", sizeof(Site), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

}  // namespace

bool InitSite(PyObject* module) {
  site_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (site_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "Site", reinterpret_cast<PyObject*>(site_type)) == 0;
}

}  // namespace torch2ort
