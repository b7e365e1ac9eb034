// FP8 activations x FP4 weights, grouped by expert: an experiment, see README.md. The layouts stand in layouts.py.
// The transposed product: weights are the A operand of wgmma (64 rows), tokens its N. Two warp groups multiply, one warp loads.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "wgmma.h"

constexpr int WB = 4352;  // 64 rows x 128 of k: 4096 bytes of codes, 256 of scales

enum Kind { CONVERTED_IN_SHARED, IN_REGISTERS, NO_LOOKUP };  // variants A, B and B without the conversion

struct Params {
  const uint8_t* w;
  const float* sf;    // [k / 128][sf_stride]
  const float* wref;  // [experts][n_out]
  __nv_bfloat16* out;
  const int4* tiles;  // expert, first row, rows, block of weights
  int num_tiles, kb, sf_stride, n_out, one;
};

__device__ __forceinline__ uint32_t shared_of(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint64_t* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_of(b)), "r"(n));
}
__device__ __forceinline__ void bar_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_of(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t* b, uint32_t parity) {
  uint32_t done = 0;
  long long since = 0;
#pragma unroll 1
  for (;;) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_of(b)), "r"(parity)
        : "memory");
    if (done) return;
    if (!since)
      since = clock64();
    else if (clock64() - since > 1500000000ll)
      __trap();  // a mistake must not hang the device
  }
}
__device__ __forceinline__ void bulk(void* dst, const void* src, int bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_of(dst)),
               "l"(src), "r"(bytes), "r"(shared_of(b))
               : "memory");
}
__device__ __forceinline__ void tma(void* dst, const CUtensorMap* map, int x, int y, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_of(dst)),
      "l"(map), "r"(x), "r"(y), "r"(shared_of(b))
      : "memory");
}
// k-major, 128-byte swizzle, 8 rows = 1024 bytes
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int step) {
  return (uint64_t)((address >> 4) + 2 * step) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void group_sync(int wg) {
  if (wg)
    asm volatile("bar.sync 2, 128;" ::: "memory");
  else
    asm volatile("bar.sync 1, 128;" ::: "memory");
}
template <int R>
__device__ __forceinline__ void hold(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void hold(uint32_t (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Opaque to the compiler, which would make two masks of one.
__device__ __forceinline__ uint32_t magnitudes(uint32_t w) {
  uint32_t m;
  asm("and.b32 %0, %1, 0x77777777;" : "=r"(m) : "r"(w));
  return m;
}
__device__ __forceinline__ uint32_t pick(uint32_t lo, uint32_t hi, uint32_t m) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(lo), "r"(hi), "r"(m));
  return v;
}
__device__ __forceinline__ uint4 load16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

// 64 codes of a thread, rows r and r + 8, to e5m2 in the order of the A fragments of four k = 32 steps.
template <bool LOOKUP>
__device__ __forceinline__ void convert(uint32_t codes, uint32_t scales, uint32_t (&a)[16]) {
  uint16_t both16;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both16) : "r"(scales) : "memory");
  const uint32_t both = both16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 raw = load16(codes + 2048 * r);
    const uint32_t e = r ? both >> 8 : both & 0xff;
    const uint32_t lo = 0x0A080400u + e * 0x04040400u, hi = 0x12100E0Cu + e * 0x04040404u;
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if constexpr (!LOOKUP) {  // what the look-up costs: the codes as they are
        a[4 * s + r] = words[s] ^ lo, a[4 * s + 2 + r] = words[s];
        continue;
      }
      const uint32_t w = words[s], m = magnitudes(w);
      a[4 * s + r] = pick(lo, hi, m) | (w & 0x80808080u);
      a[4 * s + 2 + r] = pick(lo, hi, m >> 16) | ((w << 4) & 0x80808080u);
    }
  }
}

template <int N, int MSUB, int KIND, bool PROMOTE, int STAGES>
struct Shape {
  static constexpr int ACT = N * 128, W = 2 * MSUB * WB, SF = N * 4;
  static constexpr int BYTES = ACT + W + SF, STAGE = (BYTES + 1023) / 1024 * 1024;
  static constexpr int CONVERTED = KIND ? 0 : 2 * 2 * 8192;
  static constexpr int ROW = 144;  // 64 bf16 and 16 bytes so that banks differ
  static constexpr int STAGING = 2 * N * ROW;
  static constexpr int TOTAL = STAGES * STAGE + CONVERTED + STAGING + 2 * STAGES * 8;
};

