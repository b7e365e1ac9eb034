#include "memory.h"

#include <cstring>
#include <string>
#include <vector>

#include "scheduler.h"

namespace sim {

uint32_t block_epoch = 1, warp_epoch[32];

namespace {

struct Region {
  uintptr_t begin = 0;
  size_t size = 0;
  bool holds(uintptr_t address, size_t n) const { return address - begin < size && n <= size - (address - begin); }
};

struct Argument {
  std::string name;
  uintptr_t begin;
  size_t rows, stride, row_size;
  size_t size() const { return rows ? (rows - 1) * stride + row_size : 0; }
  bool near(uintptr_t address) const { return address - begin < size(); }
  bool holds(uintptr_t address, size_t n) const {
    size_t offset = address - begin;
    if (offset >= size()) return false;
    return (rows > 1 ? offset % stride : offset) + n <= row_size;
  }
};

bool checking;
Region stacks, image, scheduler_data, shared[2];
std::vector<Argument> arguments;

// --- Races in shared memory -------------------------------------------------------------------------------------

struct Stamp {
  uint32_t block = 0, warp = 0;  // epochs of the access
  uint16_t thread = 0;
};
struct Cell {  // of one byte
  Stamp write, read, other_read, atomic;
  bool shared_write = false;  // several threads stored the same value
};
std::vector<Cell> cells[2];

Stamp now() { return {block_epoch, warp_epoch[indices.linear / 32], uint16_t(indices.linear)}; }

bool unordered(const Stamp& earlier) {
  if (earlier.block != block_epoch || earlier.thread == indices.linear) return false;
  return earlier.thread / 32 != indices.linear / 32 || earlier.warp == warp_epoch[indices.linear / 32];
}

// The last store to shared memory. It is judged after it has happened: storing the value that is already there is no
// race, however many threads do it.
struct Store {
  int which = -1;
  size_t offset, size;
  char old[64];
  Stamp stamp;
  const void* caller;
} pending;

void race(const char* what, const Stamp& earlier, const void* caller) {
  fail("race in shared memory: %s %u without a barrier in between [at %p]", what, earlier.thread, caller);
}

void settle() {
  if (pending.which < 0) return;
  Store store = pending;
  pending.which = -1;
  const char* base = reinterpret_cast<const char*>(shared[store.which].begin) + store.offset;
  for (size_t i = 0; i < store.size; i++) {
    Cell& cell = cells[store.which][store.offset + i];
    if (base[i] == store.old[i]) {
      if (unordered(cell.write)) cell.shared_write = true;
      continue;
    }
    if (unordered(cell.write)) race("overwrites a value of thread", cell.write, store.caller);
    if (unordered(cell.read)) race("overwrites a value that was read by thread", cell.read, store.caller);
    if (unordered(cell.atomic)) race("overwrites a value updated by thread", cell.atomic, store.caller);
    if (unordered(cell.other_read)) race("overwrites a value that was read by thread", cell.other_read, store.caller);
    cell.write = store.stamp;
    cell.shared_write = false;
  }
}

void access_shared(int which, size_t offset, size_t size, Access access, const void* caller) {
  if (access == Access::kWrite) {
    if (size > sizeof(pending.old)) return;
    pending.which = which;
    pending.offset = offset;
    pending.size = size;
    memcpy(pending.old, reinterpret_cast<const char*>(shared[which].begin) + offset, size);
    pending.stamp = now();
    pending.caller = caller;
    return;
  }
  for (size_t i = 0; i < size; i++) {
    Cell& cell = cells[which][offset + i];
    if (unordered(cell.write) && !cell.shared_write) race("reads a value of thread", cell.write, caller);
    if (access == Access::kAtomic) {
      if (unordered(cell.read)) race("updates a value that was read by thread", cell.read, caller);
      if (unordered(cell.other_read)) race("updates a value that was read by thread", cell.other_read, caller);
      cell.atomic = now();
      continue;
    }
    if (unordered(cell.atomic)) race("reads a value updated by thread", cell.atomic, caller);
    if (cell.read.block != block_epoch) {
      cell.read = now();
    } else if (cell.read.thread == indices.linear) {
      cell.read = now();
    } else {
      cell.other_read = now();
    }
  }
}

[[noreturn]] void outside(uintptr_t address, size_t size, Access access, const void* caller) {
  const char* verb = access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "updates";
  const Argument* closest = nullptr;
  size_t best = SIZE_MAX;
  for (const Argument& argument : arguments) {
    if (argument.near(address))
      fail("%s %zu bytes between the rows of %s, %zu bytes after its start [at %p]", verb, size, argument.name.c_str(),
           address - argument.begin, caller);
    size_t distance =
        address < argument.begin ? argument.begin - address : address - (argument.begin + argument.size());
    if (distance < best) best = distance, closest = &argument;
  }
  if (closest && best < size_t(1) << 40)
    fail("%s %zu bytes out of bounds: %zu bytes %s %s [at %p]", verb, size, best,
         address < closest->begin ? "before" : "past the end of", closest->name.c_str(), caller);
  fail("%s %zu bytes at an address outside all arguments [at %p]", verb, size, caller);
}

// A thread that accesses memory so often without waiting for another one is in a loop that does not end.
constexpr uint64_t kPatience = 1u << 26;
uint64_t accesses;

void check(uintptr_t address, size_t size, Access access, const void* caller) {
  if (!checking) return;
  if (++accesses > kPatience) fail("a loop that does not end, or that waits for another block [at %p]", caller);
  if (pending.which >= 0) settle();
  if (stacks.holds(address, size) || scheduler_data.holds(address, size)) return;
  for (const Argument& argument : arguments)
    if (argument.holds(address, size)) return;
  for (int i = 0; i < 2; i++)
    if (shared[i].holds(address, size)) return access_shared(i, address - shared[i].begin, size, access, caller);
  if (image.holds(address, size)) return;
  outside(address, size, access, caller);
}

// --- Asynchronous copies -----------------------------------------------------------------------------------------

struct Copy {
  char* destination;
  const void* source;
  int size, bytes;
  unsigned group;
  const void* caller;
};
struct Copies {
  std::vector<Copy> waiting;  // oldest first
  unsigned committed = 0;     // groups
};
std::vector<Copies> copies;  // of each thread of the block

void arrive_until(unsigned group) {
  std::vector<Copy>& waiting = copies[indices.linear].waiting;
  size_t done = 0;
  for (; done < waiting.size() && waiting[done].group < group; done++) {
    const Copy& copy = waiting[done];
    check(reinterpret_cast<uintptr_t>(copy.destination), copy.size, Access::kWrite, copy.caller);
    memset(copy.destination, 0, copy.size);
    memcpy(copy.destination, copy.source, copy.bytes);
  }
  waiting.erase(waiting.begin(), waiting.begin() + done);
}

}  // namespace

void copy_async(unsigned address, const void* global, int size, int bytes) {
  char* destination = static_cast<char*>(shared_pointer(address));
  const void* caller = __builtin_return_address(0);
  if (uintptr_t(global) % size || uintptr_t(destination) % size)
    fail("misaligned address: cp.async of %d bytes [at %p]", size, caller);
  if (bytes) check(reinterpret_cast<uintptr_t>(global), bytes, Access::kRead, caller);
  Copies& mine = copies[indices.linear];
  mine.waiting.push_back({destination, global, size, bytes, mine.committed, caller});
}
void copy_commit() { copies[indices.linear].committed++; }
void copy_wait(unsigned groups) {
  unsigned committed = copies[indices.linear].committed;
  arrive_until(committed > groups ? committed - groups : 0);
}
void copy_wait_all() { arrive_until(copies[indices.linear].committed + 1); }

void copy_bulk(unsigned address, const void* global, int size, unsigned mbarrier) {
  const char* source = static_cast<const char*>(global);
  char* destination = static_cast<char*>(shared_pointer(address));
  const void* caller = __builtin_return_address(0);
  if (uintptr_t(global) % 16 || uintptr_t(destination) % 16 || size % 16)
    fail("misaligned address: cp.async.bulk of %d bytes [at %p]", size, caller);
  for (int i = 0; i < size; i += 16) {
    check(reinterpret_cast<uintptr_t>(source + i), 16, Access::kRead, caller);
    check(reinterpret_cast<uintptr_t>(destination + i), 16, Access::kWrite, caller);
    memcpy(destination + i, source + i, 16);
  }
  mbarrier_complete(mbarrier, size);
}

void memory_begin_launch(char* stacks_begin, size_t stacks_size, const char* image_begin, size_t image_size) {
  checking = true;
  stacks = {reinterpret_cast<uintptr_t>(stacks_begin), stacks_size};
  image = {reinterpret_cast<uintptr_t>(image_begin), image_size};
  scheduler_data = {reinterpret_cast<uintptr_t>(&indices), sizeof(indices)};
}

void memory_end_launch() {
  checking = false;
  pending.which = -1;
}

void memory_begin_block(char* dynamic_shared, size_t dynamic_size, char* static_shared, size_t static_size) {
  pending.which = -1;
  accesses = 0;
  block_epoch++;
  copies.assign(indices.block_size.x * indices.block_size.y * indices.block_size.z, {});
  shared[0] = {reinterpret_cast<uintptr_t>(dynamic_shared), dynamic_size};
  shared[1] = {reinterpret_cast<uintptr_t>(static_shared), static_size};
  for (int i = 0; i < 2; i++)
    if (cells[i].size() < shared[i].size) cells[i].resize(shared[i].size);
}

void memory_settle() {
  settle();
  accesses = 0;
}

void memory_access(const void* address, size_t size, Access access, const void* caller) {
  check(reinterpret_cast<uintptr_t>(address), size, access, caller ? caller : __builtin_return_address(0));
}

}  // namespace sim

