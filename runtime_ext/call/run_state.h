// The contexts of one forward run, and this thread's current run.
#pragma once

#include <vector>

#include "call/context.h"
#include "call/site.h"

namespace torch2ort {

extern PyTypeObject* run_type;
bool InitRun(PyObject* module);

// This thread's current run; null when there is none. Borrowed.
PyObject* CurrentRun();
// Makes `run` (or None) current and returns the previous one.
PyObject* Begin(PyObject* module, PyObject* run);

// Puts a call's context into the run. False with the engine error set if the site already ran in it.
bool KeepContext(PyObject* self, Site* site, PyObject* context);
// True if the current run's contexts serve more than one backward.
bool KeepsContexts();
// Takes the context of a site's forward out of the current run, or shares it if the run keeps its contexts.
// Empty with the engine error set if there is none.
Ref TakeContext(Site* site);
// Notes that backward returned no gradient for a needed argument, and that zeros replace it.
bool NoteUndefined(Site* site, size_t argument);
// The gradients that arrive at a site in the current run: None for all, an empty tuple if autograd would not
// run its backward at all, else one bool per tensor output. Empty with an exception set on failure.
Ref ArrivalsAt(Site* site);

// The tensor that begins at `address`, among those that the current run was fed with and that must not change
// until its backward; null if there is none. Borrowed.
PyObject* FeedAt(const void* address);

// Number `number` of the tensors that the current run's Functions get themselves; null if there is none.
// Borrowed.
PyObject* OriginalAt(int number);

// A value that the current run's forward saved for its backward alone, which owns it from now on; a loan of a
// value that other backwards take as well. Empty with the engine error set if there is none.
Managed TakeDonated(size_t index);

// Makes a run own these values, which only its backward reads.
void GiveDonated(PyObject* run, std::vector<DLManagedTensor*> values);

}  // namespace torch2ort
