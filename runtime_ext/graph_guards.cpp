#include "graph_guards.h"

#include <unordered_map>
#include <vector>

#include "dict_version.h"
#include "tensors/exchange.h"

namespace torch2ort {

namespace {

// Kinds of comparisons; the numbers are those of torch2ort._native.Guards.
enum Kind : int {
  kItems = 0,      // a dictionary: its keys and the identity of its values
  kEntry = 1,      // one key of a dictionary, which may be missing
  kSequence = 2,   // a list or tuple: its length and the identity of its items
  kType = 3,       // the type of an object, and which dictionary holds its attributes
  kAttribute = 4,  // the value of an attribute: its identity
  kTensors = 5,    // a dictionary of tensors: as kItems, and the TensorForm of each
  kValue = 6,      // the result of a callable, compared with ==
  kSize = 7,       // the number of entries of a dictionary
  kKinds = 8,
};

// The properties that a graph depends on of a tensor that it is fed with.
struct TensorForm {
  PyObject* type = nullptr;
  PyTypeObject* exact = nullptr;  // its actual type, which may be one equivalent to `type`
  bool requires_grad = false;
  bool described = false;
  DLDataType dtype = {0, 0, 0};
  DLDevice device = {0, 0};
  std::vector<int64_t> shape_and_strides;

  bool operator==(const TensorForm& other) const {
    return type == other.type && requires_grad == other.requires_grad && described == other.described &&
           dtype == other.dtype && device == other.device && shape_and_strides == other.shape_and_strides;
  }
};

// One comparison. References are owned, except for the values of kTensors: a tensor that the model dropped
// must not stay alive, and another one at its address is equivalent if it has the same form.
struct Check {
  Kind kind;
  PyObject* owner;
  PyObject* name;                   // of kEntry and kAttribute; of kTensors, a tuple of equivalent types
  std::vector<PyObject*> expected;  // kItems, kTensors: key, value, key, value, ...; else the values
  std::vector<TensorForm> forms;
  Py_ssize_t size = 0;       // of kSize
  Py_ssize_t position = -1;  // of kEntry: position of the entry in the dictionary's iteration
};

// A dictionary that checks compare, with its version when all of them last held.
struct Seen {
  PyObject* dictionary;  // the checks own it
  uint64_t version;
  size_t begin, end;  // its checks, of Checks::of_dictionaries
};

// All comparisons of a set of guards.
struct Checks {
  std::vector<Check> all;
  // Where dictionaries have versions: each dictionary once, its checks, and the checks that need more than a
  // version. Arming a check again leaves the version unchanged: it is updated when all checks have held.
  std::vector<Seen> dictionaries;
  std::vector<size_t> of_dictionaries;
  std::vector<size_t> others;
};

struct Guards {
  PyObject_HEAD Checks* checks;
};

PyTypeObject* guards_type = nullptr;
// torch.Tensor.requires_grad, and the function that reads it: the lookup of the attribute would double the
// time.
PyObject* requires_grad_descriptor = nullptr;
descrgetfunc read_requires_grad = nullptr;

Guards* AsGuards(PyObject* self) { return reinterpret_cast<Guards*>(self); }

bool OwnsValues(const Check& check) { return check.kind != kTensors; }

// True if expected[i] is an owned reference.
bool IsOwned(const Check& check, size_t i) { return OwnsValues(check) || i % 2 == 0; }

void DropExpected(Check* check) {
  std::vector<PyObject*> expected;
  expected.swap(check->expected);  // first, as a destructor may run Python code
  check->forms.clear();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (IsOwned(*check, i)) Py_XDECREF(expected[i]);
  }
}

// False with an exception set on failure.
bool FindRequiresGrad() {
  if (read_requires_grad != nullptr) return true;
  auto* type = reinterpret_cast<PyObject*>(config.tensor_type);
  requires_grad_descriptor = PyObject_GetAttrString(type, "requires_grad");
  if (requires_grad_descriptor == nullptr) return false;
  read_requires_grad =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(requires_grad_descriptor), Py_tp_descr_get));
  if (read_requires_grad == nullptr) {
    PyErr_SetString(PyExc_TypeError, "requires_grad is no descriptor of torch.Tensor");
    return false;
  }
  return true;
}

// 1 or 0; -1 with an exception set.
int RequiresGrad(PyObject* tensor) {
  Ref value = Ref::Steal(
      read_requires_grad(requires_grad_descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))));
  if (value.get() == Py_True) return 1;
  return value ? PyObject_IsTrue(value.get()) : -1;
}

