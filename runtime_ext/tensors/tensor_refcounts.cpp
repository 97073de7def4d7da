#include "tensors/tensor_refcounts.h"

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace torch2ort {

namespace {

using Address = const char*;

// Distances in bytes. The objects of torch that are read have at least kLooked bytes.
constexpr size_t kLooked = 64;
struct Layout {
  size_t tensor;   // in a Python tensor: the address of torch's own tensor
  size_t storage;  // in that tensor: the address of its storage
  size_t count;    // in both: the number of references, four bytes
  size_t data;     // in a storage: the address of the memory
  size_t free;     // in a storage: the function that frees it
};
// The layout of the counter of writes to a tensor.
struct CounterLayout {
  size_t counter;  // in torch's own tensor: the address of the counter
  size_t writes;   // in the counter: the count, four bytes
};

bool known = false;
bool writes_known = false;
CounterLayout counter_layout;
Layout layout;
Address torch_frees = nullptr;  // that function, for torch's own memory

Address PointerAt(Address object, size_t distance) {
  uintptr_t pointer = 0;
  std::memcpy(&pointer, object + distance, sizeof(pointer));
  return reinterpret_cast<Address>(pointer);
}

uint32_t CountAt(Address object, size_t distance) {
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(object + distance), __ATOMIC_RELAXED);
}

Address AddressOf(PyObject* object) { return reinterpret_cast<Address>(object); }

// A tensor of the trial, with torch's answers about it.
struct Sample {
  PyObject* tensor;  // borrowed
  Ref handle;        // on its storage, which counts as one more reference
  Address impl, storage, data;
};

Address AskAddress(PyObject* object, const char* name) {
  Ref value = Ref::Steal(PyObject_GetAttrString(object, name));
  return value ? static_cast<Address>(PyLong_AsVoidPtr(value.get())) : nullptr;
}

bool Ask(PyObject* tensors, std::vector<Sample>* samples) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
    Sample sample{PyTuple_GetItem(tensors, i), {}, nullptr, nullptr, nullptr};
    sample.handle = Ref::Steal(PyObject_CallMethod(sample.tensor, "untyped_storage", nullptr));
    if (!sample.handle) return false;
    Ref data = Ref::Steal(PyObject_CallMethod(sample.handle.get(), "data_ptr", nullptr));
    if (!data) return false;
    sample.data = static_cast<Address>(PyLong_AsVoidPtr(data.get()));
    sample.impl = AskAddress(sample.tensor, "_cdata");
    sample.storage = AskAddress(sample.handle.get(), "_cdata");
    if (PyErr_Occurred()) return false;
    samples->push_back(std::move(sample));
  }
  return true;
}

// The first distance in [from, to) at which `holds` is true for every sample; `to` if there is none.
template <typename Holds>
size_t Find(const std::vector<Sample>& samples, size_t from, size_t to, size_t step, Holds holds) {
  for (size_t distance = from; distance + step <= to; distance += step) {
    bool all = true;
    for (const Sample& sample : samples) all = all && holds(sample, distance);
    if (all) return distance;
  }
  return to;
}

// Tests that the number at a distance of a sample's storage changes with the tensors that hold the storage,
// and that of its tensor with the references to the tensor. -1 with an exception set.
int Counts(const Sample& sample, size_t distance, PyObject* use_count) {
  auto counted = [&](uint32_t more) {
    if (use_count == Py_None) return 1;
    Ref address = Ref::Steal(PyLong_FromVoidPtr(const_cast<char*>(sample.storage)));
    Ref count = address ? Ref::Steal(CallOne(use_count, address.get())) : Ref();
    if (!count) return -1;
    long expected = PyLong_AsLong(count.get());
    return static_cast<int>(expected == static_cast<long>(CountAt(sample.storage, distance)) &&
                            expected == 2 + more);
  };
  // The references are the tensor and the handle.
  if (CountAt(sample.storage, distance) != 2 || CountAt(sample.impl, distance) != 1) return 0;
  {
    Ref first = Ref::Steal(PyObject_CallMethod(sample.tensor, "detach", nullptr));
    Ref second = first ? Ref::Steal(PyObject_CallMethod(sample.tensor, "detach", nullptr)) : Ref();
    if (!second) return -1;
    if (CountAt(sample.storage, distance) != 4 || CountAt(sample.impl, distance) != 1) return 0;
    int same = counted(2);
    if (same != 1) return same;
  }
  {
    // A view holds its base.
    Ref view = Ref::Steal(PyObject_CallMethod(sample.tensor, "view", "i", -1));
    if (!view) return -1;
    if (CountAt(sample.storage, distance) != 3 || CountAt(sample.impl, distance) != 2) return 0;
  }
  return CountAt(sample.storage, distance) == 2 && CountAt(sample.impl, distance) == 1 ? counted(0) : 0;
}

