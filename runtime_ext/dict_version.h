// The version that CPython 3.10 to 3.12 gives each state of a dictionary (PEP 509).
#pragma once

#include <cstdint>

#include "python.h"

namespace torch2ort {

// The stable ABI does not contain the version, so its place is assumed here: it follows the number of
// entries. The value at that place is tested once, and is not used if it does not behave as a version.
struct DictHead {
  PyObject_HEAD Py_ssize_t used;
  uint64_t version;
};

// True if DictVersion can be used. False without an exception where this Python has no such version, and with
// one on failure.
bool HasDictVersions();

// Unique for each state of all dictionaries; 0 for no state.
inline uint64_t DictVersion(PyObject* dictionary) { return reinterpret_cast<DictHead*>(dictionary)->version; }

}  // namespace torch2ort