// The position of `key` in an iteration over `dictionary`; -1 if it is missing.
Py_ssize_t PositionOf(PyObject* dictionary, PyObject* key) {
  Py_ssize_t position = 0;
  PyObject *found, *value;
  while (PyDict_Next(dictionary, &position, &found, &value)) {
    if (found == key) return position - 1;
  }
  return -1;
}

// The type of `tensor`; the first of the tuple `alike` if it is one of them.
PyObject* TypeOf(PyObject* tensor, PyObject* alike) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  Py_ssize_t count = PyTuple_Size(alike);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyTuple_GetItem(alike, i) == type) return PyTuple_GetItem(alike, 0);
  }
  return type;
}

// Describes the present state of `tensor`. False with an exception set on failure.
bool Describe(PyObject* tensor, PyObject* alike, TensorForm* form) {
  form->type = TypeOf(tensor, alike);
  form->exact = Py_TYPE(tensor);
  int requires_grad = RequiresGrad(tensor);
  if (requires_grad < 0) return false;
  form->requires_grad = requires_grad != 0;
  DLTensor seen;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
    PyErr_Clear();  // no strided tensor: sparse, meta, quantized
    form->described = false;
    return true;
  }
  form->described = true;
  form->dtype = seen.dtype;
  form->device = seen.device;
  form->shape_and_strides.assign(seen.shape, seen.shape + seen.ndim);
  if (seen.strides != nullptr) {
    form->shape_and_strides.insert(form->shape_and_strides.end(), seen.strides, seen.strides + seen.ndim);
  }
  return true;
}

// 1 if `tensor` has the form, 0 if not; -1 with an exception set.
int HasForm(PyObject* tensor, PyObject* alike, const TensorForm& form) {
  if (Py_TYPE(tensor) != form.exact && TypeOf(tensor, alike) != form.type) return 0;
  int requires_grad = RequiresGrad(tensor);
  if (requires_grad < 0) return -1;
  if ((requires_grad != 0) != form.requires_grad) return 0;
  DLTensor seen;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
    PyErr_Clear();
    return form.described ? 0 : 1;
  }
  if (!form.described || seen.dtype != form.dtype || seen.device != form.device) return 0;
  auto rank = static_cast<size_t>(seen.ndim);
  size_t given = seen.strides == nullptr ? rank : 2 * rank;
  if (form.shape_and_strides.size() != given) return 0;
  const int64_t* expected = form.shape_and_strides.data();
  for (size_t i = 0; i < rank; ++i) {
    if (seen.shape[i] != expected[i]) return 0;
    if (seen.strides != nullptr && seen.strides[i] != expected[rank + i]) return 0;
  }
  return 1;
}

// Makes the present state the one that `check` compares with. False with an exception set on failure.
bool Arm(Check* check) {
  DropExpected(check);
  auto keep = [check](PyObject* value, bool owned) {
    if (owned) Py_XINCREF(value);
    check->expected.push_back(value);
  };
  switch (check->kind) {
    case kItems:
    case kTensors: {
      Py_ssize_t position = 0;
      PyObject *key, *value;
      while (PyDict_Next(check->owner, &position, &key, &value)) {
        keep(key, true);
        keep(value, OwnsValues(*check));
        if (check->kind != kTensors) continue;
        check->forms.emplace_back();
        if (IsTensor(value) && !Describe(value, check->name, &check->forms.back())) return false;
      }
      return true;
    }
    case kEntry: {
      PyObject* value = PyDict_GetItemWithError(check->owner, check->name);
      if (value == nullptr && PyErr_Occurred()) return false;
      keep(value, true);
      check->position = value == nullptr ? -1 : PositionOf(check->owner, check->name);
      return true;
    }
    case kSequence: {
      bool list = PyList_Check(check->owner);
      Py_ssize_t size = list ? PyList_Size(check->owner) : PyTuple_Size(check->owner);
      for (Py_ssize_t i = 0; i < size; ++i) {
        keep(list ? PyList_GetItem(check->owner, i) : PyTuple_GetItem(check->owner, i), true);
      }
      return true;
    }
    case kSize:
      check->size = PyDict_Size(check->owner);
      return true;
    case kValue: {
      PyObject* value = PyObject_CallNoArgs(check->owner);
      if (value == nullptr) return false;
      check->expected.push_back(value);  // the reference is new
      return true;
    }
    case kType: {
      keep(reinterpret_cast<PyObject*>(Py_TYPE(check->owner)), true);
      PyObject* attributes = PyObject_GenericGetDict(check->owner, nullptr);
      if (attributes == nullptr) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
        PyErr_Clear();
      }
      check->expected.push_back(attributes);  // the reference is new
      return true;
    }
    default: {
      PyObject* value = PyObject_GetAttr(check->owner, check->name);
      if (value == nullptr) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
        PyErr_Clear();
      }
      check->expected.push_back(value);  // the reference is new
      return true;
    }
  }
}

