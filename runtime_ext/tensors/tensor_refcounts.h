// The number of references to a tensor's memory, and of writes to it, read where torch counts them. Reading
// them through Python takes longer than the rest of a call of a small Function. torch's headers are not used:
// the layout is found by trial, with tensors whose answers are known, and counts that are not found are read
// through Python.
#pragma once

#include "python.h"

namespace torch2ort {

// Finds the layout, or forgets it. `own`: a tuple of tensors on the CPU that torch allocated, each with a
// storage of its own. `foreign`: tensors over other memory. `use_count`: torch's, or None. 1 if all was
// found, 0 if not; -1 with an exception set if reading the tensors failed.
int FindLayout(PyObject* own, PyObject* foreign, PyObject* use_count);

// The number of references to torch's own tensor: its Python object and, for example, a view or a DLPack
// capsule; -1 if it is not known here.
long TensorHolders(PyObject* tensor);
// The number of tensors and handles that hold the storage behind a tensor, or -1 if it is not known here, as
// for a tensor with other references than its Python object.
long StorageHolders(PyObject* tensor);
// The same for memory that torch's own allocator allocated on the CPU; -1 also for other memory, which has
// holders that are unknown to torch.
long HoldersOfOwnMemory(PyObject* tensor);
// 1 if two tensors share a storage, 0 if not; -1 if that is not known here.
int ShareStorage(PyObject* a, PyObject* b);
// The number of writes by torch to the tensor or its views since it was made, or -1 if it is not known here,
// as for a tensor of inference mode, whose writes torch does not count.
long CountedWrites(PyObject* tensor);

}  // namespace torch2ort
