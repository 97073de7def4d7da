#include "direct/compiled_region.h"

namespace torch2ort {

namespace {

// A number that is no less than 0, or -1 with an exception set.
long long ParseSize(PyObject* object) {
  long long size = PyLong_AsLongLong(object);
  if (size < 0 && PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_ValueError, "a size is negative");
  return size < 0 ? -1 : size;
}

bool ParseShapes(PyObject* list, std::vector<CompiledRegion::Sizes>* shapes) {
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    PyObject* tuple = PyList_GetItem(list, i);
    if (!PyTuple_Check(tuple)) {
      PyErr_SetString(PyExc_ValueError, "the sizes of a tensor are a tuple");
      return false;
    }
    CompiledRegion::Sizes sizes;
    for (Py_ssize_t d = 0; d < PyTuple_Size(tuple); ++d) {
      long long size = ParseSize(PyTuple_GetItem(tuple, d));
      if (size < 0) return false;
      sizes.push_back(size);
    }
    shapes->push_back(std::move(sizes));
  }
  return true;
}

}  // namespace

std::optional<CompiledRegion> ParseCompiledRegion(PyObject* address, PyObject* inputs, PyObject* outputs,
                                                  PyObject* temporaries) {
  CompiledRegion region;
  region.function = reinterpret_cast<CompiledRegion::Function>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred() != nullptr) return std::nullopt;
  if (region.function == nullptr) {
    PyErr_SetString(PyExc_ValueError, "a region has no function");
    return std::nullopt;
  }
  if (!ParseShapes(inputs, &region.inputs) || !ParseShapes(outputs, &region.outputs)) return std::nullopt;
  for (Py_ssize_t i = 0; i < PyList_Size(temporaries); ++i) {
    long long size = ParseSize(PyList_GetItem(temporaries, i));
    if (size < 0) return std::nullopt;
    region.temporaries.push_back(static_cast<size_t>(size));
  }
  return region;
}

}  // namespace torch2ort
