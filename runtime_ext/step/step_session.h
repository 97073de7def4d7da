// A session over one half of a training step, between PyTorch's tensors and the values of the other half.
#pragma once

#include "python.h"

namespace torch2ort {

// Adds Half and Kept to the module.
bool InitHalf(PyObject* module);

}  // namespace torch2ort
