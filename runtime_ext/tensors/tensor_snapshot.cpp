#include "tensors/tensor_snapshot.h"

#include <vector>

#include "tensors/exchange.h"
#include "tensors/tensor_refcounts.h"

namespace torch2ort {

namespace {

PyTypeObject* noted_type = nullptr;

// ---- form ----

// True or false, or -1 with an exception set.
int Asks(PyObject* tensor, PyObject* name) {
  Ref value = Ref::Steal(PyObject_GetAttr(tensor, name));
  return value ? PyObject_IsTrue(value.get()) : -1;
}

PyObject* Form(PyObject*, PyObject* args) {
  PyObject *tensors, *parameter_type;
  if (!CheckConfigured() ||
      !PyArg_ParseTuple(args, "O!O!:form", &PyList_Type, &tensors, &PyType_Type, &parameter_type)) {
    return nullptr;
  }
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  std::vector<int64_t> form;
  for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
    PyObject* tensor = PyList_GetItem(tensors, i);
    bool parameter = reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == parameter_type;
    bool plain = parameter || Py_TYPE(tensor) == config.tensor_type;
    DLTensor view;
    if (!plain) Py_RETURN_NONE;
    if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    int differentiated = Asks(tensor, requires_grad);
    if (differentiated < 0) return nullptr;
    Py_ssize_t first = 0;  // position of the same object
    while (PyList_GetItem(tensors, first) != tensor) ++first;
    form.insert(form.end(), {first, view.dtype.code, view.dtype.bits, view.device.device_type,
                             view.device.device_id, differentiated, parameter, view.ndim});
    form.insert(form.end(), view.shape, view.shape + view.ndim);
    if (view.strides == nullptr && view.ndim > 0) Py_RETURN_NONE;
    form.insert(form.end(), view.strides, view.strides + view.ndim);
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(form.data()),
                                   static_cast<Py_ssize_t>(form.size() * sizeof(int64_t)));
}

// ---- Noted ----

struct Note {
  const void* address;
  long long writes;
};

struct Noted {
  PyObject_HEAD PyObject* tensors;  // a tuple
  PyObject* writes_of;              // returns torch's count of writes, where it is not known here
  std::vector<Note>* notes;
};

Noted* AsNoted(PyObject* self) { return reinterpret_cast<Noted*>(self); }

// The present address of a tensor: null if its memory was freed.
const void* AddressOf(PyObject* tensor) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) == 0)
    return static_cast<const char*>(view.data) + view.byte_offset;
  PyErr_Clear();
  return nullptr;
}

// The number of writes by torch to a tensor; -1 with an exception set on failure.
long long WritesOf(PyObject* self, PyObject* tensor) {
  long counted = CountedWrites(tensor);
  if (counted >= 0) return counted;
  Ref asked = Ref::Steal(CallOne(AsNoted(self)->writes_of, tensor));
  return asked ? PyLong_AsLongLong(asked.get()) : -1;
}

PyObject* NotedNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"tensors", "writes_of", nullptr};
  PyObject *tensors, *writes_of;
  if (!CheckConfigured() || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:Noted", const_cast<char**>(names),
                                                         &PyTuple_Type, &tensors, &writes_of)) {
    return nullptr;
  }
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  AsNoted(self.get())->tensors = Ref::Share(tensors).release();
  AsNoted(self.get())->writes_of = Ref::Share(writes_of).release();
  auto* notes = AsNoted(self.get())->notes = new std::vector<Note>;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
    PyObject* tensor = PyTuple_GetItem(tensors, i);
    if (!IsTensor(tensor)) {
      PyErr_Format(PyExc_TypeError, "Noted: item %zd is of type %.200s", i, TypeName(tensor).c_str());
      return nullptr;
    }
    notes->push_back({AddressOf(tensor), WritesOf(self.get(), tensor)});
    if (notes->back().writes < 0) return nullptr;
  }
  return self.release();
}

int NotedTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(AsNoted(self)->tensors);
  Py_VISIT(AsNoted(self)->writes_of);
  return 0;
}

int NotedClear(PyObject* self) {
  Py_CLEAR(AsNoted(self)->tensors);
  Py_CLEAR(AsNoted(self)->writes_of);
  return 0;
}

void NotedDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  NotedClear(self);
  delete AsNoted(self)->notes;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// Collects the results of `add` for each of the tensors at `positions`: an object for the list, nothing, or
// false with an exception set.
template <typename Add>
PyObject* Among(PyObject* self, PyObject* positions, Add add) {
  Ref asked = Ref::Steal(PySequence_Tuple(positions));
  Ref found = asked ? Ref::Steal(PyList_New(0)) : Ref();
  for (Py_ssize_t i = 0; found && i < PyTuple_Size(asked.get()); ++i) {
    Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(asked.get(), i));
    if (position == -1 && PyErr_Occurred()) return nullptr;
    PyObject* tensor = PyTuple_GetItem(AsNoted(self)->tensors, position);
    if (tensor == nullptr) return nullptr;
    Ref item;
    if (!add((*AsNoted(self)->notes)[static_cast<size_t>(position)], position, tensor, &item)) return nullptr;
    if (item && PyList_Append(found.get(), item.get()) < 0) return nullptr;
  }
  return found.release();
}

PyObject* Moved(PyObject* self, PyObject* positions) {
  return Among(self, positions, [](const Note& note, Py_ssize_t position, PyObject* tensor, Ref* item) {
    if (AddressOf(tensor) == note.address) return true;
    *item = Ref::Steal(PyLong_FromSsize_t(position));
    return static_cast<bool>(*item);
  });
}

PyObject* Written(PyObject* self, PyObject* positions) {
  return Among(self, positions, [self](const Note& note, Py_ssize_t position, PyObject* tensor, Ref* item) {
    long long writes = WritesOf(self, tensor);
    if (writes < 0) return false;
    if (writes == note.writes) return true;
    *item = Ref::Steal(Py_BuildValue("(nLL)", position, writes, note.writes));
    return static_cast<bool>(*item);
  });
}

PyMethodDef noted_methods[] = {
    {"moved", Moved, METH_O, nullptr},
    {"written", Written, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot noted_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NotedNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(NotedDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(NotedTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(NotedClear)},
    {Py_tp_methods, noted_methods},
    {0, nullptr},
};

PyType_Spec noted_spec = {"torch2ort._native.Noted", sizeof(Noted), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, noted_slots};

PyMethodDef functions[] = {
    {"form", Form, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool InitNoted(PyObject* module) {
  noted_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&noted_spec));
  return noted_type != nullptr && PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddObjectRef(module, "Noted", reinterpret_cast<PyObject*>(noted_type)) == 0;
}

}  // namespace torch2ort