template <int N, int MSUB, int KIND, bool PROMOTE, int STAGES, int PRODUCER, int BLOCKS>
__global__ void __launch_bounds__(256 + PRODUCER, BLOCKS) kernel(const __grid_constant__ CUtensorMap map, const Params p) {
  using S = Shape<N, MSUB, KIND, PROMOTE, STAGES>;
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* converted = smem + STAGES * S::STAGE;
  uint8_t* staging = converted + S::CONVERTED;
  uint64_t* full = reinterpret_cast<uint64_t*>(staging + S::STAGING);
  uint64_t* empty = full + STAGES;
  if (threadIdx.x == 0) {
    if (shared_of(smem) & 1023) __trap();
    for (int i = 0; i < STAGES; ++i) bar_init(full + i, 1), bar_init(empty + i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int KB = p.kb;
  if (threadIdx.x >= 256) {
    if constexpr (PRODUCER == 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      int stage = 0;
      uint32_t phase = 1;
      for (int i = blockIdx.x; i < p.num_tiles; i += gridDim.x) {
        const int4 tile = p.tiles[i];
        const uint8_t* w = p.w + ((size_t)tile.x * (p.n_out / 64) + (size_t)tile.w * 2 * MSUB) * KB * WB;
        for (int kb = 0; kb < KB; ++kb) {
          bar_wait(empty + stage, phase);
          uint8_t* at = smem + stage * S::STAGE;
          bar_expect(full + stage, S::BYTES);
#pragma unroll
          for (int j = 0; j < 2 * MSUB; ++j) bulk(at + S::ACT + j * WB, w + ((size_t)j * KB + kb) * WB, WB, full + stage);
          tma(at, &map, kb * 128, tile.y, full + stage);
          bulk(at + S::ACT + S::W, p.sf + (size_t)kb * p.sf_stride + tile.y, S::SF, full + stage);
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    if constexpr (PRODUCER == 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int wg = threadIdx.x / 128, t = threadIdx.x % 128, lane = t % 32, warp = t / 32, q = lane % 4, g = lane / 4;
    const uint32_t smem0 = shared_of(smem), empty0 = shared_of(empty);
    uint32_t codes0 = S::ACT + wg * MSUB * WB + 16 * t, scales0 = S::ACT + wg * MSUB * WB + 4096 + 2 * t;
    uint32_t sf0 = S::ACT + S::W + 8 * q;
    asm volatile("" : "+r"(codes0), "+r"(scales0), "+r"(sf0));
    const bool apart = p.one != 0;  // always: a block of its own, or ptxas sinks the conversion behind the wait
    int stage = 0;  // the stage of the next full wait
    uint32_t phase = 0;
    for (int i = blockIdx.x; i < p.num_tiles; i += gridDim.x) {
      const int4 tile = p.tiles[i];
      float sum[MSUB][N / 2], part[N / 2];
#pragma unroll
      for (int s = 0; s < MSUB; ++s)
#pragma unroll
        for (int j = 0; j < N / 2; ++j) sum[s][j] = 0;
      uint32_t a0[16], a1[16];
      constexpr bool EARLY = N <= 96 || MSUB == 1;  // where registers allow
      float2 early[N / 8];
      uint32_t now, then, now_empty, then_empty;

      auto take = [&]() {  // waits for the next stage
        bar_wait(full + stage, phase);
        then = smem0 + stage * S::STAGE;
        then_empty = empty0 + stage * 8;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      };
      auto lift = [&](uint32_t at, int sub, uint32_t(&a)[16], int buffer) {
        convert<KIND != NO_LOOKUP>(at + codes0 + sub * WB, at + scales0 + sub * WB, a);
        if constexpr (KIND != CONVERTED_IN_SHARED) {
          hold(a);
        } else {
          uint8_t* to = converted + (wg * 2 + buffer) * 8192;
#pragma unroll
          for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const int row = 16 * warp + g + 8 * r;
                *reinterpret_cast<uint32_t*>(to + row * 128 + (((2 * s + h) ^ (row & 7)) * 16 + 4 * q)) = a[4 * s + 2 * h + r];
              }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          group_sync(wg);
        }
      };
      auto multiply = [&](uint32_t at, float(&d)[N / 2], uint32_t(&a)[16], int buffer) {
        const uint32_t lifted = shared_of(converted + (wg * 2 + buffer) * 8192);
        hold(d);
        arrive();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const int add = PROMOTE ? (s > 0) : 1;
          if constexpr (KIND != CONVERTED_IN_SHARED)
            Wgmma<N>::rs(d, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3], descriptor(at, s), add);
          else
            Wgmma<N>::ss(d, descriptor(lifted, s), descriptor(at, s), add);
        }
        commit();
        hold(d);
      };
      auto add_up = [&](uint32_t at, float(&d)[N / 2]) {
        if constexpr (PROMOTE) {
#pragma unroll
          for (int j = 0; j < N / 8; ++j) {
            const float2 f = EARLY ? early[j] : load_pair(at + sf0 + 32 * j);
            d[4 * j] += part[4 * j] * f.x;
            d[4 * j + 1] += part[4 * j + 1] * f.y;
            d[4 * j + 2] += part[4 * j + 2] * f.x;
            d[4 * j + 3] += part[4 * j + 3] * f.y;
          }
        }
      };
      auto early_load = [&](uint32_t at) {
        if constexpr (PROMOTE && EARLY) {
#pragma unroll
          for (int j = 0; j < N / 8; ++j) early[j] = load_pair(at + sf0 + 32 * j);
        }
      };
      auto release = [&](uint32_t b) {
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
      };

      take();
      now = then, now_empty = then_empty;
      lift(now, 0, a0, 0);
      const int units = KB * MSUB;
      for (int u = 0; u < units; u += 2) {
        {  // even
          float(&d)[N / 2] = PROMOTE ? part : sum[0];
          multiply(now, d, a0, 0);
          if constexpr (MSUB == 1) take();
          if (apart) lift(MSUB == 1 ? then : now, MSUB - 1, a1, 1);
          early_load(now);
          wait_all();
          hold(d);
          add_up(now, sum[0]);
          if constexpr (MSUB == 1) {
            release(now_empty);
            now = then, now_empty = then_empty;
          }
        }
        {  // odd
          float(&d)[N / 2] = PROMOTE ? part : sum[MSUB - 1];
          multiply(now, d, a1, 1);
          const bool more = u + 2 < units;
          if (more) {
            take();
            lift(then, 0, a0, 0);
          }
          early_load(now);
          wait_all();
          hold(d);
          add_up(now, sum[MSUB - 1]);
          release(now_empty);
          now = then, now_empty = then_empty;
        }
      }

      uint8_t* mine = staging + wg * N * S::ROW;
#pragma unroll
      for (int s = 0; s < MSUB; ++s) {
        const int n0 = ((tile.w * 2 + wg) * MSUB + s) * 64;
        const float* ref = p.wref + (size_t)tile.x * p.n_out + n0 + 16 * warp + g;
        const float f0 = ref[0], f1 = ref[8];
        uint32_t v[N / 4];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
          const float f = j % 2 ? f1 : f0;
          __nv_bfloat162 h = __floats2bfloat162_rn(sum[s][2 * j] * f, sum[s][2 * j + 1] * f);
          v[j] = *reinterpret_cast<uint32_t*>(&h);
        }
        const int matrix = lane / 8;
#pragma unroll
        for (int j = 0; j + 1 < N / 8; j += 2) {
          const uint32_t at = shared_of(mine + (8 * (j + matrix / 2) + lane % 8) * S::ROW + (16 * warp + 8 * (matrix % 2)) * 2);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[2 * j]),
                       "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                       : "memory");
        }
        if constexpr (N == 8) {
          const uint32_t at = shared_of(mine + (lane % 8) * S::ROW + (16 * warp + 8 * (matrix % 2)) * 2);
          asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(v[0]), "r"(v[1])
                       : "memory");
        }
        group_sync(wg);
        for (int j = t; j < 8 * tile.z; j += 128) {
          const uint4 x = *reinterpret_cast<const uint4*>(mine + (j / 8) * S::ROW + (j % 8) * 16);
          *reinterpret_cast<uint4*>(p.out + (size_t)(tile.y + j / 8) * p.n_out + n0 + (j % 8) * 8) = x;
        }
        group_sync(wg);
      }
    }
  }
}

