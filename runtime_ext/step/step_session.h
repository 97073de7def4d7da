// A session over one half of a training step, between PyTorch's tensors and what goes on to the other half.
#pragma once

#include "python.h"

namespace torch2ort {

// Adds Half and Kept to the module.
bool InitHalf(PyObject* module);

}  // namespace torch2ort
