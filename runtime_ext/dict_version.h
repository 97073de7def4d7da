// The number that CPython 3.10 to 3.12 gives each state of a dictionary (PEP 509).
#pragma once

#include <cstdint>

#include "python.h"

namespace torch2ort {

// The stable ABI does not show the number, so that its place is this project's knowledge: it follows the
// number of entries. What is found there is tried once, and not used where it does not act as it should.
struct DictHead {
  PyObject_HEAD Py_ssize_t used;
  uint64_t version;
};

// Whether DictVersion can be asked. False without an exception where this Python has no such number, and
// with one on failure.
bool HasDictVersions();

// Never the same for two states of any dictionaries; 0 for no state.
inline uint64_t DictVersion(PyObject* dictionary) { return reinterpret_cast<DictHead*>(dictionary)->version; }

}  // namespace torch2ort
