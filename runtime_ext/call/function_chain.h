// A chain: sites that follow each other directly, run by one node of the runtime.
#pragma once

#include <vector>

#include "call/function_call.h"
#include "call/site.h"

namespace torch2ort {

struct Member {
  Ref site;
  int link;  // index of the tensor argument that is the output of the member before; -1 for the first
};

// Expects the tensor arguments of all members, in order, except for the links; returns the outputs of the
// last member.
struct Chain {
  PyObject_HEAD PyObject* weak_references;
  PyObject* key;
  std::vector<Member>* members;
  size_t input_count;
};

extern PyTypeObject* chain_type;
bool InitChain(PyObject* module);

inline Chain* AsChain(PyObject* self) { return reinterpret_cast<Chain*>(self); }

// ---- the callees of a node: a site or a chain ----

bool IsCallable(PyObject* object);
std::vector<const InputSpec*> InputsOf(PyObject* callee);
const std::vector<OutputSpec>& OutputsOf(PyObject* callee);
// As for a site.
bool RunForward(PyObject* callee, Loans& inputs, std::vector<Managed>* outputs, std::vector<Ref>* storages);
bool RunBackward(PyObject* callee, Loans& gradients, std::vector<Managed>* outputs,
                 std::vector<Ref>* storages);

}  // namespace torch2ort
