// Replaces a method that C code defines, for all of its callers.
#pragma once

#include "python.h"

namespace torch2ort {

PyObject* Intercept(PyObject* module, PyObject* args);
PyObject* EndInterception(PyObject* module, PyObject*);

}  // namespace torch2ort
