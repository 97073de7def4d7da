#include "dict_version.h"

#include <vector>

namespace torch2ort {

namespace {

// Tests that each way to change a dictionary changes the number, and that reading it does not. -1 with an
// exception set.
int ActAsVersions() {
  Ref first = Ref::Steal(PyDict_New()), second = Ref::Steal(PyDict_New());
  Ref key = Ref::Steal(PyUnicode_FromString("key")), other = Ref::Steal(PyUnicode_FromString("other"));
  if (!first || !second || !key || !other) return -1;
  PyObject *a = first.get(), *b = second.get(), *k = key.get();
  std::vector<uint64_t> seen;
  auto note = [&seen](PyObject* dictionary) { seen.push_back(DictVersion(dictionary)); };
  if (PyDict_SetItem(a, k, Py_None) < 0) return -1;
  note(a);
  if (PyDict_SetItem(b, k, Py_None) < 0) return -1;
  note(b);
  if (PyDict_SetItem(a, k, Py_True) < 0) return -1;
  note(a);
  if (PyDict_SetItem(a, other.get(), Py_None) < 0) return -1;
  note(a);
  if (PyDict_DelItem(a, k) < 0) return -1;
  note(a);
  if (PyDict_Update(a, b) < 0) return -1;
  note(a);
  PyDict_Clear(b);
  note(b);
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] == 0) return 0;
    for (size_t j = 0; j < i; ++j) {
      if (seen[i] == seen[j]) return 0;
    }
  }
  uint64_t before = DictVersion(a);
  PyObject* value = PyDict_GetItemWithError(a, k);
  if (value == nullptr && PyErr_Occurred()) return -1;
  return DictVersion(a) == before && reinterpret_cast<DictHead*>(a)->used == PyDict_Size(a);
}

}  // namespace

bool HasDictVersions() {
  static int known = -1;
  if (known < 0) {
    // In 3.13, bits for watchers are in that place.
    unsigned long minor = (PyLong_AsUnsignedLong(PySys_GetObject("hexversion")) >> 16) & 0xff;
    if (PyErr_Occurred()) return false;
    known = minor >= 10 && minor <= 12 ? ActAsVersions() : 0;
  }
  return known > 0;
}

}  // namespace torch2ort
