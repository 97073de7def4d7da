// Settings of a program that many places of a step ask for, read in one call.
#pragma once

#include "python.h"

namespace torch2ort {

bool InitSwitches(PyObject* module);

}  // namespace torch2ort
