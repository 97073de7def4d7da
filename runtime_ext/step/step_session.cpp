#include "step/step_session.h"

#include <algorithm>
#include <vector>

#include "call/run_state.h"
#include "custom_op/custom_op.h"
#include "step/ort_value.h"

namespace torch2ort {

namespace {

PyTypeObject* half_type = nullptr;
PyTypeObject* kept_type = nullptr;

// The values that one half saves for the other.
struct Kept {
  PyObject_HEAD std::vector<ValuePtr>* values;
};

Kept* AsKept(PyObject* self) { return reinterpret_cast<Kept*>(self); }

void KeptDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete AsKept(self)->values;
  PyObject_Free(self);
  Py_DECREF(type);
}

Py_ssize_t KeptLength(PyObject* self) { return static_cast<Py_ssize_t>(AsKept(self)->values->size()); }

// The environment that the process's sessions share. It is never released, as sessions depend on it.
OrtEnv* Environment() {
  static OrtEnv* const environment = [] {
    OrtEnv* made = nullptr;
    return Succeeded(ort_api->CreateEnv(kOrtLogError, "torch2ort", &made)) ? made : nullptr;
  }();
  return environment;
}

// The cached value of a weight, valid as long as the weight's memory is the same.
struct Weight {
  uintptr_t address = 0;
  std::vector<int64_t> shape;
  ValuePtr value;

  bool IsOf(const DLTensor& tensor) const {
    return value != nullptr && IsContiguous(tensor) &&
           reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset == address &&
           static_cast<size_t>(tensor.ndim) == shape.size() &&
           std::equal(shape.begin(), shape.end(), tensor.shape);
  }
};

struct State {
  OrtSession* session = nullptr;
  std::vector<std::string> inputs, outputs;
  std::vector<const char*> input_names, output_names;
  // The feeds after the values that the other half saved: positions of tensors, or ~i for constant i.
  std::vector<long> sources;
  std::vector<ValuePtr> constants;
  size_t varying = 0;
  std::vector<long> fetched, kept, donated;  // see _native.pyi
  PyObject* plain = nullptr;                 // owned
  PyObject* weight_type = nullptr;           // owned
  std::vector<Weight> weights;               // by position of the tensor

  ~State() {
    if (session != nullptr) ort_api->ReleaseSession(session);
    Py_XDECREF(plain);
    Py_XDECREF(weight_type);
  }
};

struct Half {
  PyObject_HEAD State* state;
};

State& StateOf(PyObject* self) { return *reinterpret_cast<Half*>(self)->state; }

// ---- creation ----

bool ReadNames(PyObject* given, std::vector<std::string>* names, std::vector<const char*>* pointers) {
  Ref items = Ref::Steal(PySequence_Tuple(given));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(items.get()); ++i) {
    const char* name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(items.get(), i), nullptr);
    if (name == nullptr) return false;
    names->emplace_back(name);
  }
  for (const std::string& name : *names) pointers->push_back(name.c_str());
  return true;
}

