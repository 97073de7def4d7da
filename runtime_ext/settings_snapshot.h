// Settings of a program that many parts of a step depend on, read in one call.
#pragma once

#include "python.h"

namespace torch2ort {

bool InitSwitches(PyObject* module);

}  // namespace torch2ort
