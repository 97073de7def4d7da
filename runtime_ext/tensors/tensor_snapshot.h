// What a step notes of the tensors it is given: the form that its graph was chosen by, and who wrote to them
// since.
#pragma once

#include "python.h"

namespace torch2ort {

// Adds Noted and form() to the module.
bool InitNoted(PyObject* module);

}  // namespace torch2ort
