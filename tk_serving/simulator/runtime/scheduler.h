// Interface between simulated kernels and the scheduler that runs their threads.
//
// One fiber stands for one CUDA thread. The threads of a block take turns on one CPU thread and change over only
// where they wait for each other; blocks run one after another. A fault ends the launch with a message.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sim {

struct Index {
  unsigned x, y, z;
};

// Of the running thread; kernels read them as threadIdx and so on.
struct Indices {
  Index thread, block, block_size, grid_size;
  int linear;  // index of the thread in its block
};
extern Indices indices;

inline int lane() { return indices.linear & 31; }

// Ends the launch: the message reaches Python with the kernel, block and thread in front.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// bar.sync: waits until `count` threads have arrived at barrier `id`; count 0 means the whole block.
void barrier_wait(int id, int count, const char* file, int line);
// bar.arrive: counts as an arrival without waiting.
void barrier_arrive(int id, int count, const char* file, int line);

// mbarrier: a phase ends when all arrivals and bytes that it waits for have come; `parity` names the phase.
void mbarrier_init(unsigned address, int count);
void mbarrier_arrive(unsigned address, int expected_bytes);
void mbarrier_complete(unsigned address, int bytes);
void mbarrier_wait(unsigned address, unsigned parity, const char* file, int line);

// A warp-wide operation: each lane brings a Visit; once all lanes of the mask have come, `resolve` computes every
// lane's result from the values of all (lanes[i] is null for lanes outside the mask).
struct Visit {
  void (*resolve)(Visit* const* lanes);
  unsigned mask;
  const char* file;
  int line;
  const void* value;
  void* result;
  int source;
};
void warp_wait(Visit& visit);

// Lets other threads run: for loops that wait for memory to change.
void yield();

// Dynamic shared memory of the running block, and 32-bit addresses within shared memory.
void* dynamic_shared();
unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address);

struct Kernel {
  const char* name;
  void (*body)(const void* arguments);
  // Tags of the launch parameters that follow the kernel's own arguments: 0-2 grid axes, 3-5 block axes,
  // s bytes of dynamic shared memory, o others.
  const char* launch_tags;
  int num_arguments;
  // Of the library that holds the kernel: statically declared shared memory, and the whole image (constants).
  char *static_shared_begin, *static_shared_end;
  const char *image_begin, *image_end;
};

struct LaunchSize {
  long grid[3], block[3], dynamic_shared;
};

// Runs a kernel to its end; 0, or -1 after a fault (message by sim_error).
int launch(const Kernel& kernel, const LaunchSize& size, const void* arguments);

}  // namespace sim

extern "C" {
// Options of the following launches: seed < 0 keeps the order of threads and blocks.
void sim_configure(long seed);
// Message of the last fault in this process.
const char* sim_error();
void sim_set_error(const char* kind, const char* message);
}
