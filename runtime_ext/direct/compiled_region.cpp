#include "direct/compiled_region.h"

namespace torch2ort {

namespace {

// False with an exception set.
bool Complain(const char* what) {
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_ValueError, what);
  return false;
}

// Adds a non-negative number, or -1 for one that varies.
bool ParseSize(PyObject* object, std::vector<int64_t>* sizes) {
  long long size = PyLong_AsLongLong(object);
  if (PyErr_Occurred() != nullptr) return false;
  if (size < -1) return Complain("a size is negative");
  sizes->push_back(size);
  return true;
}

bool ParseShapes(PyObject* list, std::vector<CompiledRegion::Shape>* shapes, std::vector<int64_t>* sizes) {
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    PyObject* tuple = PyList_GetItem(list, i);
    if (!PyTuple_Check(tuple)) return Complain("the sizes of a tensor are a tuple");
    shapes->push_back({sizes->size(), static_cast<size_t>(PyTuple_Size(tuple))});
    for (Py_ssize_t d = 0; d < PyTuple_Size(tuple); ++d) {
      if (!ParseSize(PyTuple_GetItem(tuple, d), sizes)) return false;
    }
  }
  return true;
}

bool ParseVarying(PyObject* list, CompiledRegion* region) {
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    unsigned long long input, dimension;
    PyObject* place = PyList_GetItem(list, i);
    if (!PyTuple_Check(place) || !PyArg_ParseTuple(place, "KK", &input, &dimension)) {
      return Complain("the place of a size is a tuple of an input and a dimension");
    }
    if (input >= region->inputs.size() || dimension >= region->inputs[input].rank) {
      return Complain("a size stands at no dimension of an input");
    }
    region->varying.push_back(region->inputs[input].begin + dimension);
  }
  return true;
}

bool IsWhole(const CompiledRegion& region) {
  bool varies = false;
  for (int64_t number : region.numbers) varies |= number < 0;
  if (varies && (region.tell == nullptr || region.varying.empty())) {
    return Complain("a region's sizes vary, and nothing tells them");
  }
  return true;
}

}  // namespace

std::optional<CompiledRegion> ParseCompiledRegion(PyObject* address, PyObject* inputs, PyObject* outputs,
                                                  PyObject* temporaries, PyObject* tell, PyObject* varying) {
  CompiledRegion region;
  region.function = reinterpret_cast<CompiledRegion::Function>(PyLong_AsVoidPtr(address));
  region.tell = reinterpret_cast<CompiledRegion::Numbers>(PyLong_AsVoidPtr(tell));
  if (PyErr_Occurred() != nullptr) return std::nullopt;
  if (region.function == nullptr) {
    Complain("a region has no function");
    return std::nullopt;
  }
  if (!ParseShapes(inputs, &region.inputs, &region.numbers)) return std::nullopt;
  region.input_dimensions = region.numbers.size();
  if (!ParseShapes(outputs, &region.outputs, &region.numbers)) return std::nullopt;
  for (Py_ssize_t i = 0; i < PyList_Size(temporaries); ++i) {
    if (!ParseSize(PyList_GetItem(temporaries, i), &region.numbers)) return std::nullopt;
    ++region.temporaries;
  }
  if (!ParseVarying(varying, &region) || !IsWhole(region)) return std::nullopt;
  return region;
}

}  // namespace torch2ort
