// The scheduler of simulated kernels: fibers, barriers, warp operations, faults. Built once for all kernels.
#include "scheduler.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "memory.h"

namespace sim {

Indices indices;

namespace {

// --- Switching between stacks ---------------------------------------------------------------------------------

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack, its pointer in *save, and continues on the stack `load`.
extern "C" void sim_switch(void** save, void* load);
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch, @function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch, .-sim_switch
)");

struct Context {
  void* stack_pointer = nullptr;
  void prepare(char* low, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(low + size) - 1;  // aligned as after a call, when the entry starts
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Context& other) { sim_switch(&stack_pointer, other.stack_pointer); }
};
#else
}  // namespace
}  // namespace sim
#include <ucontext.h>
namespace sim {
namespace {
struct Context {
  ucontext_t context;
  void prepare(char* low, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};
#endif

// --- State of the running block -------------------------------------------------------------------------------

constexpr size_t kStackSize = 512 << 10;  // the most local memory of a CUDA thread; pages are committed when touched
constexpr size_t kPage = 4096;
constexpr size_t kMaxShared = 227 << 10;  // what a Hopper block can have
constexpr int kMaxThreads = 1024, kBarriers = 16;

enum class State { kReady, kBarrier, kMbarrier, kWarp, kFinished };

struct Thread {
  Context context;
  bool guarded = false;  // an inaccessible page lies below its stack
  State state = State::kReady;
  int barrier = 0;
  const char* file = nullptr;
  int line = 0;
};

struct Barrier {
  int expected = 0;
  int arrived = 0;
  std::vector<int> waiting;
  const char* file = nullptr;
  int line = 0;
};

struct Mbarrier {
  int count, pending;
  long bytes = 0;
  unsigned phase = 0;
  std::vector<int> waiting;
};

Thread threads[kMaxThreads];
char* stacks;  // of all threads, one after another
Barrier barriers[kBarriers];
std::map<unsigned, Mbarrier> mbarriers;  // by address
Visit* visits[kMaxThreads];  // what each waiting lane brought to its warp operation
int num_threads;
int num_finished;
std::vector<int> ready;  // threads that can run, a ring starting at ready_head when the order is fixed
size_t ready_head;
Context launcher;
const Kernel* kernel;
const void* kernel_arguments;
std::vector<char> dynamic_storage;
char* dynamic_base;
size_t dynamic_size;
long seed = -1;
std::mt19937_64 random_order;
std::string error;
bool failed;

Index unflatten(long linear, const Index& size) {
  return {unsigned(linear % size.x), unsigned(linear / size.x % size.y), unsigned(linear / size.x / size.y)};
}

int take_ready() {
  if (seed < 0) return ready[ready_head++];
  std::swap(ready[ready_head + random_order() % (ready.size() - ready_head)], ready[ready_head]);
  return ready[ready_head++];
}

void make_ready(int t) {
  threads[t].state = State::kReady;
  if (ready_head > 4096) {
    ready.erase(ready.begin(), ready.begin() + ready_head);
    ready_head = 0;
  }
  ready.push_back(t);
}

void enter(int t) {
  indices.linear = t;
  indices.thread = unflatten(t, indices.block_size);
}

std::string ranges(const std::vector<int>& sorted) {
  std::string text;
  for (size_t i = 0; i < sorted.size();) {
    size_t j = i;
    while (j + 1 < sorted.size() && sorted[j + 1] == sorted[j] + 1) j++;
    if (!text.empty()) text += ",";
    text += std::to_string(sorted[i]);
    if (j > i) text += "-" + std::to_string(sorted[j]);
    i = j + 1;
  }
  return text;
}

std::string place(const char* file, int line) {
  const char* slash = file ? strrchr(file, '/') : nullptr;
  return std::string(slash ? slash + 1 : file ? file : "?") + ":" + std::to_string(line);
}

// What every thread waits for, when none can run.
std::string deadlock() {
  std::map<std::tuple<int, int, std::string>, std::vector<int>> groups;
  for (int t = 0; t < num_threads; t++) {
    const Thread& w = threads[t];
    bool waits = w.state != State::kReady && w.state != State::kFinished;
    int barrier = w.state == State::kBarrier ? w.barrier : 0;
    groups[{int(w.state), barrier, waits ? place(w.file, w.line) : ""}].push_back(t);
  }
  std::string text = "deadlock:";
  for (const auto& [key, members] : groups) {
    const auto& [state, barrier, where] = key;
    text += text.back() == ':' ? " " : "; ";
    text += "threads " + ranges(members);
    if (State(state) == State::kBarrier)
      text += (barrier ? " wait at barrier " + std::to_string(barrier) : std::string(" wait at __syncthreads")) + " (" +
              where + ")";
    else if (State(state) == State::kMbarrier)
      text += " wait at an mbarrier (" + where + ")";
    else if (State(state) == State::kWarp)
      text += " wait for lanes of their warp (" + where + ")";
    else
      text += " have finished";
  }
  return text;
}

// The calling thread stops; the next ready one continues.
void next() {
  memory_settle();
  Context& self = threads[indices.linear].context;
  if (ready_head == ready.size()) {
    if (num_finished == num_threads) self.switch_to(launcher);
    std::string text = deadlock();
    failed = true;
    error = text;
    self.switch_to(launcher);
  }
  int t = take_ready();
  if (t == indices.linear) return;
  enter(t);
  self.switch_to(threads[t].context);
}

void wait(State state, const char* file, int line) {
  Thread& self = threads[indices.linear];
  self.state = state;
  self.file = file;
  self.line = line;
  next();
}

void thread_entry() {
  kernel->body(kernel_arguments);
  memory_settle();
  threads[indices.linear].state = State::kFinished;
  num_finished++;
  next();
  __builtin_unreachable();
}

Barrier& arrive(int id, int count, const char* file, int line) {
  if (id < 0 || id >= kBarriers) fail("barrier %d does not exist (%s)", id, place(file, line).c_str());
  Barrier& barrier = barriers[id];
  bool whole = count == 0;
  if (whole) count = num_threads;
  if (count < 1 || count > num_threads || count % 32 && !whole)
    fail("barrier %d for %d of %d threads (%s)", id, count, num_threads, place(file, line).c_str());
  if (barrier.arrived == 0) {
    barrier.expected = count;
    barrier.file = file;
    barrier.line = line;
  } else if (barrier.expected != count) {
    fail("threads meet at barrier %d with different counts, %d (%s) and %d (%s)", id, barrier.expected,
         place(barrier.file, barrier.line).c_str(), count, place(file, line).c_str());
  } else if (whole && (barrier.line != line || strcmp(barrier.file, file) != 0)) {
    fail("barrier divergence: threads wait at different __syncthreads (%s, %s)",
         place(barrier.file, barrier.line).c_str(), place(file, line).c_str());
  }
  memory_settle();
  if (++barrier.arrived == barrier.expected) {
    block_epoch++;
    for (int t : barrier.waiting) make_ready(t);
    barrier.waiting.clear();
    barrier.arrived = 0;
  }
  return barrier;
}

Mbarrier& mbarrier_at(unsigned address) {
  auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("no mbarrier was initialised at shared address %u", address);
  return found->second;
}

// Ends the phase if nothing is missing. That orders memory accesses as a barrier of the block does.
void end_phase(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  block_epoch++;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  for (int t : barrier.waiting) make_ready(t);
  barrier.waiting.clear();
}

void run_block() {
  int n = num_threads;
  for (Barrier& barrier : barriers) {
    barrier.arrived = 0;
    barrier.waiting.clear();
  }
  mbarriers.clear();
  memset(visits, 0, sizeof(visits));
  // A NaN pattern, so that reads before writes become visible.
  memset(dynamic_storage.data(), 0xff, dynamic_storage.size());
  memset(kernel->static_shared_begin, 0xff, kernel->static_shared_end - kernel->static_shared_begin);
  memory_begin_block(dynamic_base, dynamic_size, kernel->static_shared_begin,
                     kernel->static_shared_end - kernel->static_shared_begin);
  ready.clear();
  ready_head = 0;
  num_finished = 0;
  for (int t = 0; t < n; t++) {
    Thread& self = threads[t];
    char* stack = stacks + t * kStackSize;
    if (!self.guarded) self.guarded = mprotect(stack, kPage, PROT_NONE) == 0;
    self.context.prepare(stack, kStackSize, thread_entry);
    make_ready(t);
  }
  int first = take_ready();
  enter(first);
  launcher.switch_to(threads[first].context);
}

}  // namespace

void fail(const char* format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof(text), format, list);
  va_end(list);
  char where[128];
  snprintf(where, sizeof(where), "block (%u,%u,%u) thread (%u,%u,%u): ", indices.block.x, indices.block.y,
           indices.block.z, indices.thread.x, indices.thread.y, indices.thread.z);
  error = std::string(where) + text;
  failed = true;
  threads[indices.linear].context.switch_to(launcher);  // the abandoned fibers are never resumed
  __builtin_unreachable();
}

void barrier_wait(int id, int count, const char* file, int line) {
  Barrier& barrier = arrive(id, count, file, line);
  if (barrier.arrived == 0) return;  // the last to come
  barrier.waiting.push_back(indices.linear);
  threads[indices.linear].barrier = id;
  wait(State::kBarrier, file, line);
}

void barrier_arrive(int id, int count, const char* file, int line) { arrive(id, count, file, line); }

void mbarrier_init(unsigned address, int count) { mbarriers[address] = {count, count}; }

void mbarrier_arrive(unsigned address, int expected_bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  memory_settle();
  if (barrier.pending == 0) fail("more threads arrive at the mbarrier at shared address %u than it has room for", address);
  barrier.pending--;
  barrier.bytes += expected_bytes;
  end_phase(barrier);
}

void mbarrier_complete(unsigned address, int bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  memory_settle();
  barrier.bytes -= bytes;
  end_phase(barrier);
}

void mbarrier_wait(unsigned address, unsigned parity, const char* file, int line) {
  Mbarrier& barrier = mbarrier_at(address);
  while (barrier.phase == parity) {
    barrier.waiting.push_back(indices.linear);
    wait(State::kMbarrier, file, line);
  }
}

void warp_wait(Visit& visit) {
  int first = indices.linear & ~31, lanes = num_threads - first < 32 ? num_threads - first : 32;
  unsigned mask = visit.mask & (lanes == 32 ? ~0u : (1u << lanes) - 1);
  if (!(mask >> lane() & 1))
    fail("the mask %#x of a warp operation leaves out its own lane (%s)", visit.mask,
         place(visit.file, visit.line).c_str());
  visits[indices.linear] = &visit;
  for (int i = 0; i < lanes; i++)
    if (mask >> i & 1) {
      const Visit* other = visits[first + i];
      if (!other) {
        threads[indices.linear].barrier = 0;
        return wait(State::kWarp, visit.file, visit.line);
      }
      if (other->resolve != visit.resolve || other->mask != visit.mask || other->line != visit.line)
        fail("lanes of a warp meet in different operations (%s with mask %#x, %s with mask %#x)",
             place(other->file, other->line).c_str(), other->mask, place(visit.file, visit.line).c_str(), visit.mask);
    }
  Visit* members[32] = {};
  for (int i = 0; i < lanes; i++)
    if (mask >> i & 1) members[i] = visits[first + i];
  memory_settle();
  if (visit.resolve)
    visit.resolve(members);
  else
    warp_epoch[indices.linear / 32]++;  // of the warp operations, only __syncwarp orders memory accesses
  for (int i = 0; i < lanes; i++)
    if (mask >> i & 1) {
      visits[first + i] = nullptr;
      if (first + i != indices.linear) make_ready(first + i);
    }
}

void yield() {
  make_ready(indices.linear);
  next();
}

void* dynamic_shared() { return dynamic_base; }

// Static shared memory is addressed from kStaticAddress on, dynamic shared memory from 0 on.
constexpr unsigned kStaticAddress = 1u << 24;

unsigned shared_address(const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  if (p >= dynamic_base && p <= dynamic_base + dynamic_size) return unsigned(p - dynamic_base);
  if (p >= kernel->static_shared_begin && p <= kernel->static_shared_end)
    return kStaticAddress + unsigned(p - kernel->static_shared_begin);
  fail("a pointer outside shared memory is used as a shared address");
}

void* shared_pointer(unsigned address) {
  return address >= kStaticAddress ? kernel->static_shared_begin + (address - kStaticAddress) : dynamic_base + address;
}

int launch(const Kernel& k, const LaunchSize& size, const void* arguments) {
  failed = false;
  error.clear();
  long blocks = size.grid[0] * size.grid[1] * size.grid[2], n = size.block[0] * size.block[1] * size.block[2];
  auto refuse = [&](const std::string& text) {
    error = std::string(k.name) + ": " + text;
    return -1;
  };
  if (blocks <= 0 || size.grid[1] > 65535 || size.grid[2] > 65535 || size.grid[0] > 0x7fffffff)
    return refuse("invalid grid " + std::to_string(size.grid[0]) + "x" + std::to_string(size.grid[1]) + "x" +
                  std::to_string(size.grid[2]));
  if (n < 1 || n > kMaxThreads) return refuse(std::to_string(n) + " threads in a block");
  size_t fixed = k.static_shared_end - k.static_shared_begin;
  if (size.dynamic_shared + fixed > kMaxShared)
    return refuse(std::to_string(size.dynamic_shared + fixed) + " bytes of shared memory");
  if (!stacks) {
    void* memory = mmap(nullptr, kMaxThreads * kStackSize, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return refuse("no address space for the stacks of the threads");
    stacks = static_cast<char*>(memory);
  }
  kernel = &k;
  kernel_arguments = arguments;
  num_threads = int(n);
  indices.grid_size = {unsigned(size.grid[0]), unsigned(size.grid[1]), unsigned(size.grid[2])};
  indices.block_size = {unsigned(size.block[0]), unsigned(size.block[1]), unsigned(size.block[2])};
  dynamic_size = size.dynamic_shared;
  dynamic_storage.resize(dynamic_size + 1024);
  dynamic_base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(dynamic_storage.data()) + 1023) & ~uintptr_t(1023));
  memory_begin_launch(stacks, kMaxThreads * kStackSize, k.image_begin, k.image_end - k.image_begin);
  std::vector<long> order(blocks);
  for (long b = 0; b < blocks; b++) order[b] = b;
  if (seed >= 0) {
    random_order.seed(seed);
    for (long b = blocks - 1; b > 0; b--) std::swap(order[b], order[random_order() % (b + 1)]);
  }
  for (long b : order) {
    indices.block = unflatten(b, indices.grid_size);
    run_block();
    if (failed) break;
  }
  memory_end_launch();
  return failed ? refuse(error) : 0;
}

}  // namespace sim

void sim_configure(long seed) { sim::seed = seed; }
const char* sim_error() { return sim::error.c_str(); }
void sim_set_error(const char* kind, const char* message) { sim::error = std::string(kind) + ": " + message; }
