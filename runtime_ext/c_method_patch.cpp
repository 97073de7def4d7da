#include "c_method_patch.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace torch2ort {

namespace {

// CPython's layout of a method of C code that is bound to its owner. The stable ABI hides the second field,
// so the value found there is compared with the ABI's answers.
struct BoundMethod {
  PyObject head;
  PyMethodDef* definition;
};

using WithKeywords = PyObject* (*)(PyObject* owner, PyObject* args, PyObject* kwargs);

PyMethodDef* definition = nullptr;  // whose function is replaced; null between interceptions
PyCFunction original = nullptr;     // kept for calls that are running when an interception ends
PyObject* stand_in = nullptr;

PyCFunction AsEntry(WithKeywords method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}
WithKeywords TakingKeywords(PyCFunction entry) {
  return reinterpret_cast<WithKeywords>(reinterpret_cast<void (*)()>(entry));
}

// The stand-in's result; null without an exception if the method itself is to answer.
PyObject* AskStandIn(PyObject* owner, PyObject* args, PyObject* kwargs) {
  Ref callable = Ref::Share(stand_in);
  if (!callable) return nullptr;
  PyObject* keywords = kwargs == nullptr ? Py_None : kwargs;
  PyObject* result = PyObject_CallFunctionObjArgs(callable.get(), owner, args, keywords, nullptr);
  if (result != Py_NotImplemented) return result;
  Py_DECREF(result);
  return nullptr;
}

// The functions that callers reach during an interception, one for each way of passing arguments.
PyObject* CallWithKeywords(PyObject* owner, PyObject* args, PyObject* kwargs) {
  PyObject* result = AskStandIn(owner, args, kwargs);
  if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  return TakingKeywords(original)(owner, args, kwargs);
}
PyObject* CallWithout(PyObject* owner, PyObject* args) {
  PyObject* result = AskStandIn(owner, args, nullptr);
  if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  return original(owner, args);
}

// True if the process may write to an address: a table in read-only memory must lead to an error instead of a
// crash.
bool IsWritable(const void* address) {
  auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    // A line is, for example, "7f00-7fff rw-p".
    char* rest = nullptr;
    uintptr_t first = std::strtoull(line.c_str(), &rest, 16);
    if (*rest != '-') continue;
    uintptr_t end = std::strtoull(rest + 1, &rest, 16);
    if (first <= wanted && wanted < end) return rest[0] == ' ' && rest[1] != '\0' && rest[2] == 'w';
  }
  return false;
}

// The table's entry of a bound method; null with an exception set if it is not as expected.
PyMethodDef* FindDefinition(PyObject* method, const char* name) {
  if (!PyCFunction_Check(method)) {
    PyErr_Format(PyExc_RuntimeError, "it is of type %.200s and not a method of C code",
                 TypeName(method).c_str());
    return nullptr;
  }
  PyMethodDef* found = reinterpret_cast<BoundMethod*>(method)->definition;
  if (found->ml_meth != PyCFunction_GetFunction(method) || found->ml_flags != PyCFunction_GetFlags(method) ||
      std::strcmp(found->ml_name, name) != 0) {
    PyErr_SetString(PyExc_RuntimeError, "this Python keeps methods of C code in another way");
    return nullptr;
  }
  if ((found->ml_flags & ~(METH_CLASS | METH_KEYWORDS)) != METH_VARARGS) {
    PyErr_Format(PyExc_RuntimeError, "it takes its arguments in another way (flags %d)", found->ml_flags);
    return nullptr;
  }
  if (!IsWritable(found)) {
    PyErr_SetString(PyExc_RuntimeError, "its entry in the table of methods cannot be written to");
    return nullptr;
  }
  return found;
}

}  // namespace

PyObject* Intercept(PyObject*, PyObject* args) {
  PyObject *method, *callable;
  const char* name;
  if (!PyArg_ParseTuple(args, "OsO:intercept", &method, &name, &callable)) return nullptr;
  if (definition != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "an interception is under way already");
    return nullptr;
  }
  PyMethodDef* found = FindDefinition(method, name);
  if (found == nullptr) return nullptr;
  original = found->ml_meth;
  stand_in = Ref::Share(callable).release();
  definition = found;
  definition->ml_meth = (found->ml_flags & METH_KEYWORDS) != 0 ? AsEntry(CallWithKeywords) : CallWithout;
  Py_RETURN_NONE;
}

PyObject* EndInterception(PyObject*, PyObject*) {
  if (definition != nullptr) {
    definition->ml_meth = original;
    definition = nullptr;
    Ref old = Ref::Steal(std::exchange(stand_in, nullptr));
  }
  Py_RETURN_NONE;
}

}  // namespace torch2ort
