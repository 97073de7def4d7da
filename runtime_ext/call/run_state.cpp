#include "call/run_state.h"

#include <memory>
#include <vector>

namespace torch2ort {

PyTypeObject* run_type = nullptr;

namespace {

// Both are null once backward has taken them.
struct Entry {
  PyObject* site;
  PyObject* context;
};

struct Feed {
  uintptr_t address;
  PyObject* tensor;
};

struct Run {
  PyObject_HEAD PyObject* undefined;  // set of (site key, argument)
  PyObject* arrivals;                 // returns for a site key which gradients arrive; null: all
  PyObject* originals;                // tuple of the tensors that Functions get themselves; null: none
  std::vector<Entry>* entries;
  std::vector<Feed>* feeds;
  std::vector<DLManagedTensor*>* donated;  // null where a backward has taken it
  char keeps;                              // contexts stay for another backward
  char partial;                            // some gradient of the model's outputs is missing
  size_t cursor;  // where the last context was found: backward visits the sites in nearly the opposite order
};

// Owned; a remaining one is not freed when a thread ends, as that needs the GIL.
thread_local PyObject* current_run = nullptr;

Run* AsRun(PyObject* self) { return reinterpret_cast<Run*>(self); }

PyObject* RunNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Run", const_cast<char**>(names))) return nullptr;
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  Run* run = AsRun(self.get());
  run->undefined = PySet_New(nullptr);
  if (run->undefined == nullptr) return nullptr;
  run->entries = new std::vector<Entry>;
  run->feeds = new std::vector<Feed>;
  run->donated = new std::vector<DLManagedTensor*>;
  return self.release();
}

int RunTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(AsRun(self)->undefined);
  Py_VISIT(AsRun(self)->arrivals);
  Py_VISIT(AsRun(self)->originals);
  if (AsRun(self)->entries != nullptr) {
    for (const Entry& entry : *AsRun(self)->entries) {
      Py_VISIT(entry.site);
      Py_VISIT(entry.context);
    }
  }
  if (AsRun(self)->feeds != nullptr) {
    for (const Feed& feed : *AsRun(self)->feeds) Py_VISIT(feed.tensor);
  }
  return 0;
}

void DropEntries(Run* run) {
  if (run->entries == nullptr) return;
  std::vector<Entry> entries;
  entries.swap(*run->entries);  // before any destructor can run Python code that looks at the run
  run->cursor = 0;
  for (const Entry& entry : entries) {
    if (entry.context == nullptr) continue;
    ReleaseContext(reinterpret_cast<Context*>(entry.context));
    Py_DECREF(entry.context);
    Py_DECREF(entry.site);
  }
}

void DropFeeds(Run* run) {
  if (run->feeds == nullptr) return;
  std::vector<Feed> feeds;
  feeds.swap(*run->feeds);
  for (const Feed& feed : feeds) Py_DECREF(feed.tensor);
}

void DropDonated(Run* run) {
  if (run->donated == nullptr) return;
  std::vector<DLManagedTensor*> donated;
  donated.swap(*run->donated);
  for (DLManagedTensor* tensor : donated) {
    if (tensor != nullptr) tensor->deleter(tensor);
  }
}

int RunClear(PyObject* self) {
  DropEntries(AsRun(self));
  DropFeeds(AsRun(self));
  DropDonated(AsRun(self));
  Py_CLEAR(AsRun(self)->undefined);
  Py_CLEAR(AsRun(self)->arrivals);
  Py_CLEAR(AsRun(self)->originals);
  return 0;
}

void RunDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  RunClear(self);
  delete AsRun(self)->entries;
  delete AsRun(self)->feeds;
  delete AsRun(self)->donated;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* ClearMethod(PyObject* self, PyObject*) {
  DropEntries(AsRun(self));
  DropFeeds(AsRun(self));
  DropDonated(AsRun(self));
  Py_CLEAR(AsRun(self)->originals);
  if (PySet_Clear(AsRun(self)->undefined) < 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* FeedMethod(PyObject* self, PyObject* tensors) {
  Ref given = Ref::Steal(PySequence_Tuple(tensors));
  if (!given || !CheckConfigured()) return nullptr;
  DropFeeds(AsRun(self));
  for (Py_ssize_t i = 0; i < PyTuple_Size(given.get()); ++i) {
    PyObject* tensor = PyTuple_GetItem(given.get(), i);
    DLTensor view;
    if (!IsTensor(tensor)) {
      PyErr_Format(PyExc_TypeError, "feed() takes tensors, not %.200s", TypeName(tensor).c_str());
      return nullptr;
    }
    if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) return nullptr;
    Span span = SpanOf(view);
    if (span.size() > 0) AsRun(self)->feeds->push_back({span.begin, Ref::Share(tensor).release()});
  }
  Py_RETURN_NONE;
}

PyObject* DonateMethod(PyObject* self, PyObject* values) {
  Ref capsules = Ref::Steal(PySequence_Tuple(values));
  if (!capsules) return nullptr;
  DropDonated(AsRun(self));
  for (Py_ssize_t i = 0; i < PyTuple_Size(capsules.get()); ++i) {
    PyObject* capsule = PyTuple_GetItem(capsules.get(), i);
    auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    // Under its new name, a capsule does not free its tensor.
    if (tensor == nullptr || PyCapsule_SetName(capsule, "used_dltensor") != 0) return nullptr;
    AsRun(self)->donated->push_back(tensor);
  }
  Py_RETURN_NONE;
}

Py_ssize_t RunLength(PyObject* self) {
  Py_ssize_t length = 0;
  for (const Entry& entry : *AsRun(self)->entries) length += entry.context != nullptr;
  return length;
}

PyMethodDef methods[] = {
    {"clear", ClearMethod, METH_NOARGS, nullptr},
    {"donate", DonateMethod, METH_O, nullptr},
    {"feed", FeedMethod, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"undefined", T_OBJECT_EX, offsetof(Run, undefined), READONLY, nullptr},
    {"arrivals", T_OBJECT, offsetof(Run, arrivals), 0, nullptr},
    {"originals", T_OBJECT, offsetof(Run, originals), 0, nullptr},
    {"keeps", T_BOOL, offsetof(Run, keeps), 0, nullptr},
    {"partial", T_BOOL, offsetof(Run, partial), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(RunNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(RunDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(RunTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(RunClear)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_sq_length, reinterpret_cast<void*>(RunLength)},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Run", sizeof(Run), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

Entry* FindEntry(Run* run, PyObject* site) {
  size_t size = run->entries->size();
  for (size_t step = 0; step < size; ++step) {
    size_t i = (run->cursor + size - step) % size;
    Entry& entry = (*run->entries)[i];
    if (entry.site == site) {
      run->cursor = i == 0 ? size - 1 : i - 1;
      return &entry;
    }
  }
  return nullptr;
}

}  // namespace

bool InitRun(PyObject* module) {
  run_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (run_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "Run", reinterpret_cast<PyObject*>(run_type)) == 0;
}

PyObject* CurrentRun() { return current_run; }

PyObject* Begin(PyObject*, PyObject* run) {
  if (run != Py_None && !PyObject_TypeCheck(run, run_type)) {
    PyErr_Format(PyExc_TypeError, "begin() takes a Run or None, not %.200s", TypeName(run).c_str());
    return nullptr;
  }
  PyObject* before = current_run;
  current_run = run == Py_None ? nullptr : Ref::Share(run).release();
  if (before == nullptr) Py_RETURN_NONE;
  return before;
}

bool KeepContext(PyObject* self, Site* site, PyObject* context) {
  Run* run = AsRun(self);
  for (const Entry& entry : *run->entries) {
    if (entry.site != reinterpret_cast<PyObject*>(site)) continue;
    PyErr_Format(config.error_type,
                 "%U: forward ran twice in one run, but a run holds one context a site: use a new Run for "
                 "each forward",
                 site->name);
    return false;
  }
  run->cursor = run->entries->size();
  run->entries->push_back(
      {Ref::Share(reinterpret_cast<PyObject*>(site)).release(), Ref::Share(context).release()});
  return true;
}

bool KeepsContexts() { return current_run != nullptr && AsRun(current_run)->keeps != 0; }

Ref TakeContext(Site* site) {
  Entry* entry =
      current_run == nullptr ? nullptr : FindEntry(AsRun(current_run), reinterpret_cast<PyObject*>(site));
  if (entry != nullptr && KeepsContexts()) return Ref::Share(entry->context);
  if (entry != nullptr) {
    Ref context = Ref::Steal(std::exchange(entry->context, nullptr));
    Ref held = Ref::Steal(std::exchange(entry->site, nullptr));
    return context;
  }
  PyErr_Format(config.error_type,
               current_run == nullptr
                   ? "%U: backward was called outside of a run: begin() the Run that its forward ran in"
                   : "%U: backward was called, but the current run holds no context of its forward: forward "
                     "did not run "
                     "in it, or its backward has run already",
               site->name);
  return {};
}

PyObject* FeedAt(const void* address) {
  if (current_run == nullptr) return nullptr;
  for (const Feed& feed : *AsRun(current_run)->feeds) {
    if (feed.address == reinterpret_cast<uintptr_t>(address)) return feed.tensor;
  }
  return nullptr;
}

PyObject* OriginalAt(int number) {
  PyObject* originals = current_run == nullptr ? nullptr : AsRun(current_run)->originals;
  bool known =
      originals != nullptr && PyTuple_Check(originals) && number >= 0 && number < PyTuple_Size(originals);
  PyObject* tensor = known ? PyTuple_GetItem(originals, number) : nullptr;
  return tensor != nullptr && IsTensor(tensor) ? tensor : nullptr;
}

void GiveDonated(PyObject* run, std::vector<DLManagedTensor*> values) {
  DropDonated(AsRun(run));
  *AsRun(run)->donated = std::move(values);
}

Managed TakeDonated(size_t index) {
  Run* run = current_run == nullptr ? nullptr : AsRun(current_run);
  if (run == nullptr || index >= run->donated->size() || (*run->donated)[index] == nullptr) {
    PyErr_Format(
        config.error_type,
        "backward asks for value %zu of its forward, which the current run does not hold: forward did "
        "not run in it, or its backward has run already",
        index);
    return nullptr;
  }
  DLManagedTensor* tensor = (*run->donated)[index];
  auto taken = std::make_unique<DLManagedTensorVersioned>();
  *taken = {{kDLPackMajor, 0}, tensor, nullptr, 0, tensor->dl_tensor};
  if (KeepsContexts()) {
    taken->deleter = [](DLManagedTensorVersioned* self) { delete self; };
  } else {
    (*run->donated)[index] = nullptr;
    taken->deleter = [](DLManagedTensorVersioned* self) {
      auto* owned = static_cast<DLManagedTensor*>(self->manager_ctx);
      owned->deleter(owned);
      delete self;
    };
  }
  return Managed(taken.release());
}

bool NoteUndefined(Site* site, size_t argument) {
  if (current_run == nullptr) return true;
  Ref position = Ref::Steal(PyLong_FromSize_t(argument));
  Ref pair = position ? Ref::Steal(PyTuple_Pack(2, site->key, position.get())) : Ref();
  return pair && PySet_Add(AsRun(current_run)->undefined, pair.get()) == 0;
}

Ref ArrivalsAt(Site* site) {
  Run* run = current_run == nullptr ? nullptr : AsRun(current_run);
  bool all = run == nullptr || run->arrivals == nullptr || run->arrivals == Py_None ||
             (run->partial == 0 && PySet_Size(run->undefined) == 0);
  return all ? Ref::Share(Py_None)
             : Ref::Steal(PyObject_CallFunctionObjArgs(run->arrivals, site->key, nullptr));
}

}  // namespace torch2ort