void sim_clear_arguments() { sim::arguments.clear(); }
void sim_add_argument(const char* name, const void* begin, size_t rows, size_t stride, size_t row_size) {
  sim::arguments.push_back({name, reinterpret_cast<uintptr_t>(begin), rows, stride, row_size});
}

// --- The sanitizer interface of the compiler -----------------------------------------------------------------------

using sim::Access;
#define SIM_CHECK(address, size, access) \
  sim::check(reinterpret_cast<uintptr_t>(address), size, access, __builtin_return_address(0))
#define SIM_SIZE(n)                                                                        \
  void __tsan_read##n(void* address) { SIM_CHECK(address, n, Access::kRead); }             \
  void __tsan_write##n(void* address) { SIM_CHECK(address, n, Access::kWrite); }           \
  void __tsan_unaligned_read##n(void* address) { SIM_CHECK(address, n, Access::kRead); }   \
  void __tsan_unaligned_write##n(void* address) { SIM_CHECK(address, n, Access::kWrite); } \
  void __tsan_volatile_read##n(void* address) { SIM_CHECK(address, n, Access::kAtomic); }  \
  void __tsan_volatile_write##n(void* address) { SIM_CHECK(address, n, Access::kAtomic); }
#define SIM_ATOMIC_UPDATE(bits, name, expression)                                               \
  uint##bits##_t __tsan_atomic##bits##_##name(uint##bits##_t* address, uint##bits##_t v, int) { \
    SIM_CHECK(address, bits / 8, Access::kAtomic);                                              \
    uint##bits##_t old = *address;                                                              \
    *address = uint##bits##_t(expression);                                                      \
    return old;                                                                                 \
  }
