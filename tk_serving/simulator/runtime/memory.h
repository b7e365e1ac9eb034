// What simulated kernels may touch: every memory access of a kernel is checked before it happens.
//
// The compiler's sanitizer instrumentation calls the functions of memory.cpp: accesses outside the launch's arguments,
// shared memory and the thread's own stack, misaligned vector accesses, and shared-memory accesses of two threads that
// no barrier orders are faults.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sim {

// Two accesses of different threads are ordered if a barrier of the block, or a warp operation of their common warp,
// lies between them; these counters tell.
extern uint32_t block_epoch, warp_epoch[32];

// Checks apply between the begin and the end of a launch.
void memory_begin_launch(char* stacks, size_t stacks_size, const char* image, size_t image_size);
void memory_end_launch();
void memory_begin_block(char* dynamic_shared, size_t dynamic_size, char* static_shared, size_t static_size);
// Before the running thread changes: its last store has happened.
void memory_settle();

// An access by means other than a plain load or store of the kernel.
enum class Access { kRead, kWrite, kAtomic };
void memory_access(const void* address, size_t size, Access access, const void* caller = nullptr);

// cp.async: the first `bytes` of `size` bytes from global memory, zeros for the rest. They arrive when the thread waits
// for the group that the copy was committed to; until then shared memory keeps its old content.
void copy_async(unsigned shared, const void* global, int size, int bytes);
inline void copy_async(unsigned shared, const void* global, int size) { copy_async(shared, global, size, size); }
void copy_commit();
// Waits until at most `groups` of the committed groups are on their way.
void copy_wait(unsigned groups);
void copy_wait_all();

// cp.async.bulk: the bytes are there at once, and counted at the mbarrier.
void copy_bulk(unsigned shared, const void* global, int size, unsigned mbarrier);

}  // namespace sim

extern "C" {
// The arguments of the next launch: `rows` rows of `row_size` bytes, `stride` bytes apart.
void sim_clear_arguments();
void sim_add_argument(const char* name, const void* begin, size_t rows, size_t stride, size_t row_size);
}
