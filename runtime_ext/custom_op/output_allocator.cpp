// An allocator for ONNX Runtime that can give it a tensor of torch's as the memory of an output.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "custom_op/custom_op.h"

namespace torch2ort {

namespace {

constexpr size_t kAlignment = 64;
// ONNX Runtime rounds the sizes of its requests up; it never touches memory after a tensor's end.
constexpr size_t kMaxRounding = 256;
// Blocks of this size on are mapped and reused: on the heap they would fragment the memory of torch's blocks,
// which would then be allocated in cold memory.
constexpr size_t kLargeBlock = 1 << 20;
// Blocks from here on may lie on huge pages, which fault once where others fault 512 times.
constexpr size_t kHugePage = 1 << 21;
constexpr size_t kMaxKeptBytes = size_t{1} << 28;

// The gift of this thread for the next request.
thread_local Gift* offered = nullptr;

// One block of memory that ONNX Runtime holds and that is not from the heap.
struct Held {
  // The DLPack handle that keeps torch's memory alive; TakeBack() releases it. Null for a mapped block.
  DLManagedTensorVersioned* tensor;
  size_t size;  // of a mapped block
  // The earlier entry for the same address: a value that one session returned may be given to another one.
  Held* below;
};

// Mapped memory that is used again. Adjacent free ranges are one range, which serves any smaller request. If
// all free ranges are too small for a request of `size` bytes, up to `size` bytes of them are unmapped before
// `size` bytes are mapped, so a step maps no more memory than it uses at once. Of the ranges of one size, the
// last that was freed is used first: its contents may still be in the processor's caches.
class Pages {
 public:
  void* Get(size_t size) {
    auto found = by_size_.lower_bound({size, 0, 0});
    if (found == by_size_.end()) {
      Unmap(size);
      return NewBlock(size);
    }
    auto [length, order, begin] = *found;
    Remove(begin);
    if (length > size) Insert(begin + size, length - size);
    return reinterpret_cast<void*>(begin);
  }

  void Put(void* data, size_t size) {
    if (free_bytes_ + size > kMaxKeptBytes) {
      munmap(data, size);
      return;
    }
    auto begin = reinterpret_cast<uintptr_t>(data);
    auto next = by_begin_.lower_bound(begin);
    if (next != by_begin_.end() && next->first == begin + size) {
      size += next->second.size;
      next = Remove(next->first);
    }
    if (next != by_begin_.begin()) {
      auto [before, range] = *std::prev(next);
      if (before + range.size == begin) {
        Remove(before);
        begin = before;
        size += range.size;
      }
    }
    Insert(begin, size);
  }

  // Unmaps `size` bytes of the free ranges, the smallest first.
  void Unmap(size_t size) {
    while (size > 0 && !by_size_.empty()) {
      auto [length, order, begin] = *by_size_.begin();
      size_t part = std::min(length, size);
      Remove(begin);
      munmap(reinterpret_cast<void*>(begin), part);
      if (length > part) Insert(begin + part, length - part);
      size -= part;
    }
  }

 private:
  struct Range {
    size_t size;
    uint64_t order;  // of the ranges of one size, the smallest is used first
  };

  static void* NewBlock(size_t size) {
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    // An advice: a system without huge pages refuses it, and the block is as good.
#ifdef MADV_HUGEPAGE
    if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
    return data;
  }

  void Insert(uintptr_t begin, size_t size) {
    by_begin_[begin] = {size, --freed_};
    by_size_.insert({size, freed_, begin});
    free_bytes_ += size;
  }

  std::map<uintptr_t, Range>::iterator Remove(uintptr_t begin) {
    auto found = by_begin_.find(begin);
    by_size_.erase({found->second.size, found->second.order, begin});
    free_bytes_ -= found->second.size;
    return by_begin_.erase(found);
  }

  std::map<uintptr_t, Range> by_begin_;
  std::set<std::tuple<size_t, uint64_t, uintptr_t>> by_size_;
  size_t free_bytes_ = 0;
  uint64_t freed_ = UINT64_MAX;  // counts down, so that the last that was freed comes first
};

// The blocks that ONNX Runtime holds and that are not from the heap, by address: memory of
// torch's tensors, and mapped memory.
class Holdings {
 public:
  void Give(void* data, DLManagedTensorVersioned* tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    Add(data, {tensor, 0, nullptr});
  }

  void* Map(size_t size) {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size = (size + page - 1) / page * page;
    std::lock_guard<std::mutex> lock(mutex_);
    void* data = pages_.Get(size);
    Add(data, {nullptr, size, nullptr});
    return data;
  }

  // False if the memory is from the heap.
  bool TakeBack(void* data) {
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    Managed tensor;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = held_.find(data);
      if (found == held_.end()) return false;
      tensor.reset(found->second.tensor);
      if (tensor == nullptr) pages_.Put(data, found->second.size);
      if (Held* below = found->second.below) {
        found->second = *below;
        delete below;
      } else {
        held_.erase(found);
      }
      count_.fetch_sub(1, std::memory_order_relaxed);
    }
    // Once the interpreter has ended, torch cannot free the memory any more, so the handle is leaked.
    if (tensor && !PythonRuns()) static_cast<void>(tensor.release());
    return true;
  }