#define SIM_ATOMIC(bits)                                                                                               \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* address, int) {                                      \
    SIM_CHECK(address, bits / 8, Access::kAtomic);                                                                     \
    return *address;                                                                                                   \
  }                                                                                                                    \
  void __tsan_atomic##bits##_store(uint##bits##_t* address, uint##bits##_t v, int) {                                   \
    SIM_CHECK(address, bits / 8, Access::kAtomic);                                                                     \
    *address = v;                                                                                                      \
  }                                                                                                                    \
  int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* address, uint##bits##_t* expected,                 \
                                                    uint##bits##_t v, int, int) {                                      \
    SIM_CHECK(address, bits / 8, Access::kAtomic);                                                                     \
    uint##bits##_t old = *address;                                                                                     \
    if (old == *expected) return *address = v, 1;                                                                      \
    *expected = old;                                                                                                   \
    return 0;                                                                                                          \
  }                                                                                                                    \
  int __tsan_atomic##bits##_compare_exchange_weak(uint##bits##_t* address, uint##bits##_t* expected, uint##bits##_t v, \
                                                  int a, int b) {                                                      \
    return __tsan_atomic##bits##_compare_exchange_strong(address, expected, v, a, b);                                  \
  }                                                                                                                    \
  SIM_ATOMIC_UPDATE(bits, exchange, v)                                                                                 \
  SIM_ATOMIC_UPDATE(bits, fetch_add, old + v)                                                                          \
  SIM_ATOMIC_UPDATE(bits, fetch_sub, old - v)                                                                          \
  SIM_ATOMIC_UPDATE(bits, fetch_and, old & v)                                                                          \
  SIM_ATOMIC_UPDATE(bits, fetch_or, old | v)                                                                           \
  SIM_ATOMIC_UPDATE(bits, fetch_xor, old ^ v)

