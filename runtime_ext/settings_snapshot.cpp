#include "settings_snapshot.h"

namespace torch2ort {

namespace {

constexpr size_t kUsual = 12;

struct Switches {
  PyObject_HEAD PyObject* reads;  // a tuple of tuples (callable, its arguments)
  PyObject* make;
  PyObject* found;  // the results of `reads` when `made` was made, a tuple; empty before the first time
  PyObject* made;
};

Switches* AsSwitches(PyObject* self) { return reinterpret_cast<Switches*>(self); }

PyObject* SwitchesNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"reads", "make", nullptr};
  PyObject *reads, *make;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:Switches", const_cast<char**>(names), &PyTuple_Type,
                                   &reads, &make)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(reads); ++i) {
    PyObject* read = PyTuple_GetItem(reads, i);
    if (!PyTuple_Check(read) || PyTuple_Size(read) != 2 || !PyTuple_Check(PyTuple_GetItem(read, 1))) {
      PyErr_Format(PyExc_TypeError, "Switches: item %zd is no tuple (callable, arguments)", i);
      return nullptr;
    }
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  AsSwitches(self)->reads = Ref::Share(reads).release();
  AsSwitches(self)->make = Ref::Share(make).release();
  return self;
}

int SwitchesTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(AsSwitches(self)->reads);
  Py_VISIT(AsSwitches(self)->make);
  Py_VISIT(AsSwitches(self)->found);
  Py_VISIT(AsSwitches(self)->made);
  return 0;
}

int SwitchesClear(PyObject* self) {
  Py_CLEAR(AsSwitches(self)->reads);
  Py_CLEAR(AsSwitches(self)->make);
  Py_CLEAR(AsSwitches(self)->found);
  Py_CLEAR(AsSwitches(self)->made);
  return 0;
}

void SwitchesDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  SwitchesClear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* Now(PyObject* self, PyObject*) {
  // The calls may let another thread run, which must find a consistent state.
  Ref reads = Ref::Share(AsSwitches(self)->reads);
  auto count = static_cast<size_t>(PyTuple_Size(reads.get()));
  SmallArray<Ref, kUsual> values(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* read = PyTuple_GetItem(reads.get(), static_cast<Py_ssize_t>(i));
    values[i] = Ref::Steal(PyObject_Call(PyTuple_GetItem(read, 0), PyTuple_GetItem(read, 1), nullptr));
    if (!values[i]) return nullptr;
  }
  PyObject* before = AsSwitches(self)->found;
  bool same = before != nullptr;
  for (size_t i = 0; same && i < count; ++i) {
    same = PyTuple_GetItem(before, static_cast<Py_ssize_t>(i)) == values[i].get();
  }
  if (same) return Ref::Share(AsSwitches(self)->made).release();
  SmallArray<PyObject*, kUsual> borrowed(count);
  for (size_t i = 0; i < count; ++i) borrowed[i] = values[i].get();
  Ref found = PackTuple(borrowed.data(), count);
  Ref made = found ? Ref::Steal(PyObject_Call(AsSwitches(self)->make, found.get(), nullptr)) : Ref();
  if (!made) return nullptr;
  Ref old_found = Ref::Steal(std::exchange(AsSwitches(self)->found, found.release()));
  Ref old_made = Ref::Steal(std::exchange(AsSwitches(self)->made, Ref::Share(made.get()).release()));
  return made.release();
}

PyMethodDef methods[] = {
    {"now", Now, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(SwitchesNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(SwitchesDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(SwitchesTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(SwitchesClear)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Switches", sizeof(Switches), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

}  // namespace

bool InitSwitches(PyObject* module) {
  Ref type = Ref::Steal(PyType_FromSpec(&spec));
  return type && PyModule_AddObjectRef(module, "Switches", type.get()) == 0;
}

}  // namespace torch2ort