template <int N, int MSUB, int KIND, bool PROMOTE, int STAGES, int PRODUCER, int BLOCKS>
static int go(const CUtensorMap& map, const Params& p, int grid, cudaStream_t stream) {
  auto f = kernel<N, MSUB, KIND, PROMOTE, STAGES, PRODUCER, BLOCKS>;
  constexpr int bytes = Shape<N, MSUB, KIND, PROMOTE, STAGES>::TOTAL;
  static_assert(bytes * BLOCKS + BLOCKS * 1024 <= 228 * 1024 && bytes <= 227 * 1024);
  static cudaError_t once = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (once != cudaSuccess) return 1000 + (int)once;
  f<<<grid * BLOCKS, 256 + PRODUCER, bytes, stream>>>(map, p);
  return (int)cudaGetLastError();
}

// Number, tokens of a tile, tiles of 64 rows for a warp group, kind, whether activation scales are applied for each 128
// of k, stages, threads beside the two warp groups, blocks of a multiprocessor. 8 and 9 (without activation scales) and
// 13 and 14 (without the look-up) compute something else: they are bounds.
#define CONFIGS(X)                  \
  X(0, 8, 1, 1, true, 9, 32, 2)     \
  X(1, 8, 2, 1, true, 5, 32, 2)     \
  X(2, 8, 1, 1, true, 6, 32, 3)     \
  X(3, 8, 1, 0, true, 6, 32, 2)     \
  X(4, 96, 2, 1, true, 6, 128, 1)   \
  X(5, 112, 2, 1, true, 5, 128, 1)  \
  X(6, 128, 1, 1, true, 6, 128, 1)  \
  X(7, 96, 2, 0, true, 5, 128, 1)   \
  X(8, 192, 1, 1, false, 4, 128, 1) \
  X(9, 96, 2, 1, false, 6, 128, 1)  \
  X(10, 32, 2, 1, true, 8, 128, 1)  \
  X(11, 96, 1, 1, true, 6, 128, 1)  \
  X(12, 16, 1, 1, true, 7, 32, 2)   \
  X(13, 8, 1, 2, true, 9, 32, 2)    \
  X(14, 112, 2, 2, true, 5, 128, 1)