namespace {
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment, kind;
};
const char* base_name(const char* file) {
  const char* slash = file ? strrchr(file, '/') : nullptr;
  return slash ? slash + 1 : file ? file : "?";
}
}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}
void __tsan_read_range(void* address, size_t size) { SIM_CHECK(address, size, Access::kRead); }
void __tsan_write_range(void* address, size_t size) { SIM_CHECK(address, size, Access::kWrite); }
SIM_SIZE(1)
SIM_SIZE(2) SIM_SIZE(4) SIM_SIZE(8) SIM_SIZE(16) SIM_ATOMIC(8) SIM_ATOMIC(16) SIM_ATOMIC(32) SIM_ATOMIC(64)

    void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, const void* pointer) {
  uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  // Vector accesses to local arrays are register moves on a GPU.
  if (sim::stacks.holds(reinterpret_cast<uintptr_t>(pointer), 1)) return;
  sim::fail("misaligned address: an access of type %s needs %zu bytes alignment [in %s:%u]", data->type->name,
            size_t(alignment), base_name(data->location.file), data->location.line);
}
struct ArrayBounds {
  SourceLocation location;
  const TypeDescriptor *array, *index;
};
void __ubsan_handle_out_of_bounds(ArrayBounds* data, uintptr_t index) {
  sim::fail("index %zd is out of bounds of a local %s [in %s:%u]", intptr_t(index), data->array->name,
            base_name(data->location.file), data->location.line);
}
struct Shift {
  SourceLocation location;
  const TypeDescriptor *left, *right;
};
void __ubsan_handle_shift_out_of_bounds(Shift* data, uintptr_t, uintptr_t count) {
  sim::fail("shift of %s by %zd [in %s:%u]", data->left->name, intptr_t(count), base_name(data->location.file),
            data->location.line);
}
struct Division {
  SourceLocation location;
  const TypeDescriptor* type;
};
void __ubsan_handle_divrem_overflow(Division* data, uintptr_t, uintptr_t) {
  sim::fail("division by zero of type %s [in %s:%u]", data->type->name, base_name(data->location.file),
            data->location.line);
}
struct FloatCast {
  SourceLocation location;
  const TypeDescriptor *from, *to;
};
void __ubsan_handle_float_cast_overflow(FloatCast* data, uintptr_t) {
  sim::fail("conversion of %s to %s out of range [in %s:%u]", data->from->name, data->to->name,
            base_name(data->location.file), data->location.line);
}
}