int SameItems(const Check& check) {
  size_t count = check.expected.size() / 2;
  if (static_cast<size_t>(PyDict_Size(check.owner)) != count) return 0;
  if (count == 0) return 1;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  PyObject* const* expected = check.expected.data();
  while (PyDict_Next(check.owner, &position, &key, &value)) {
    if (key != expected[0] || value != expected[1]) return 0;
    expected += 2;
  }
  return 1;
}

int SameTensors(const Check& check) {
  int same = SameItems(check);
  for (size_t i = 0; same == 1 && i < check.forms.size(); ++i) {
    if (check.forms[i].type == nullptr) continue;        // None
    Ref tensor = Ref::Share(check.expected[2 * i + 1]);  // owned by the dictionary, as the pointers are equal
    same = HasForm(tensor.get(), check.name, check.forms[i]);
  }
  return same;
}

// 1 if the state is unchanged, 0 if not; -1 with an exception set.
int IsSame(const Check& check) {
  switch (check.kind) {
    case kItems:
      return SameItems(check);
    case kTensors:
      return SameTensors(check);
    case kEntry: {
      // The entry is mostly at its last position, which is compared in a third of the time of a lookup.
      Py_ssize_t position = check.position;
      PyObject *key, *value;
      if (position >= 0 && PyDict_Next(check.owner, &position, &key, &value) && key == check.name &&
          value == check.expected[0]) {
        return 1;
      }
      value = PyDict_GetItemWithError(check.owner, check.name);
      if (value == nullptr && PyErr_Occurred()) return -1;
      return value == check.expected[0];
    }
    case kSequence: {
      bool list = PyList_Check(check.owner);
      Py_ssize_t size = list ? PyList_Size(check.owner) : PyTuple_Size(check.owner);
      if (static_cast<size_t>(size) != check.expected.size()) return 0;
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* item = list ? PyList_GetItem(check.owner, i) : PyTuple_GetItem(check.owner, i);
        if (item != check.expected[static_cast<size_t>(i)]) return 0;
      }
      return 1;
    }
    case kSize:
      return PyDict_Size(check.owner) == check.size;
    case kValue: {
      Ref value = Ref::Steal(PyObject_CallNoArgs(check.owner));
      return value ? PyObject_RichCompareBool(value.get(), check.expected[0], Py_EQ) : -1;
    }
    case kType: {
      if (reinterpret_cast<PyObject*>(Py_TYPE(check.owner)) != check.expected[0]) return 0;
      if (check.expected[1] == nullptr) return 1;
      Ref attributes = Ref::Steal(PyObject_GenericGetDict(check.owner, nullptr));
      return attributes ? attributes.get() == check.expected[1] : -1;
    }
    default: {
      Ref value = Ref::Steal(PyObject_GetAttr(check.owner, check.name));
      if (!value) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
      }
      return value.get() == check.expected[0];
    }
  }
}

// True if the version of its dictionary determines the result of the check.
bool IsOfVersion(const Check& check) {
  return check.kind == kItems || check.kind == kEntry || check.kind == kSize;
}

// Groups the checks by dictionary, and collects those that need more than a version.
void Group(Checks* checks) {
  std::vector<PyObject*> order;
  std::unordered_map<PyObject*, std::vector<size_t>> of;
  for (size_t i = 0; i < checks->all.size(); ++i) {
    const Check& check = checks->all[i];
    if (!IsOfVersion(check)) {
      checks->others.push_back(i);
      continue;
    }
    std::vector<size_t>& same = of[check.owner];
    if (same.empty()) order.push_back(check.owner);
    same.push_back(i);
  }
  for (PyObject* dictionary : order) {
    size_t begin = checks->of_dictionaries.size();
    for (size_t i : of[dictionary]) checks->of_dictionaries.push_back(i);
    checks->dictionaries.push_back({dictionary, 0, begin, checks->of_dictionaries.size()});
  }
}