int Try(const std::vector<Sample>& own, const std::vector<Sample>& foreign, size_t tensor_size,
        PyObject* use_count) {
  if (own.size() < 2 || foreign.empty()) return 0;
  Layout found{};
  found.tensor = Find(
      own, sizeof(PyObject), tensor_size, sizeof(Address),
      [](const Sample& s, size_t distance) { return PointerAt(AddressOf(s.tensor), distance) == s.impl; });
  found.storage = Find(own, 0, kLooked, sizeof(Address), [](const Sample& s, size_t distance) {
    return PointerAt(s.impl, distance) == s.storage;
  });
  found.data =
      Find(own, 0, kLooked - 2 * sizeof(Address), sizeof(Address),
           [](const Sample& s, size_t distance) { return PointerAt(s.storage, distance) == s.data; });
  if (found.tensor == tensor_size || found.storage == kLooked || found.data == kLooked - 2 * sizeof(Address))
    return 0;
  // The memory, its deleter and the deleter's argument are adjacent, in an order that depends on the C++
  // library.
  size_t next = found.data + sizeof(Address), end = next + 2 * sizeof(Address);
  auto of_torch = [&](size_t distance) { return PointerAt(own.front().storage, distance); };
  found.free = Find(own, next, end, sizeof(Address), [&](const Sample& s, size_t distance) {
    return of_torch(distance) != nullptr && PointerAt(s.storage, distance) == of_torch(distance);
  });
  if (found.free == end) return 0;
  for (const Sample& sample : foreign) {
    if (PointerAt(AddressOf(sample.tensor), found.tensor) != sample.impl ||
        PointerAt(sample.impl, found.storage) != sample.storage ||
        PointerAt(sample.storage, found.data) != sample.data ||
        PointerAt(sample.storage, found.free) == of_torch(found.free)) {
      return 0;
    }
  }
  for (size_t distance : {size_t{8}, size_t{12}}) {
    int counts = 1;
    for (const Sample& sample : own) counts = counts == 1 ? Counts(sample, distance, use_count) : counts;
    if (counts < 0) return -1;
    if (counts == 0) continue;
    found.count = distance;
    layout = found;
    torch_frees = of_torch(found.free);
    return 1;
  }
  return 0;
}

// Tests that the address at a distance of a sample's tensor is that of the counter of writes: a detached
// tensor has the same counter, `data` has one of its own. -1 with an exception set.
int HasCounter(const Sample& sample, size_t distance) {
  Address counter = PointerAt(sample.impl, distance);
  if (counter == nullptr || counter == sample.storage) return 0;
  Ref detached = Ref::Steal(PyObject_CallMethod(sample.tensor, "detach", nullptr));
  Ref data = detached ? Ref::Steal(PyObject_GetAttrString(sample.tensor, "data")) : Ref();
  if (!data) return -1;
  auto of = [&](const Ref& tensor) {
    return PointerAt(PointerAt(AddressOf(tensor.get()), layout.tensor), distance);
  };
  Address other = of(data);
  return of(detached) == counter && other != counter && other != nullptr ? 1 : 0;
}

