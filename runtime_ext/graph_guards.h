// The state that a graph was made from, compared by identity before each step: one pass over flat arrays.
#pragma once

#include "python.h"

namespace torch2ort {

bool InitGuards(PyObject* module);

}  // namespace torch2ort
