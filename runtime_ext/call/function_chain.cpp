#include "call/function_chain.h"

#include <new>
#include <utility>

namespace torch2ort {

PyTypeObject* chain_type = nullptr;

namespace {

Site* SiteOf(const Member& member) { return AsSite(member.site.get()); }

bool Complain(const char* what) {
  PyErr_Format(PyExc_ValueError, "Chain: %s", what);
  return false;
}

bool AddMember(Chain* chain, PyObject* object, PyObject* link) {
  if (!PyObject_TypeCheck(object, site_type)) {
    PyErr_Format(PyExc_TypeError, "Chain: a member is of type %.200s, not Site", TypeName(object).c_str());
    return false;
  }
  Py_ssize_t index = PyNumber_AsSsize_t(link, PyExc_OverflowError);
  if (index == -1 && PyErr_Occurred()) return false;
  auto count = static_cast<Py_ssize_t>(AsSite(object)->inputs->size());
  bool first = chain->members->empty();
  if (first ? index != -1 : (index < 0 || index >= count)) {
    return Complain("links must hold -1 for the first member, and an index of a tensor argument for others");
  }
  if (!first) {
    const Site& before = *SiteOf(chain->members->back());
    if (before.tensor_outputs->size() != 1 || before.returned != 1) {
      return Complain("every member but the last must have exactly one tensor output");
    }
    // A tensor that passes between two sites has no memory of the runtime's to write to or to return.
    const InputSpec& linked = (*AsSite(object)->inputs)[static_cast<size_t>(index)];
    if (linked.mapped || linked.mutated) {
      return Complain("links must hold arguments that forward neither writes to nor returns the memory of");
    }
  }
  chain->input_count += static_cast<size_t>(first ? count : count - 1);
  chain->members->push_back({Ref::Share(object), static_cast<int>(index)});
  return true;
}

bool Fill(Chain* chain, PyObject* key, PyObject* sites, PyObject* links) {
  chain->key = Ref::Share(key).release();
  chain->members = new std::vector<Member>;
  if (PyTuple_Size(sites) == 0 || PyTuple_Size(sites) != PyTuple_Size(links)) {
    return Complain("links needs one entry a site, and a chain has at least one");
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(sites); ++i) {
    if (!AddMember(chain, PyTuple_GetItem(sites, i), PyTuple_GetItem(links, i))) return false;
  }
  return true;
}

PyObject* ChainNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"key", "sites", "links", nullptr};
  PyObject *key, *sites, *links;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO!O!:Chain", const_cast<char**>(names), &key,
                                   &PyTuple_Type, &sites, &PyTuple_Type, &links)) {
    return nullptr;
  }
  Ref self = Ref::Steal(PyType_GenericAlloc(type, 0));
  if (!self || !Fill(AsChain(self.get()), key, sites, links)) return nullptr;
  return self.release();
}

int ChainTraverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (AsChain(self)->members == nullptr) return 0;
  for (const Member& member : *AsChain(self)->members) Py_VISIT(member.site.get());
  return 0;
}

int ChainClear(PyObject* self) {
  if (AsChain(self)->members == nullptr) return 0;
  std::vector<Member> members;
  members.swap(*AsChain(self)->members);  // before any destructor can run Python code that looks at the chain
  return 0;
}

void ChainDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Chain* chain = AsChain(self);
  if (chain->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  ChainClear(self);
  Py_CLEAR(chain->key);
  delete chain->members;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef attributes[] = {
    {"key", T_OBJECT_EX, offsetof(Chain, key), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Chain, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(ChainNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(ChainDealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(ChainTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(ChainClear)},
    {Py_tp_members, attributes},
    {0, nullptr},
};

PyType_Spec spec = {"torch2ort._native.Chain", sizeof(Chain), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, slots};

bool CheckCount(const Loans& loans, size_t expected, const char* what) {
  if (loans.size() == expected) return true;
  PyErr_Format(config.error_type, "a chain was given %zu %s, but its sites take %zu", loans.size(), what,
               expected);
  return false;
}

bool Forward(Chain* chain, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages) {
  if (!CheckCount(inputs, chain->input_count, "tensors")) return false;
  size_t next = 0;
  Passing passing;
  for (const Member& member : *chain->members) {
    Loans loans(SiteOf(member)->inputs->size());
    for (size_t i = 0; i < loans.size(); ++i) {
      if (static_cast<int>(i) != member.link) loans[i] = std::exchange(inputs[next++], nullptr);
    }
    passing.argument = member.link;
    passing.Advance();
    passing.has_next = &member != &chain->members->back();
    if (!RunForward(SiteOf(member), loans, outputs, storages, &passing)) return false;
  }
  return true;
}

bool Backward(Chain* chain, Loans& gradients, std::vector<Managed>* outputs, std::vector<Ref>* storages) {
  std::vector<Managed> found(chain->input_count), given;
  std::vector<Ref> stored(chain->input_count), given_storages;
  size_t end = chain->input_count;
  Passing passing;
  for (size_t m = chain->members->size(); m-- > 0;) {
    const Member& member = (*chain->members)[m];
    Loans none(1);
    passing.argument = member.link;
    passing.Advance();
    passing.has_next = m + 1 < chain->members->size();
    given.clear();
    given_storages.clear();
    Loans& arriving = passing.has_next ? none : gradients;
    if (!RunBackward(SiteOf(member), arriving, &given, &given_storages, &passing)) return false;
    given_storages.resize(given.size());
    for (size_t i = given.size(); i-- > 0;) {
      if (static_cast<int>(i) == member.link) continue;
      found[--end] = std::move(given[i]);
      stored[end] = std::move(given_storages[i]);
    }
  }
  outputs->swap(found);
  storages->swap(stored);
  return true;
}

}  // namespace

bool InitChain(PyObject* module) {
  chain_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (chain_type == nullptr) return false;
  return PyModule_AddObjectRef(module, "Chain", reinterpret_cast<PyObject*>(chain_type)) == 0;
}

bool IsCallable(PyObject* object) {
  return PyObject_TypeCheck(object, site_type) || PyObject_TypeCheck(object, chain_type);
}

std::vector<const InputSpec*> InputsOf(PyObject* callee) {
  std::vector<const InputSpec*> found;
  auto add = [&](Site* site, int link) {
    for (size_t i = 0; i < site->inputs->size(); ++i) {
      if (static_cast<int>(i) != link) found.push_back(&(*site->inputs)[i]);
    }
  };
  if (PyObject_TypeCheck(callee, site_type)) {
    add(AsSite(callee), -1);
  } else {
    for (const Member& member : *AsChain(callee)->members) add(SiteOf(member), member.link);
  }
  return found;
}

const std::vector<OutputSpec>& OutputsOf(PyObject* callee) {
  bool chain = PyObject_TypeCheck(callee, chain_type);
  return *(chain ? SiteOf(AsChain(callee)->members->back()) : AsSite(callee))->tensor_outputs;
}

bool RunForward(PyObject* callee, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages) {
  if (PyObject_TypeCheck(callee, site_type)) return RunForward(AsSite(callee), inputs, outputs, storages);
  try {
    return Forward(AsChain(callee), inputs, outputs, storages);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

bool RunBackward(PyObject* callee, Loans& gradients, std::vector<Managed>* outputs,
                 std::vector<Ref>* storages) {
  if (PyObject_TypeCheck(callee, site_type)) {
    return RunBackward(AsSite(callee), gradients, outputs, storages);
  }
  try {
    return Backward(AsChain(callee), gradients, outputs, storages);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

}  // namespace torch2ort
