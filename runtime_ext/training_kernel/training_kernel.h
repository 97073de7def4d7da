// The C++ interfaces through which onnxruntime-training 1.19 calls back.
#pragma once

#include "python.h"

namespace torch2ort {

// Addresses for register_forward_runner and register_backward_runner.
PyObject* TrainingRunners(PyObject* module, PyObject*);
// Addresses for register_aten_op_executor.
PyObject* AtenExecutor(PyObject* module, PyObject*);

}  // namespace torch2ort
