// Debian's libprotobuf.a is compiled for executables. Two things in it cannot be linked into a
// shared library, and libprotobuf.so would be shared with whoever else uses it, along with its pool
// of message types, which ends the process when a file is registered twice. Both are mended here;
// docs/decisions/0015-c-abi-and-python.md has the reasons. For Protobuf 3.21.
#include <google/protobuf/arena.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if GOOGLE_PROTOBUF_VERSION / 1000 != 3021
#error "written for Protobuf 3.21: see whether its static library is position independent by now"
#endif

// 1. It reads objects of libstdc++ and libc at fixed distances, which in an executable copy
// relocations make true. Here the copies are made by hand: the linker sends each reference to
// __wrap_X (--wrap=X in CMakeLists.txt), which is filled before anything else of this library runs.
// All are constant, but for stderr, which nobody changes after the start. Their sizes are part of
// the platform's ABI: every executable with such a copy relies on them.
#define KVMILL_COPIES(COPY)                                                 \
  COPY(_ZSt7nothrow, 1)                                                     \
  COPY(_ZTIb, 16)                                                           \
  COPY(_ZTIc, 16)                                                           \
  COPY(_ZTId, 16)                                                           \
  COPY(_ZTIf, 16)                                                           \
  COPY(_ZTIh, 16)                                                           \
  COPY(_ZTIi, 16)                                                           \
  COPY(_ZTIj, 16)                                                           \
  COPY(_ZTIl, 16)                                                           \
  COPY(_ZTIm, 16)                                                           \
  COPY(_ZTTNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEE, 80)  \
  COPY(_ZTTNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEE, 32) \
  COPY(_ZTVNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEEE, 128)    \
  COPY(_ZTVNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEE, 120) \
  COPY(_ZTVNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEE, 80) \
  COPY(_ZTVSt15basic_streambufIcSt11char_traitsIcEE, 128)                   \
  COPY(_ZTVSt9basic_iosIcSt11char_traitsIcEE, 32)                           \
  COPY(stderr, 8)

#define KVMILL_DECLARE(symbol, bytes)       \
  extern const char __real_##symbol[bytes]; \
  alignas(32) char __wrap_##symbol[bytes] = {};
#define KVMILL_FILL(symbol, bytes) std::memcpy(__wrap_##symbol, __real_##symbol, bytes);

extern "C" {
KVMILL_COPIES(KVMILL_DECLARE)
__attribute__((constructor(101))) static void FillCopies() { KVMILL_COPIES(KVMILL_FILL) }
}

// 2. Its arenas use thread-local memory in the way of executables. We have no arena: messages are
// on the heap. With these in place the linker leaves arena.o out; should anything ever make an
// arena, the process ends instead of going wrong.
namespace google::protobuf {
namespace {

[[noreturn]] void NoArena() {
  static constexpr char kText[] = "kvmill: libkvmill.so has no protobuf arenas\n";
  std::fwrite(kText, 1, sizeof(kText) - 1, ::stderr);
  std::abort();
}

}  // namespace

void* Arena::AllocateAlignedNoHook(size_t) { NoArena(); }
void* Arena::AllocateAlignedWithHook(size_t, const std::type_info*) { NoArena(); }
void* Arena::AllocateAlignedWithHookForArray(size_t, const std::type_info*) { NoArena(); }
std::pair<void*, internal::SerialArena::CleanupNode*> Arena::AllocateAlignedWithCleanup(
    size_t, const std::type_info*) {
  NoArena();
}

namespace internal {

#include <google/protobuf/port_def.inc>
PROTOBUF_THREAD_LOCAL ThreadSafeArena::ThreadCache ThreadSafeArena::thread_cache_ = {};
#include <google/protobuf/port_undef.inc>

ThreadSafeArena::~ThreadSafeArena() { NoArena(); }
void ThreadSafeArena::AddCleanup(void*, void (*)(void*)) { NoArena(); }
uint64_t ThreadSafeArena::SpaceAllocated() const { NoArena(); }
uint64_t ThreadSafeArena::SpaceUsed() const { NoArena(); }

}  // namespace internal
}  // namespace google::protobuf
