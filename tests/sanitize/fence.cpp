// Preloaded, puts a page that nobody may touch behind each block of aligned memory, which is what tensors of
// PyTorch and ONNX Runtime lie in: who reads or writes past the end of one, or after it was freed, is stopped
// there. AddressSanitizer sees this in code that it compiled, and these libraries come compiled.
//
// Blocks are filled with the bytes FF (not a number, or -1), so that what is read before it is written shows.
#include <dlfcn.h>
#include <execinfo.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" void __libc_free(void*);
extern "C" void* __libc_realloc(void*, size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

constexpr size_t kPage = 4096;
// Addresses are never used twice, so that a freed block stays out of bounds.
constexpr size_t kReserved = size_t{1} << 44;
constexpr unsigned char kUnwritten = 0xff;

struct Block {
  uint32_t alignment;
  uint32_t live;
  size_t size;  // as asked for; the rest up to the alignment must stay as it is
};

struct Fence {
  char* memory;
  Block* blocks;  // by the number of the page that a block begins in
  std::atomic<size_t> used{0};
};

size_t RoundUp(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

void Stop(const char* what, const Block& block, const char* begin, const void* address) {
  char text[256];
  int length = std::snprintf(text, sizeof text, "fence: %s, %td bytes from the start of a block of %zu bytes\n",
                             what, static_cast<const char*>(address) - begin, block.size);
  if (write(2, text, static_cast<size_t>(length)) < 0) _exit(1);
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
}

Fence* MakeFence();

Fence& TheFence() {
  static Fence* fence = MakeFence();
  return *fence;
}

bool Ours(const void* data) {
  const char* memory = TheFence().memory;
  return data >= memory && data < memory + kReserved;
}

Block& BlockOf(const void* data) {
  return TheFence().blocks[static_cast<size_t>(static_cast<const char*>(data) - TheFence().memory) / kPage];
}

void Report(int, siginfo_t* info, void*) {
  if (Ours(info->si_addr)) {
    auto page = static_cast<size_t>(static_cast<char*>(info->si_addr) - TheFence().memory) / kPage;
    while (page > 0 && TheFence().blocks[page].size == 0) --page;
    const Block& block = TheFence().blocks[page];
    size_t rounded = RoundUp(block.size, block.alignment);
    char* end = TheFence().memory + page * kPage + RoundUp(rounded, kPage);
    Stop(block.live ? "access out of bounds" : "access after free", block, end - rounded, info->si_addr);
  }
  std::signal(SIGSEGV, SIG_DFL);  // it happens again on return
}

Fence* MakeFence() {
  static Fence fence;
  auto reserve = [](size_t size, int protection) {
    void* data = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) std::abort();
    return data;
  };
  fence.memory = static_cast<char*>(reserve(kReserved, PROT_NONE));
  fence.blocks =
      static_cast<Block*>(reserve(kReserved / kPage * sizeof(Block), PROT_READ | PROT_WRITE));
  struct sigaction action {};
  action.sa_sigaction = Report;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  return &fence;
}

void Release(void* data) {
  Block& block = BlockOf(data);
  auto* begin = static_cast<unsigned char*>(data);
  if (!block.live) {
    Stop("free of a block that is free", block, static_cast<char*>(data), data);
    std::abort();
  }
  size_t rounded = RoundUp(block.size, block.alignment);
  char* page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(data) / kPage * kPage);
  auto* damaged = std::find_if(begin + block.size, begin + rounded, [](auto byte) { return byte != kUnwritten; });
  if (damaged != begin + rounded) {
    Stop("written past the end, as its free finds", block, static_cast<char*>(data), damaged);
    std::abort();
  }
  auto* first = reinterpret_cast<unsigned char*>(page);
  damaged = std::find_if(first, begin, [](auto byte) { return byte != kUnwritten; });
  if (damaged != begin) {
    Stop("written before the start, as its free finds", block, static_cast<char*>(data), damaged);
    std::abort();
  }
  block.live = 0;
  size_t length = RoundUp(rounded, kPage);
  madvise(page, length, MADV_DONTNEED);
  mprotect(page, length, PROT_NONE);
}

}  // namespace

extern "C" int posix_memalign(void** out, size_t alignment, size_t size) {
  if (alignment > kPage || size == 0) {
    *out = __libc_memalign(alignment, size);
    return *out == nullptr ? ENOMEM : 0;
  }
  size_t rounded = RoundUp(size, alignment);
  size_t length = RoundUp(rounded, kPage);
  size_t offset = TheFence().used.fetch_add(length + kPage);
  char* page = TheFence().memory + offset;
  if (offset + length + kPage > kReserved || mprotect(page, length, PROT_READ | PROT_WRITE) != 0) return ENOMEM;
  std::memset(page, kUnwritten, length);
  char* data = page + length - rounded;
  BlockOf(data) = {static_cast<uint32_t>(alignment), 1, size};
  *out = data;
  return 0;
}

extern "C" void free(void* data) {
  if (data != nullptr && Ours(data)) {
    Release(data);
  } else {
    __libc_free(data);
  }
}

extern "C" void* realloc(void* data, size_t size) {
  if (data == nullptr || !Ours(data)) return __libc_realloc(data, size);
  void* moved = std::malloc(size);
  if (moved != nullptr) {
    std::memcpy(moved, data, std::min(size, BlockOf(data).size));
    Release(data);
  }
  return moved;
}