  void Unmap() {
    std::lock_guard<std::mutex> lock(mutex_);
    pages_.Unmap(SIZE_MAX);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  void Add(void* data, Held held) {
    auto [found, fresh] = held_.emplace(data, held);
    if (!fresh) found->second = {held.tensor, held.size, new Held(found->second)};
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::unordered_map<void*, Held> held_;
  Pages pages_;
  std::atomic<size_t> count_{0};
};

// Blocks of the heap. Small ones are kept for the next request of their size, as the heap is slow for aligned
// memory. The size is stored before each block.
class Blocks {
 public:
  void* Get(size_t size) {
    size_t units = (size + kAlignment - 1) / kAlignment;
    if (units < kSmall) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!kept_[units].empty()) {
        void* data = kept_[units].back();
        kept_[units].pop_back();
        return data;
      }
    }
    void* base = nullptr;
    if (posix_memalign(&base, kAlignment, (units + 1) * kAlignment) != 0) throw std::bad_alloc();
    *static_cast<size_t*>(base) = units;
    return static_cast<char*>(base) + kAlignment;
  }

  void Put(void* data) {
    if (data == nullptr) return;
    void* base = static_cast<char*>(data) - kAlignment;
    size_t units = *static_cast<size_t*>(base);
    if (units < kSmall) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (kept_[units].size() < kMaxKept) {
        kept_[units].push_back(data);
        return;
      }
    }
    std::free(base);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  static constexpr size_t kSmall = 65;  // in units of the alignment: up to 4 KiB
  static constexpr size_t kMaxKept = 16;

  std::mutex mutex_;
  std::vector<void*> kept_[kSmall];
};

// Never destroyed: sessions may outlive the library's statics.
Holdings& holdings = *new Holdings;
Blocks& blocks = *new Blocks;

// A forked process, such as a worker of a DataLoader, frees tensors too, and has none of the threads that may
// have held a lock at that moment.
void LockForFork() {
  holdings.mutex().lock();
  blocks.mutex().lock();
}

void UnlockAfterFork() {
  blocks.mutex().unlock();
  holdings.mutex().unlock();
}

[[maybe_unused]] const int fork_handlers = pthread_atfork(LockForFork, UnlockAfterFork, UnlockAfterFork);

OrtMemoryInfo* memory_info = nullptr;

void* Allocate(OrtAllocator*, size_t size) {
  if (offered != nullptr) {
    if (void* data = offered->Take(size)) return data;
  }
  return TakeBlock(size);
}

void Free(OrtAllocator*, void* data) { ReturnBlock(data); }

const OrtMemoryInfo* Info(const OrtAllocator*) { return memory_info; }

OrtAllocator allocator{kOrtApiVersion, Allocate, Free, Info, nullptr};

// True if there was no error.
bool Succeeded(OrtStatus* status) {
  if (status != nullptr) ort_api->ReleaseStatus(status);
  return status == nullptr;
}

// The environment that all of the process's sessions share; null where an older runtime does not share it.
class Environment {
 public:
  Environment() {
    if (!Succeeded(ort_api->CreateEnv(kOrtLogError, "torch2ort", &environment_))) environment_ = nullptr;
  }
  ~Environment() {
    if (environment_ != nullptr) ort_api->ReleaseEnv(environment_);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  OrtEnv* get() const { return environment_; }

 private:
  OrtEnv* environment_ = nullptr;
};

}  // namespace

bool allocator_lent = false;

void* TakeBlock(size_t size) {
  if (size >= kLargeBlock) return holdings.Map(size);
  return size > 0 ? blocks.Get(size) : nullptr;
}

void UnmapFreeBlocks() { holdings.Unmap(); }

void ReturnBlock(void* data) {
  if (!holdings.TakeBack(data)) blocks.Put(data);
}

Gift::Gift(Managed* tensor, Span memory) : tensor_(tensor), memory_(memory) {
  if (tensor != nullptr && memory.begin % kAlignment == 0) offered = this;
}

Gift::~Gift() { offered = nullptr; }

void* Gift::Take(size_t size) {
  auto bytes = static_cast<size_t>(memory_.size());
  if (size < bytes || size - bytes >= kMaxRounding) return nullptr;
  void* data = reinterpret_cast<void*>(memory_.begin);
  holdings.Give(data, tensor_->release());
  offered = nullptr;
  return data;
}

PyObject* LendAllocator(PyObject*, PyObject*) {
  if (ort_api == nullptr) Py_RETURN_FALSE;
  Environment environment;
  if (environment.get() == nullptr) Py_RETURN_FALSE;
  if (memory_info == nullptr &&
      !Succeeded(ort_api->CreateMemoryInfo("Cpu", kOrtDeviceAllocator, 0, kOrtMemoryDefault, &memory_info))) {
    Py_RETURN_FALSE;
  }
  allocator_lent = Succeeded(ort_api->RegisterAllocator(environment.get(), &allocator));
  return PyBool_FromLong(allocator_lent);
}

PyObject* WithdrawAllocator(PyObject*, PyObject*) {
  if (allocator_lent) {
    Environment environment;
    allocator_lent = !Succeeded(ort_api->UnregisterAllocator(environment.get(), memory_info));
  }
  Py_RETURN_NONE;
}

}  // namespace torch2ort
