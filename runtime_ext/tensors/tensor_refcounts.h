// Who holds a tensor's memory, and how often it was written to, read where torch counts it. Asked through
// Python, the question costs more than all else that a call of a small Function does. torch's headers are not
// used: where things lie is found by trial, with tensors whose answers are known, and what is not found so is
// asked through Python as before.
#pragma once

#include "python.h"

namespace torch2ort {

// Finds where things lie, or forgets it. `own`: a tuple of tensors on the CPU that torch allocated, each with
// a storage of its own. `foreign`: such over other memory. `use_count`: torch's, or None. 1 if all was found,
// 0 if not; -1 with an exception set if the tensors could not be asked.
int FindLayout(PyObject* own, PyObject* foreign, PyObject* use_count);

// How many hold torch's own tensor: its Python object and, say, a view or a DLPack capsule; -1 if not known
// here.
long TensorHolders(PyObject* tensor);
// How many tensors and handles hold the storage behind a tensor, or -1 if that is not known here, such as for
// a tensor that more than its Python object holds.
long StorageHolders(PyObject* tensor);
// The same of memory that torch's own allocator gave for the CPU; -1 for other memory too, which has holders
// that torch does not know.
long HoldersOfOwnMemory(PyObject* tensor);
// Whether two tensors stand on one storage: 1 or 0, or -1 if that is not known here.
int ShareStorage(PyObject* a, PyObject* b);
// How often torch wrote to the tensor or a view of it since it was made, or -1 if that is not known here,
// such as for a tensor of inference mode, of which torch does not count it.
long CountedWrites(PyObject* tensor);

}  // namespace torch2ort