bool ReadNumbers(PyObject* given, std::vector<long>* numbers) {
  Ref items = Ref::Steal(PySequence_Tuple(given));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(items.get()); ++i) {
    numbers->push_back(PyLong_AsLong(PyTuple_GetItem(items.get(), i)));
    if (numbers->back() == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

bool ReadSources(PyObject* given, State* state) {
  Ref items = Ref::Steal(PySequence_Tuple(given));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(items.get()); ++i) {
    PyObject* item = PyTuple_GetItem(items.get(), i);
    if (IsTensor(item)) {
      state->constants.push_back(ValueOf(item));
      if (state->constants.back() == nullptr) return false;
      state->sources.push_back(-static_cast<long>(state->constants.size()));
      continue;
    }
    state->sources.push_back(PyLong_AsLong(item));
    if (state->sources.back() == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

// Checks that every position is in its range.
bool CheckPositions(const State& state) {
  auto in = [](const std::vector<long>& positions, long low, size_t count) {
    return std::all_of(positions.begin(), positions.end(),
                       [&](long i) { return low <= i && i < static_cast<long>(count); });
  };
  auto constants = static_cast<long>(state.constants.size());
  auto sources = static_cast<long>(state.sources.size());
  bool good = in(state.sources, -constants, size_t{1} << 30) && in(state.fetched, 0, state.outputs.size()) &&
              in(state.donated, 0, state.outputs.size()) && in(state.kept, -sources, state.outputs.size());
  if (!good) PyErr_SetString(PyExc_ValueError, "Half: a position is of no input or output");
  return good;
}

bool MakeSession(State* state, OrtSessionOptions* options, PyObject* model) {
  OrtEnv* environment = Environment();
  if (environment == nullptr) return false;
  Ref held;
  char* data = nullptr;
  Py_ssize_t size = 0;
  const char* path = nullptr;
  if (PyUnicode_Check(model)) {
    path = PyUnicode_AsUTF8AndSize(model, nullptr);
    if (path == nullptr) return false;
  } else if (PyBytes_AsStringAndSize(model, &data, &size) < 0) {
    return false;
  }
  OrtStatus* status = nullptr;
  // The kernels of nodes call Python for their sites.
  PyThreadState* thread = PyEval_SaveThread();
  status = path != nullptr ? ort_api->CreateSession(environment, path, options, &state->session)
                           : ort_api->CreateSessionFromArray(environment, data, static_cast<size_t>(size),
                                                             options, &state->session);
  PyEval_RestoreThread(thread);
  return Succeeded(status);
}

PyObject* HalfNew(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"model", "inputs",  "outputs", "sources",     "varying", "fetched",
                                "kept",  "donated", "plain",   "weight_type", "options", nullptr};
  PyObject *model, *inputs, *outputs, *sources, *fetched, *kept, *donated, *plain, *weight_type, *options;
  Py_ssize_t varying;
  if (!CheckConfigured() ||
      !PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOnOOOOO!O:Half", const_cast<char**>(names), &model,
                                   &inputs, &outputs, &sources, &varying, &fetched, &kept, &donated, &plain,
                                   &PyType_Type, &weight_type, &options)) {
    return nullptr;
  }
  auto* settings = static_cast<OrtSessionOptions*>(PyCapsule_GetPointer(options, kOptionsName));
  if (settings == nullptr) return nullptr;
  auto state = std::make_unique<State>();
  state->varying = static_cast<size_t>(varying);
  state->plain = Ref::Share(plain).release();
  state->weight_type = Ref::Share(weight_type).release();
  if (!ReadNames(inputs, &state->inputs, &state->input_names) ||
      !ReadNames(outputs, &state->outputs, &state->output_names) || !ReadSources(sources, state.get()) ||
      !ReadNumbers(fetched, &state->fetched) || !ReadNumbers(kept, &state->kept) ||
      !ReadNumbers(donated, &state->donated) || !CheckPositions(*state) ||
      !MakeSession(state.get(), settings, model)) {
    return nullptr;
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self != nullptr) reinterpret_cast<Half*>(self)->state = state.release();
  return self;
}

void HalfDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Half*>(self)->state;
  UnmapFreeBlocks();  // a step of another session maps what it needs once more
  PyObject_Free(self);
  Py_DECREF(type);
}

// ---- run ----

// The value of one of the caller's tensors.
ValuePtr Fed(State* state, size_t position, PyObject* tensor) {
  DLTensor view;
  if (config.exchange->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
    PyErr_Clear();
    view = {};
  }
  bool is_weight =
      position >= state->varying || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == state->weight_type;
  if (is_weight && position < state->weights.size() && state->weights[position].IsOf(view))
    return state->weights[position].value;
  bool simple = view.device.device_type == kDLCPU && IsContiguous(view) && SpanOf(view).size() > 0;
  if (!simple) {
    Ref made = Ref::Steal(CallOne(state->plain, tensor));
    return made ? ValueOf(made.get()) : nullptr;
  }
  ValuePtr value = ValueOf(tensor);
  if (value != nullptr && is_weight) {
    if (state->weights.size() <= position) state->weights.resize(position + 1);
    const DLTensor& made = value->tensor->dl_tensor;
    state->weights[position] = {SpanOf(made).begin, {made.shape, made.shape + made.ndim}, value};
  }
  return value;
}

// Collects the feeds: the values that the other half saved, then tensors and constants. False with an
// exception set on failure.
bool ReadFeeds(State* state, PyObject* kept, PyObject* tensors, std::vector<ValuePtr>* feeds) {
  if (kept != Py_None) *feeds = *AsKept(kept)->values;
  Ref items = Ref::Steal(PySequence_Tuple(tensors));
  if (!items) return false;
  auto count = static_cast<size_t>(PyTuple_Size(items.get()));
  std::vector<ValuePtr> made(count);
  for (long source : state->sources) {
    if (source < 0) {
      feeds->push_back(state->constants[static_cast<size_t>(-source - 1)]);
      continue;
    }
    auto position = static_cast<size_t>(source);
    if (position >= count) {
      PyErr_Format(PyExc_ValueError, "Half.run: %zu tensors, but the half is fed with number %zu", count,
                   position);
      return false;
    }
    if (made[position] == nullptr) {
      PyObject* tensor = PyTuple_GetItem(items.get(), static_cast<Py_ssize_t>(position));
      if (!IsTensor(tensor)) {
        PyErr_Format(PyExc_TypeError, "Half.run: item %zu of the tensors is of type %.200s", position,
                     TypeName(tensor).c_str());
        return false;
      }
      made[position] = Fed(state, position, tensor);
      if (made[position] == nullptr) return false;
    }
    feeds->push_back(made[position]);
  }
  if (feeds->size() == state->inputs.size()) return true;
  PyErr_Format(PyExc_ValueError, "Half.run: %zu values for %zu inputs", feeds->size(), state->inputs.size());
  return false;
}

// The state while a session runs: the current run with the contexts of Functions, and autograd is disabled.
class Running {
 public:
  explicit Running(PyObject* run) {
    Ref recording = Ref::Steal(PyObject_CallNoArgs(custom_op_config.is_grad_enabled));
    recording_ = recording.get() == Py_True;
    good_ = recording && (!recording_ || SetGradEnabled(Py_False));
    if (good_) before_ = Ref::Steal(Begin(nullptr, run));
    good_ = good_ && before_;
  }
  ~Running() {
    Ref raised = Ref::Steal(TakeRaised());
    if (before_) Ref::Steal(Begin(nullptr, before_.get()));
    if (recording_) SetGradEnabled(Py_True);
    if (raised) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  explicit operator bool() const { return good_; }

 private:
  static bool SetGradEnabled(PyObject* enabled) {
    return static_cast<bool>(Ref::Steal(CallOne(custom_op_config.set_grad_enabled, enabled)));
  }

  Ref before_;
  bool recording_ = false;
  bool good_ = false;
};

// Raises the exception of a Function in the failed run, as the same object, or the runtime's message.
void RaiseFailure(OrtStatus* status) {
  std::string text = StatusText(status);
  Ref raised = KeptError(text);
  if (raised) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  } else {
    PyErr_SetString(config.error_type, ("ONNX Runtime failed: " + text).c_str());
  }
}

bool Run(const State& state, const std::vector<ValuePtr>& feeds, PyObject* run,
         std::vector<ValuePtr>* results) {
  std::vector<const OrtValue*> given;
  given.reserve(feeds.size());
  for (const ValuePtr& value : feeds) given.push_back(value->ort);
  std::vector<OrtValue*> found(state.outputs.size(), nullptr);
  Running running(run);
  if (!running) return false;
  PyThreadState* thread = PyEval_SaveThread();
  OrtStatus* status = ort_api->Run(state.session, nullptr, state.input_names.data(), given.data(),
                                   given.size(), state.output_names.data(), found.size(), found.data());
  PyEval_RestoreThread(thread);
  results->reserve(found.size());
  for (OrtValue* value : found) {
    results->push_back(std::make_shared<Value>());
    results->back()->ort = value;
  }
  if (status != nullptr) RaiseFailure(status);
  return status == nullptr;
}

Ref NewKept(const State& state, const std::vector<ValuePtr>& feeds, const std::vector<ValuePtr>& results) {
  Ref kept = Ref::Steal(PyType_GenericAlloc(kept_type, 0));
  if (!kept) return kept;
  auto* values = AsKept(kept.get())->values = new std::vector<ValuePtr>;
  values->reserve(state.kept.size());
  for (long place : state.kept) {
    values->push_back(place >= 0 ? results[static_cast<size_t>(place)] : feeds[static_cast<size_t>(~place)]);
  }
  return kept;
}

bool Donate(const State& state, const std::vector<ValuePtr>& results, PyObject* run) {
  std::vector<DLManagedTensor*> donated;
  for (long place : state.donated) {
    DLManagedTensor* tensor = DonationOf(results[static_cast<size_t>(place)]);
    if (tensor == nullptr) {
      for (DLManagedTensor* made : donated) made->deleter(made);
      return false;
    }
    donated.push_back(tensor);
  }
  GiveDonated(run, std::move(donated));
  return true;
}

PyObject* HalfRun(PyObject* self, PyObject* args) {
  PyObject *kept, *tensors, *run;
  if (!PyArg_ParseTuple(args, "OOO!:run", &kept, &tensors, run_type, &run)) return nullptr;
  if (kept != Py_None && !PyObject_TypeCheck(kept, kept_type)) {
    PyErr_Format(PyExc_TypeError, "Half.run: expected a Kept or None, got %.200s", TypeName(kept).c_str());
    return nullptr;
  }
  State& state = StateOf(self);
  std::vector<ValuePtr> feeds, results;
  if (!ReadFeeds(&state, kept, tensors, &feeds) || !Run(state, feeds, run, &results)) return nullptr;
  Ref outputs = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(state.fetched.size())));
  for (size_t i = 0; outputs && i < state.fetched.size(); ++i) {
    Ref tensor = TensorOf(results[static_cast<size_t>(state.fetched[i])]);
    if (!tensor) return nullptr;
    PyList_SetItem(outputs.get(), static_cast<Py_ssize_t>(i), tensor.release());
  }
  Ref left = NewKept(state, feeds, results);
  if (!outputs || !left || (!state.donated.empty() && !Donate(state, results, run))) return nullptr;
  PyObject* items[] = {outputs.get(), left.get()};
  return PackTuple(items, 2).release();
}

PyMethodDef half_methods[] = {
    {"run", HalfRun, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot half_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(HalfNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(HalfDealloc)},
    {Py_tp_methods, half_methods},
    {0, nullptr},
};

PyType_Slot kept_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(KeptDealloc)},
    {Py_sq_length, reinterpret_cast<void*>(KeptLength)},
    {0, nullptr},
};

PyType_Spec half_spec = {"torch2ort._native.Half", sizeof(Half), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, half_slots};
PyType_Spec kept_spec = {"torch2ort._native.Kept", sizeof(Kept), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         kept_slots};

}  // namespace

bool InitHalf(PyObject* module) {
  half_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&half_spec));
  kept_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kept_spec));
  return half_type != nullptr && kept_type != nullptr &&
         PyModule_AddObjectRef(module, "Half", reinterpret_cast<PyObject*>(half_type)) == 0 &&
         PyModule_AddObjectRef(module, "Kept", reinterpret_cast<PyObject*>(kept_type)) == 0;
}

}  // namespace torch2ort
