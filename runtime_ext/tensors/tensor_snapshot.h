// The properties that a step notes of its tensors: the form by which its graph was chosen, and later writes.
#pragma once

#include "python.h"

namespace torch2ort {

// Adds Noted and form() to the module.
bool InitNoted(PyObject* module);

}  // namespace torch2ort
