// FP8 activations x FP4 weights, grouped by expert. The layout of the weights stands in tiles.py.
//
// The transposed product: weights are the A operand of wgmma (64 rows), converted in registers; activations its N. Two
// warp groups multiply, further warps load.
#include <cuda_bf16.h>

#include <cstdint>

namespace fp4 {

constexpr int TILE = 4352;        // bytes of 64 rows x 128 of k: 4096 of codes, 256 of exponents
constexpr int MULTIPLIERS = 256;  // threads
constexpr int ROW = 144;          // bytes of a row of results in shared memory: 64 bf16, and 16 so that banks differ
constexpr int PAIRED = 72;  // so many columns at most

// --- Instructions -------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t shared_of(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Once the copies that this thread has started are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
#pragma unroll 1
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy(uint32_t to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(16) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void group_sync(int group) {
  if (group)
    asm volatile("bar.sync %0, %1;" ::"n"(2), "n"(128) : "memory");
  else
    asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(128) : "memory");
}
__device__ __forceinline__ uint4 load_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_words(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(uint32_t at, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Keeps the compiler from moving what touches these registers across.
template <int R>
__device__ __forceinline__ void hold(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void hold(uint32_t (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
// k-major, 128-byte swizzle, 8 rows = 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int step) {
  return uint64_t((address >> 4) + 2 * step) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// --- From FP4 to e5m2 ---------------------------------------------------------------------------------------------
// Opaque to the compiler, which would make two masks of one.
__device__ __forceinline__ uint32_t magnitudes(uint32_t w) {
  uint32_t m;
  asm("and.b32 %0, %1, 0x77777777;" : "=r"(m) : "r"(w));
  return m;
}
__device__ __forceinline__ uint32_t look_up(uint32_t low, uint32_t high, uint32_t m) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(m));
  return v;
}
// 64 codes of a thread, rows g and g + 8, to e5m2 in the order of the A fragments of four k = 32 steps. The eight
// magnitudes times the scale of a row and step are a table of two words.
__device__ __forceinline__ void convert(uint32_t codes, uint32_t exponents, uint32_t (&a)[16]) {
  const uint2 both = load_words(exponents);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 raw = load_16(codes + 2048 * r);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t e = look_up(r ? both.y : both.x, 0, 0x4440 + s), w = words[s], m = magnitudes(w);
      const uint32_t low = 0x0A080400u + e * 0x04040400u, high = 0x12100E0Cu + e * 0x04040404u;
      a[4 * s + r] = look_up(low, high, m) | (w & 0x80808080u);
      a[4 * s + 2 + r] = look_up(low, high, m >> 16) | ((w << 4) & 0x80808080u);
    }
  }
}

// Given by grouped_gemm_fp8_fp4.py.

// --- The kernel ---------------------------------------------------------------------------------------------------
struct Operands {
  const uint8_t* x;   // [rows, k]
  const float* x_sf;  // by columns
  const uint8_t* w;   // [experts, m / 64, k / 128, TILE]
  const float* w_sf;  // [experts, m]
  const int *start, *count;
  __nv_bfloat16* out;  // [rows, m]
  int rows, experts, m, slices;
  int64_t sf_stride;
};

template <int WIDTH, int STEP, int SUBTILES, int STAGES, int LOADERS>
struct Kernel {
  static constexpr int LEAST = WIDTH / 3;  // columns of the narrowest product
  static constexpr int X = WIDTH * 128, W = 2 * SUBTILES * TILE, SF = WIDTH * 4;
  // A stage: activations, weights, scales of the activations, which tile begins with it, and its barriers.
  static constexpr int TASK = X + W + SF, FULL = TASK + 8, EMPTY = TASK + 16, STAGE = (TASK + 24 + 1023) / 1024 * 1024;
  static constexpr int STAGING = STAGES * STAGE, PARTS = STAGING + 2 * WIDTH * ROW;
  static constexpr int BYTES = PARTS + (3 * MAX_EXPERTS + 2) * 4;

  const Operands& p;
  uint8_t* const shared;
  const uint32_t base;
  int* const parts;        // [experts + 1]: tiles beside each other of all experts before
  int2* const regions;     // [experts]: first row, rows

  __device__ __forceinline__ Kernel(const Operands& p, uint8_t* shared)
      : p(p),
        shared(shared),
        base(shared_of(shared)),
        parts(reinterpret_cast<int*>(shared + PARTS + 2 * MAX_EXPERTS * 4)),
        regions(reinterpret_cast<int2*>(shared + PARTS)) {}

  // How the rows of every expert are divided into tiles.
  __device__ __forceinline__ void divide() {
    for (int e = threadIdx.x; e < p.experts; e += MULTIPLIERS + LOADERS) {
      const int first = min(max(p.start[e], 0), p.rows), rows = min(max(p.count[e], 0), p.rows - first);
      regions[e] = make_int2(first, rows);
      parts[e + 1] = (rows + WIDTH - 1) / WIDTH;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int before = 0;
      for (int e = threadIdx.x; e < (p.experts + 31) / 32 * 32; e += 32) {
        int sum = e < p.experts ? parts[e + 1] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int left = __shfl_up_sync(0xffffffffu, sum, step);
          if (int(threadIdx.x) >= step) sum += left;
        }
        sum += before;
        if (e < p.experts) parts[e + 1] = sum;
        before = __shfl_sync(0xffffffffu, sum, 31);
      }
      if (threadIdx.x == 0) parts[0] = 0;
    }
    __syncthreads();
  }

  // Expert, first row, rows and block of weights of a tile. Tiles with the same weights follow each other.
  __device__ __forceinline__ int4 tile(int i, int blocks_of_weights) const {
    const int at = i / blocks_of_weights;
    int low = 0, high = p.experts;  // parts[low] <= at < parts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (parts[middle] <= at)
        low = middle;
      else
        high = middle;
    }
    const int2 region = regions[low];
    const int before = parts[low], beside = parts[low + 1] - before, rest = i - before * blocks_of_weights;
    const int each = (region.y + beside - 1) / beside, part = rest % beside;
    return make_int4(low, region.x + part * each, min(each, region.y - part * each), rest / beside);
  }