// Tests that the number in it is torch's, now and after each of two writes. -1 with an exception set.
int CountsWrites(const Sample& sample, const CounterLayout& place) {
  for (int written = 0; written <= 2; ++written) {
    if (written > 0 && !Ref::Steal(PyObject_CallMethod(sample.tensor, "zero_", nullptr))) return -1;
    Ref version = Ref::Steal(PyObject_GetAttrString(sample.tensor, "_version"));
    if (!version) return -1;
    long expected = PyLong_AsLong(version.get());
    if (expected == -1 && PyErr_Occurred()) return -1;
    Address counter = PointerAt(sample.impl, place.counter);
    if (static_cast<long>(CountAt(counter, place.writes)) != expected) return 0;
  }
  return 1;
}

// Finds the counter of writes, given the rest of the layout. False with an exception set.
bool FindWrites(const std::vector<Sample>& samples) {
  // After the counter's functions and its number of references.
  constexpr size_t kFrom = 8, kTo = 24;
  for (size_t distance = 0; distance < kLooked; distance += sizeof(Address)) {
    int all = 1;
    for (const Sample& sample : samples) all = all == 1 ? HasCounter(sample, distance) : all;
    if (all < 0) return false;
    for (size_t writes = kFrom; all == 1 && writes < kTo; writes += sizeof(uint32_t)) {
      int counts = 1;
      for (const Sample& sample : samples) {
        counts = counts == 1 ? CountsWrites(sample, {distance, writes}) : counts;
      }
      if (counts < 0) return false;
      if (counts == 0) continue;
      counter_layout = {distance, writes};
      writes_known = true;
      return true;
    }
  }
  return true;
}

Address StorageOf(PyObject* tensor, Address* impl) {
  *impl = PointerAt(AddressOf(tensor), layout.tensor);
  return *impl == nullptr ? nullptr : PointerAt(*impl, layout.storage);
}

}  // namespace

int FindLayout(PyObject* own, PyObject* foreign, PyObject* use_count) {
  known = writes_known = false;
  std::vector<Sample> ours, others;
  if (!Ask(own, &ours) || !Ask(foreign, &others)) return -1;
  if (ours.empty()) return 0;
  Ref size = Ref::Steal(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(ours[0].tensor)), "__basicsize__"));
  if (!size) return -1;
  size_t tensor_size = PyLong_AsSize_t(size.get());
  if (PyErr_Occurred()) return -1;
  int found = Try(ours, others, tensor_size, use_count);
  known = found == 1;
  return known && !FindWrites(ours) ? -1 : found;
}

long TensorHolders(PyObject* tensor) {
  if (!known) return -1;
  Address impl = nullptr;
  return StorageOf(tensor, &impl) == nullptr ? -1 : static_cast<long>(CountAt(impl, layout.count));
}

long StorageHolders(PyObject* tensor) {
  if (!known) return -1;
  Address impl = nullptr;
  Address storage = StorageOf(tensor, &impl);
  if (storage == nullptr || CountAt(impl, layout.count) != 1) return -1;
  return static_cast<long>(CountAt(storage, layout.count));
}

long HoldersOfOwnMemory(PyObject* tensor) {
  long holders = StorageHolders(tensor);
  if (holders < 0) return -1;
  Address impl = nullptr;
  Address storage = StorageOf(tensor, &impl);
  bool own = PointerAt(storage, layout.data) != nullptr && PointerAt(storage, layout.free) == torch_frees;
  return own ? holders : -1;
}

int ShareStorage(PyObject* a, PyObject* b) {
  if (!known) return -1;
  Address impl = nullptr;
  Address first = StorageOf(a, &impl), second = StorageOf(b, &impl);
  return first == nullptr || second == nullptr ? -1 : first == second;
}

long CountedWrites(PyObject* tensor) {
  if (!writes_known) return -1;
  Address impl = PointerAt(AddressOf(tensor), layout.tensor);
  Address counter = impl == nullptr ? nullptr : PointerAt(impl, counter_layout.counter);
  return counter == nullptr ? -1 : static_cast<long>(CountAt(counter, counter_layout.writes));
}

}  // namespace torch2ort