extern "C" int describe(int config, int* out) {
  switch (config) {
#define X(C, N, MSUB, KIND, PROMOTE, STAGES, PRODUCER, BLOCKS)                                         \
  case C: {                                                                                          \
    const int v[] = {N, MSUB, KIND, PROMOTE, STAGES, PRODUCER, BLOCKS, Shape<N, MSUB, KIND, PROMOTE, STAGES>::TOTAL}; \
    memcpy(out, v, sizeof v);                                                                        \
    return 0;                                                                                        \
  }
    CONFIGS(X)
#undef X
  }
  return 1;
}

extern "C" int make_map(void* out, void* x, int rows, int k, int n) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  const auto rc0 = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
  if (rc0 != cudaSuccess || !f) return -1;
  cuuint64_t dims[2] = {(cuuint64_t)k, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)k};
  cuuint32_t box[2] = {128, (cuuint32_t)n}, steps[2] = {1, 1};
  alignas(64) CUtensorMap map;
  const int rc = (int)reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, x, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  memcpy(out, &map, sizeof map);
  return rc;
}

extern "C" int launch(int config, const void* map_bytes, const Params* p, int grid, void* stream) {
  alignas(64) CUtensorMap map;
  memcpy(&map, map_bytes, sizeof map);
  switch (config) {
#define X(C, ...) \
  case C:         \
    return go<__VA_ARGS__>(map, *p, grid, (cudaStream_t)stream);
    CONFIGS(X)
#undef X
  }
  return -2;
}