  __device__ __forceinline__ void load() {
    const int t = threadIdx.x - MULTIPLIERS;
    const int blocks_of_weights = p.m / (128 * SUBTILES), tiles = parts[p.experts] * blocks_of_weights;
    // A thread copies 16 bytes of several rows; the pieces of a row are swizzled.
    constexpr int ROWS = LOADERS / 8, PERIOD = ROWS < 8 ? 8 / ROWS : 1;
    static_assert(WIDTH <= LOADERS && WIDTH % 8 == 0);
    const int row = t / 8;
    uint32_t place[PERIOD];
#pragma unroll
    for (int j = 0; j < PERIOD; ++j) place[j] = (row + j * ROWS) * 128 + (t ^ row + j * ROWS) % 8 * 16;
    const int k = p.slices * 128;
    int stage = 0;
    uint32_t phase = 1;
    for (int i = blockIdx.x;; i += gridDim.x) {
      int4 task = make_int4(0, 0, 0, 0);
      if (i < tiles) task = tile(i, blocks_of_weights);
      const uint8_t* w = p.w + (size_t(task.x) * (p.m / 64) + size_t(task.w) * 2 * SUBTILES) * p.slices * TILE;
      const uint8_t* x = p.x + size_t(task.y + row) * k + t % 8 * 16;
      const float* sf = p.x_sf + task.y + t;
      for (int slice = 0; slice < (i < tiles ? p.slices : 1); ++slice) {
        const uint32_t at = base + stage * STAGE, barrier = at + FULL;
        barrier_wait(at + EMPTY, phase);
        if (t == 0) {
          if (slice == 0) store_words(at + TASK, task.x << 20 | task.w << 8 | task.z, task.y);
          if (i < tiles) {
            barrier_arrive_expecting(barrier, W);
#pragma unroll
            for (int j = 0; j < 2 * SUBTILES; ++j)
              copy_bulk(at + X + j * TILE, w + (size_t(j) * p.slices + slice) * TILE, TILE, barrier);
          } else {
            barrier_arrive(barrier);
          }
        }
        const uint8_t* from = x;
#pragma unroll
        for (int j = 0; j < (WIDTH + ROWS - 1) / ROWS; ++j, from += ROWS * k)
          if (row + j * ROWS < task.z) copy<16>(at + place[j % PERIOD] + j / PERIOD * PERIOD * ROWS * 128, from);
        x += 128;
        if (t < task.z) copy<4>(at + X + W + t * 4, sf);
        sf += p.sf_stride;
        barrier_arrive_after_copies(barrier);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      if (i >= tiles) break;
    }
  }

  // What a multiplying thread keeps from tile to tile.
  struct Reader {
    int t;                          // in its group
    uint32_t codes, exponents, sf;  // offsets in a stage
    bool apart;                     // always: a block of its own, or ptxas sinks the conversion behind the wait
    int stage = 0;                  // the next to wait for
    uint32_t phase = 0;
    uint32_t now, then;  // addresses of stages
  };
  // Of a tile: expert and block of weights, first row, rows.
  struct Task {
    uint32_t packed, first;
    __device__ __forceinline__ int expert() const { return packed >> 20; }
    __device__ __forceinline__ int block() const { return packed >> 8 & 0xfff; }
    __device__ __forceinline__ int rows() const { return packed & 0xff; }
  };

  __device__ __forceinline__ void take(Reader& r) {
    r.then = base + r.stage * STAGE;
    barrier_wait(r.then + FULL, r.phase);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the words of activations are read by wgmma
    if (++r.stage == STAGES) r.stage = 0, r.phase ^= 1;
  }
  __device__ __forceinline__ void release(Reader& r) {
    __syncwarp();
    if (r.t % 32 == 0) barrier_arrive(r.now + EMPTY);
    r.now = r.then;
  }
  __device__ __forceinline__ void lift(const Reader& r, uint32_t at, int sub, uint32_t (&a)[16]) {
    convert(at + r.codes + sub * TILE, at + r.exponents + sub * TILE, a);
    hold(a);
  }

  __device__ __forceinline__ void multiply() {
    Reader r;
    const int group = threadIdx.x / 128;
    r.t = threadIdx.x % 128;
    r.codes = X + group * SUBTILES * TILE + 16 * r.t, r.exponents = X + group * SUBTILES * TILE + 4096 + r.t / 4 * 8;
    r.sf = X + W + 8 * (r.t % 4);
    asm volatile("" : "+r"(r.codes), "+r"(r.exponents), "+r"(r.sf));
    r.apart = p.m != 0;
    for (;;) {
      take(r);
      r.now = r.then;
      const uint2 words = load_words(r.now + TASK);
      const Task task{words.x, words.y};
      if (task.rows() == 0) break;
      narrowest<WIDTH>(r, task);
    }
  }

  // The product in the fewest columns that hold the rows.
  template <int N>
  __device__ __forceinline__ void narrowest(Reader& r, const Task& task) {
    if constexpr (STEP > 0 && N - STEP >= LEAST) {
      if (task.rows() <= N - STEP) return narrowest<N - STEP>(r, task);
    }
    if constexpr (SUBTILES == 1)
      product<N>(r, task);
    else if constexpr (N > PAIRED)
      product_in_turn<N>(r, task);
    else
      product_of_two<N>(r, task);
  }

  template <int N>
  __device__ __forceinline__ void start(uint32_t at, float (&part)[N / 2], uint32_t (&a)[16]) {
    hold(part);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; ++s)
      wgmma(part, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3], descriptor(at, s), s > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    hold(part);
  }
  // The scales of the activations for the columns of a thread.
  template <int N>
  __device__ __forceinline__ void load_scales(const Reader& r, float2 (&f)[N / 8]) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) f[j] = load_pair(r.now + r.sf + 32 * j);
  }
  template <int N>
  __device__ __forceinline__ void add_up(const float2 (&f)[N / 8], float (&part)[N / 2], float (&sum)[N / 2]) {
    hold(part);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      sum[4 * j] = __fmaf_rn(part[4 * j], f[j].x, sum[4 * j]);
      sum[4 * j + 1] = __fmaf_rn(part[4 * j + 1], f[j].y, sum[4 * j + 1]);
      sum[4 * j + 2] = __fmaf_rn(part[4 * j + 2], f[j].x, sum[4 * j + 2]);
      sum[4 * j + 3] = __fmaf_rn(part[4 * j + 3], f[j].y, sum[4 * j + 3]);
    }
  }

  // Few columns: reading weights is what takes time.
  template <int N>
  __device__ __forceinline__ void product(Reader& r, const Task& task) {
    float sum[N / 2], part[N / 2];
    float2 f[N / 8];
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sum[j] = 0;
    uint32_t a0[16], a1[16];
    lift(r, r.now, 0, a0);
    for (int slice = 1;; slice += 2) {
      start<N>(r.now, part, a0);
      if (slice < p.slices) {
        take(r);
        lift(r, r.then, 0, a1);
      }
      load_scales<N>(r, f);
      wait_for_products<0>();
      add_up<N>(f, part, sum);
      release(r);
      if (slice >= p.slices) break;
      start<N>(r.now, part, a1);
      if (slice + 1 < p.slices) {
        take(r);
        lift(r, r.then, 0, a0);
      }
      load_scales<N>(r, f);
      wait_for_products<0>();
      add_up<N>(f, part, sum);
      release(r);
      if (slice + 1 >= p.slices) break;
    }
    store<N>(sum, task, 0);
  }

  // Many columns: registers do not suffice for two products at a time.
  template <int N>
  __device__ __forceinline__ void product_in_turn(Reader& r, const Task& task) {
    float sum[2][N / 2], part[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sum[0][j] = sum[1][j] = 0;
    uint32_t a0[16], a1[16];
    auto finish = [&](float(&d)[N / 2]) {
      if constexpr (N <= 96) {
        float2 f[N / 8];
        load_scales<N>(r, f);
        wait_for_products<0>();
        add_up<N>(f, part, d);
      } else {
        wait_for_products<0>();
        hold(part);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          const float2 f = load_pair(r.now + r.sf + 32 * j);
          d[4 * j] = __fmaf_rn(part[4 * j], f.x, d[4 * j]);
          d[4 * j + 1] = __fmaf_rn(part[4 * j + 1], f.y, d[4 * j + 1]);
          d[4 * j + 2] = __fmaf_rn(part[4 * j + 2], f.x, d[4 * j + 2]);
          d[4 * j + 3] = __fmaf_rn(part[4 * j + 3], f.y, d[4 * j + 3]);
        }
      }
    };
    lift(r, r.now, 0, a0);
    for (int slice = 1; slice <= p.slices; ++slice) {
      start<N>(r.now, part, a0);
      if (r.apart) lift(r, r.now, 1, a1);
      finish(sum[0]);
      start<N>(r.now, part, a1);
      if (slice < p.slices) {
        take(r);
        lift(r, r.then, 0, a0);
      }
      finish(sum[1]);
      release(r);
    }
    store<N>(sum[0], task, 0);
    store<N>(sum[1], task, 1);
  }

  // Two products are under way at a time: while the sums of one are scaled, the tensor cores have the next. Not beyond
  // COUNT slices: the assembler sees that the registers differ in straight code only.
  template <int N, int COUNT>
  __device__ __forceinline__ void slices(Reader& r, bool more, float (&sum)[2][N / 2], float (&part)[2][N / 2],
                                         uint32_t (&a0)[16], uint32_t (&a1)[16]) {
    start<N>(r.now, part[0], a0);
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      float2 f[N / 8];
      if (r.apart) lift(r, r.now, 1, a1);
      start<N>(r.now, part[1], a1);
      load_scales<N>(r, f);
      wait_for_products<1>();
      add_up<N>(f, part[0], sum[0]);
      if (c < COUNT - 1 || more) {
        take(r);
        lift(r, r.then, 0, a0);
      }
      if (c < COUNT - 1) {
        start<N>(r.then, part[0], a0);
        wait_for_products<1>();
      } else {
        wait_for_products<0>();
      }
      add_up<N>(f, part[1], sum[1]);
      release(r);
    }
  }

  template <int N>
  __device__ __forceinline__ void product_of_two(Reader& r, const Task& task) {
    float sum[2][N / 2], part[2][N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sum[0][j] = sum[1][j] = 0;
    uint32_t a0[16], a1[16];
    lift(r, r.now, 0, a0);
    int slice = p.slices % 2;
    if (slice) slices<N, 1>(r, p.slices > 1, sum, part, a0, a1);
    for (; slice < p.slices; slice += 2) slices<N, 2>(r, slice + 2 < p.slices, sum, part, a0, a1);
    store<N>(sum[0], task, 0);
    store<N>(sum[1], task, 1);
  }

  // 64 columns of results.
  template <int N>
  __device__ __forceinline__ void store(const float (&sum)[N / 2], const Task& task, int subtile) {
    int t = threadIdx.x;
    asm volatile("" : "+r"(t));  // addresses are made here, not kept in registers throughout
    const int group = t / 128, lane = t % 32, warp = t % 128 / 32, matrix = lane / 8;
    const int column = ((task.block() * 2 + group) * SUBTILES + subtile) * 64, rows = task.rows();
    const float* sf = p.w_sf + size_t(task.expert()) * p.m + column;
    __nv_bfloat16* out = p.out + size_t(task.first) * p.m + column;
    uint8_t* mine = shared + STAGING + group * WIDTH * ROW;
    const float f0 = sf[16 * warp + lane / 4], f1 = sf[16 * warp + lane / 4 + 8];
    uint32_t v[N / 4];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float f = j % 2 ? f1 : f0;
      const __nv_bfloat162 h = __floats2bfloat162_rn(sum[2 * j] * f, sum[2 * j + 1] * f);
      v[j] = *reinterpret_cast<const uint32_t*>(&h);
    }
    const uint32_t row = shared_of(mine) + lane % 8 * ROW + (16 * warp + 8 * (matrix % 2)) * 2;
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row + 8 * (j + matrix / 2) * ROW),
                   "r"(v[2 * j]), "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                   : "memory");
    if constexpr (N / 8 % 2)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row + (N - 8) * ROW),
                   "r"(v[N / 4 - 2]), "r"(v[N / 4 - 1])
                   : "memory");
    group_sync(group);
    for (int j = t % 128; j < 8 * rows; j += 128)
      *reinterpret_cast<uint4*>(out + size_t(j / 8) * p.m + j % 8 * 8) =
          *reinterpret_cast<const uint4*>(mine + j / 8 * ROW + j % 8 * 16);
    group_sync(group);
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) {
        barrier_init(base + i * STAGE + FULL, LOADERS + 1);
        barrier_init(base + i * STAGE + EMPTY, MULTIPLIERS / 32);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    divide();
    if (threadIdx.x >= MULTIPLIERS) {
      if constexpr (LOADERS == 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      load();
    } else {
      if constexpr (LOADERS == 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }
};

template <int WIDTH, int STEP, int SUBTILES, int STAGES, int LOADERS>
__device__ __forceinline__ void run(void* shared, const void* x, const void* x_sf, const void* w, const void* w_sf,
                                    const void* start, const void* count, const void* out, int64_t rows, int64_t experts,
                                    int64_t m, int64_t slices, int64_t sf_stride) {
  const Operands p{static_cast<const uint8_t*>(x),
                   static_cast<const float*>(x_sf),
                   static_cast<const uint8_t*>(w),
                   static_cast<const float*>(w_sf),
                   static_cast<const int*>(start),
                   static_cast<const int*>(count),
                   static_cast<__nv_bfloat16*>(const_cast<void*>(out)),
                   int(rows),
                   int(experts),
                   int(m),
                   int(slices),
                   sf_stride};
  Kernel<WIDTH, STEP, SUBTILES, STAGES, LOADERS>(p, static_cast<uint8_t*>(shared)).run();
}

}  // namespace fp4
