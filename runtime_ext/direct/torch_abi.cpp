#include "direct/torch_abi.h"

#include <dlfcn.h>

#include <mutex>

#include "tensors/exchange.h"

namespace torch2ort {

namespace {

#ifdef __APPLE__
constexpr const char* kLibrary = "@rpath/libtorch_cpu.dylib";
#else
constexpr const char* kLibrary = "libtorch_cpu.so";
#endif

template <typename Function>
bool Find(const char* name, Function** out) {
  *out = reinterpret_cast<Function*>(FindTorchFunction(name));
  return *out != nullptr;
}

// A number that torch returns from a function without arguments.
bool FindNumber(const std::string& name, int32_t* out) {
  auto* tell = reinterpret_cast<int32_t (*)()>(FindTorchFunction(name));
  if (tell != nullptr) *out = tell();
  return tell != nullptr;
}

void FindDTypes(TorchAbi* torch) {
  constexpr DLDataType known[] = {
      {kDLFloat, 16, 1}, {kDLFloat, 32, 1}, {kDLFloat, 64, 1}, {kDLBfloat, 16, 1}, {kDLInt, 8, 1},
      {kDLInt, 16, 1},   {kDLInt, 32, 1},   {kDLInt, 64, 1},   {kDLUInt, 8, 1},    {kDLBool, 8, 1},
  };
  for (DLDataType dtype : known) {
    int32_t number = 0;
    if (FindNumber("aoti_torch_dtype_" + DTypeName(dtype), &number)) {
      torch->dtypes.emplace_back(dtype, number);
    }
  }
}

bool Load(TorchAbi* torch) {
  bool found =
      Find("aoti_torch_create_tensor_from_blob", &torch->create_tensor_from_blob) &&
      Find("aoti_torch_delete_tensor_object", &torch->delete_tensor_object) &&
      Find("aoti_torch_get_data_ptr", &torch->get_data_ptr) && Find("aoti_torch_get_dim", &torch->get_dim) &&
      Find("aoti_torch_get_sizes", &torch->get_sizes) &&
      Find("aoti_torch_get_strides", &torch->get_strides) &&
      Find("aoti_torch_get_dtype", &torch->get_dtype) && Find("aoti_torch_get_layout", &torch->get_layout) &&
      Find("aoti_torch_is_defined", &torch->is_defined) && Find("aoti_torch_copy_", &torch->copy) &&
      Find("aoti_torch_grad_mode_is_enabled", &torch->grad_mode_is_enabled) &&
      Find("aoti_torch_grad_mode_set_enabled", &torch->grad_mode_set_enabled) &&
      Find("aoti_torch_abi_version", &torch->version) &&
      Find("torch_call_dispatcher", &torch->call_dispatcher) &&
      Find("torch_new_list_reserve_size", &torch->new_list) &&
      Find("torch_list_push_back", &torch->list_push_back) &&
      Find("torch_new_string_handle", &torch->new_string) &&
      FindNumber("aoti_torch_layout_strided", &torch->strided);
  Find("torch_new_stable_ivalue", &torch->new_stable_value);
  if (found) FindDTypes(torch);
  return found;
}

}  // namespace

void* FindTorchFunction(const std::string& name) {
  void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* function = dlsym(library, name.c_str());
  dlclose(library);  // releases the handle; torch itself holds the library
  return function;
}

const TorchAbi* FindTorchAbi() {
  static std::mutex mutex;
  static const TorchAbi* found = nullptr;  // never destroyed: sessions may outlive the library's statics
  std::lock_guard<std::mutex> lock(mutex);
  if (found == nullptr) {
    auto torch = std::make_unique<TorchAbi>();
    if (Load(torch.get())) found = torch.release();
  }
  return found;
}

int32_t TorchDType(const TorchAbi& torch, DLDataType dtype) {
  for (const auto& [known, number] : torch.dtypes) {
    if (known == dtype) return number;
  }
  return -1;
}

}  // namespace torch2ort