// 1 if all checks of dictionaries hold, 0 if not; -1 with an exception set. Only dictionaries that have
// changed are compared.
int SameDictionaries(Checks* checks) {
  for (Seen& seen : checks->dictionaries) {
    uint64_t version = DictVersion(seen.dictionary);
    if (version == seen.version) continue;
    for (size_t i = seen.begin; i < seen.end; ++i) {
      int same = IsSame(checks->all[checks->of_dictionaries[i]]);
      if (same != 1) return same;
    }
    seen.version = version;
  }
  return 1;
}

// The first check from `start` on that does not hold, the number of checks if all do; -1 with an exception
// set.
Py_ssize_t First(const Checks& checks, size_t start) {
  for (size_t i = start; i < checks.all.size(); ++i) {
    int same = IsSame(checks.all[i]);
    if (same != 1) return same < 0 ? -1 : static_cast<Py_ssize_t>(i);
  }
  return static_cast<Py_ssize_t>(checks.all.size());
}

// The same of all checks, where dictionaries have versions.
Py_ssize_t FirstByVersions(Checks* checks) {
  int dictionaries = SameDictionaries(checks);
  if (dictionaries != 1) return dictionaries < 0 ? -1 : First(*checks, 0);
  for (size_t i : checks->others) {
    int same = IsSame(checks->all[i]);
    if (same != 1) return same < 0 ? -1 : static_cast<Py_ssize_t>(i);
  }
  return static_cast<Py_ssize_t>(checks->all.size());
}

bool HoldsWhatItCompares(Kind kind, PyObject* owner, PyObject* name) {
  switch (kind) {
    case kItems:
    case kSize:
      return PyDict_Check(owner);
    case kTensors:
      return PyDict_Check(owner) && PyTuple_Check(name);
    case kEntry:
      return PyDict_Check(owner) && name != Py_None;
    case kSequence:
      return PyList_Check(owner) || PyTuple_Check(owner);
    case kAttribute:
      return PyUnicode_Check(name);
    case kValue:
      return PyCallable_Check(owner);
    default:
      return true;
  }
}

bool Add(std::vector<Check>* checks, PyObject* item) {
  int number;
  PyObject *owner, *name;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError, "a check is a tuple (kind, owner, name), not %.200s",
                 TypeName(item).c_str());
    return false;
  }
  if (!PyArg_ParseTuple(item, "iOO:Guards", &number, &owner, &name)) return false;
  if (number < 0 || number >= kKinds || !HoldsWhatItCompares(static_cast<Kind>(number), owner, name)) {
    PyErr_Format(PyExc_TypeError, "a check of kind %d cannot be made of a %.200s and a %.200s", number,
                 TypeName(owner).c_str(), TypeName(name).c_str());
    return false;
  }
  checks->push_back(
      {static_cast<Kind>(number), Ref::Share(owner).release(), Ref::Share(name).release(), {}, {}});
  return Arm(&checks->back());
}

PyObject* GuardsNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"checks", nullptr};
  PyObject* given;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Guards", const_cast<char**>(names), &given))
    return nullptr;
  if (!CheckConfigured() || !FindRequiresGrad()) return nullptr;
  Ref checks = Ref::Steal(PySequence_Tuple(given));
  Ref self = checks ? Ref::Steal(PyType_GenericAlloc(type, 0)) : Ref();
  if (!self) return nullptr;
  Guards* guards = AsGuards(self.get());
  guards->checks = new Checks;
  Py_ssize_t count = PyTuple_Size(checks.get());
  guards->checks->all.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!Add(&guards->checks->all, PyTuple_GetItem(checks.get(), i))) return nullptr;
  }
  if (HasDictVersions()) Group(guards->checks);
  return PyErr_Occurred() ? nullptr : self.release();
}

int GuardsTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (AsGuards(self)->checks == nullptr) return 0;
  for (const Check& check : AsGuards(self)->checks->all) {
    Py_VISIT(check.owner);
    Py_VISIT(check.name);
    for (size_t i = 0; i < check.expected.size(); ++i) {
      if (IsOwned(check, i)) Py_VISIT(check.expected[i]);
    }
  }
  return 0;
}

int GuardsClear(PyObject* self) {
  if (AsGuards(self)->checks == nullptr) return 0;
  Checks checks;
  std::swap(checks, *AsGuards(self)->checks);
  for (Check& check : checks.all) {
    DropExpected(&check);
    Py_CLEAR(check.owner);
    Py_CLEAR(check.name);
  }
  return 0;
}

void GuardsDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  GuardsClear(self);
  delete AsGuards(self)->checks;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* FirstChanged(PyObject* self, PyObject* args) {
  Py_ssize_t start = 0;
  if (!PyArg_ParseTuple(args, "|n:first_changed", &start)) return nullptr;
  Checks* checks = AsGuards(self)->checks;
  Py_ssize_t first = start <= 0 && !checks->dictionaries.empty()
                         ? FirstByVersions(checks)
                         : First(*checks, static_cast<size_t>(start < 0 ? 0 : start));
  if (first < 0) return nullptr;
  return PyLong_FromSsize_t(first < static_cast<Py_ssize_t>(checks->all.size()) ? first : -1);
}

PyObject* AllChanged(PyObject* self, PyObject* args) {
  Py_ssize_t start = 0;
  if (!PyArg_ParseTuple(args, "|n:all_changed", &start)) return nullptr;
  const Checks& checks = *AsGuards(self)->checks;
  auto count = static_cast<Py_ssize_t>(checks.all.size());
  Ref found = Ref::Steal(PyList_New(0));
  for (Py_ssize_t i = start < 0 ? 0 : start; found; ++i) {
    i = First(checks, static_cast<size_t>(i));
    if (i < 0) return nullptr;
    if (i >= count) break;
    Ref position = Ref::Steal(PyLong_FromSsize_t(i));
    if (!position || PyList_Append(found.get(), position.get()) < 0) return nullptr;
  }
  return found.release();
}

Check* CheckAt(PyObject* self, PyObject* index) {
  Py_ssize_t i = PyLong_AsSsize_t(index);
  if (i == -1 && PyErr_Occurred()) return nullptr;
  std::vector<Check>& checks = AsGuards(self)->checks->all;
  if (i < 0 || static_cast<size_t>(i) >= checks.size()) {
    PyErr_Format(PyExc_IndexError, "there are %zu checks, and none at %zd", checks.size(), i);
    return nullptr;
  }
  return &checks[static_cast<size_t>(i)];
}

PyObject* Rearm(PyObject* self, PyObject* index) {
  Check* check = CheckAt(self, index);
  if (check == nullptr || !Arm(check)) return nullptr;
  Py_RETURN_NONE;
}

// True if the dictionary has tensors of the same names and forms, even if they are other objects.
PyObject* IsAlike(PyObject* self, PyObject* index) {
  Check* check = CheckAt(self, index);
  if (check == nullptr) return nullptr;
  if (check->kind != kTensors) {
    PyErr_SetString(PyExc_TypeError, "only tensors are compared by their forms");
    return nullptr;
  }
  Check now{kTensors, check->owner, check->name, {}, {}};
  bool armed = Arm(&now);
  bool alike = armed && now.expected.size() == check->expected.size();
  for (size_t i = 0; alike && i < now.forms.size(); ++i) {
    int same_name = PyObject_RichCompareBool(now.expected[2 * i], check->expected[2 * i], Py_EQ);
    if (same_name < 0) armed = false;
    alike = same_name == 1 && now.forms[i] == check->forms[i];
  }
  DropExpected(&now);
  if (!armed) return nullptr;
  return PyBool_FromLong(alike);
}

PyObject* Expected(PyObject* self, PyObject* index) {
  Check* check = CheckAt(self, index);
  if (check == nullptr) return nullptr;
  if (!OwnsValues(*check)) {
    PyErr_SetString(PyExc_TypeError, "tensors are not kept: there is nothing to compare them with");
    return nullptr;
  }
  // Missing tensors are left out of the list.
  Ref values = Ref::Steal(PyList_New(0));
  for (PyObject* value : check->expected) {
    if (!values || (value != nullptr && PyList_Append(values.get(), value) < 0)) return nullptr;
  }
  return values.release();
}

Py_ssize_t GuardsLength(PyObject* self) {
  return static_cast<Py_ssize_t>(AsGuards(self)->checks->all.size());
}

PyMethodDef methods[] = {
    {"first_changed", FirstChanged, METH_VARARGS, nullptr},
    {"all_changed", AllChanged, METH_VARARGS, nullptr},
    {"rearm", Rearm, METH_O, nullptr},
    {"is_alike", IsAlike, METH_O, nullptr},
    {"expected", Expected, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(GuardsNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(GuardsDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(GuardsTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(GuardsClear)},
    {Py_tp_methods, methods},
    {Py_sq_length, reinterpret_cast<void*>(GuardsLength)},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Guards", sizeof(Guards), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

}  // namespace

bool InitGuards(PyObject* module) {
  guards_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (guards_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "Guards", reinterpret_cast<PyObject*>(guards_type)) == 0;
}

}  // namespace torch2ort
