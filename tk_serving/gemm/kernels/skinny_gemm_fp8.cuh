// Few FP8 rows x FP8 weights, both with scales of 128 channels. Reading the weights is what takes time.
//
// The transposed product: 16 rows of weights are the A operand of a matrix instruction, eight tokens its N. Weights go
// from memory to registers: a thread takes adjacent pieces of 16 bytes, which stand for the channels that the
// instruction wants of it, as those of a token are taken in the same order. The warps of a block divide the channels.
#include <cuda_bf16.h>

#include <cstdint>

namespace skinny {

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = 128, PIECES = 4;

struct Operands {
  const uint8_t* x;    // [m, groups, k] with strides
  const float* x_sf;   // [m, groups, k / 128] with strides
  const uint8_t* w;    // [groups, n, k]
  const float* w_sf;   // [groups, n / 128, k / 128] with strides
  __nv_bfloat16* out;  // [m, groups, n]
  int m, n, k, x_m, x_g, sf_m, sf_g, sf_k, w_sf_g, w_sf_n, w_sf_k;
};

// Weights are read once: past the L1.
__device__ __forceinline__ uint4 load_once(const uint8_t* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

__device__ __forceinline__ void copy(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(16) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Until the launch before has ended; the next one may begin.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 rows x 32 channels by 32 channels x 8 tokens.
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Tokens / 8, warps that divide the channels, slices of 128 channels that a warp has under way.
template <int TOKENS, int SPLIT, int AHEAD>
struct Kernel {
  static constexpr int PARTS = WARPS / SPLIT, BLOCK = 16 * PARTS, WIDTH = 8 * TOKENS;
  const Operands& p;
  uint4* const staged;  // [AHEAD][2 TOKENS][THREADS]: what each thread needs of the activations
  float* const sums;    // [SPLIT][WIDTH][BLOCK]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int split = warp % SPLIT, part = warp / SPLIT, group = blockIdx.y, slices = p.k / GROUP;
  const int row = (blockIdx.x * PARTS + part) * 16;

  // Of the weights of a slice: rows g and g + 8, 16 channels of each half.
  struct Weights {
    uint4 v[PIECES];
  };
  __device__ __forceinline__ void load(Weights& a, const uint8_t* w, int slice) {
    if (slice < slices)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) a.v[i] = load_once(w + i % 2 * 8 * p.k + i / 2 * 64 + slice * GROUP);
  }

  // Of the activations: token g, the same channels, through shared memory, as registers are few; and the scales of the
  // tokens 2 q and 2 q + 1. The last token stands for those that do not exist: their results are not stored.
  struct Scales {
    float w, x[TOKENS][2];
  };
  __device__ __forceinline__ void load(int stage, Scales& f, const uint8_t* x, const float* x_sf, const float* w_sf, int slice) {
    if (slice < slices) {
      const uint32_t to = uint32_t(__cvta_generic_to_shared(staged + stage * 2 * TOKENS * THREADS + threadIdx.x));
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const uint8_t* from = x + min(8 * t + g, p.m - 1) * p.x_m + slice * GROUP;
        copy(to + 2 * t * THREADS * 16, from);
        copy(to + (2 * t + 1) * THREADS * 16, from + 64);
#pragma unroll
        for (int i = 0; i < 2; ++i) f.x[t][i] = x_sf[min(8 * t + 2 * q + i, p.m - 1) * p.sf_m + slice * p.sf_k];
      }
      f.w = w_sf[slice * p.w_sf_k];
    }
    commit();
  }

  __device__ __forceinline__ void add(const Weights& a, int stage, const Scales& f, float (&sum)[TOKENS][4]) {
    const uint4* from = staged + stage * 2 * TOKENS * THREADS + threadIdx.x;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const uint4 v[2] = {from[2 * t * THREADS], from[(2 * t + 1) * THREADS]};
      const float factors[2] = {f.w * f.x[t][0], f.w * f.x[t][1]};
      float d[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 low = a.v[2 * half], high = a.v[2 * half + 1];
        multiply(d, low.x, high.x, low.y, high.y, v[half].x, v[half].y);
        multiply(d, low.z, high.z, low.w, high.w, v[half].z, v[half].w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][i] = __fmaf_rn(d[i], factors[i % 2], sum[t][i]);
    }
  }

  // With WEIGHTS_FIRST it waits for the launch before it once the first weights are on their way.
  template <bool WEIGHTS_FIRST>
  __device__ __forceinline__ void run() {
    float sum[TOKENS][4];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][i] = 0;
    const bool exists = row < p.n;
    Weights a[AHEAD];
    const uint8_t* w = p.w + (size_t(group) * p.n + row + g) * p.k + 16 * q;
    if (exists)
#pragma unroll
      for (int c = 0; c < AHEAD; ++c) load(a[c], w, split + c * SPLIT);
    if (WEIGHTS_FIRST) wait_for_launch_before();
    if (exists) {
      const uint8_t* x = p.x + int64_t(group) * p.x_g + 16 * q;
      const float* x_sf = p.x_sf + group * p.sf_g;
      const float* w_sf = p.w_sf + group * p.w_sf_g + row / GROUP * p.w_sf_n;
      Scales f[AHEAD];
#pragma unroll
      for (int c = 0; c < AHEAD; ++c) load(c, f[c], x, x_sf, w_sf, split + c * SPLIT);
#pragma unroll 1
      for (int first = split; first < slices; first += AHEAD * SPLIT)
#pragma unroll
        for (int c = 0; c < AHEAD; ++c) {
          const int slice = first + c * SPLIT;
          if (slice >= slices) break;
          wait_for_copies<AHEAD - 1>();
          add(a[c], c, f[c], sum);
          load(a[c], w, slice + AHEAD * SPLIT);
          load(c, f[c], x, x_sf, w_sf, slice + AHEAD * SPLIT);
        }
      wait_for_copies<0>();
    }
    store(sum);
  }

  // The sums of the warps that divide the channels, always in the same order.
  __device__ __forceinline__ void store(const float (&sum)[TOKENS][4]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(split * WIDTH + 8 * t + 2 * q + i % 2) * BLOCK + part * 16 + 8 * (i / 2) + g] = sum[t][i];
    __syncthreads();
    const int first = blockIdx.x * BLOCK;
    for (int i = threadIdx.x; i < WIDTH * BLOCK / 2; i += THREADS) {
      const int token = i / (BLOCK / 2), at = i % (BLOCK / 2) * 2;
      if (token >= p.m || first + at >= p.n) continue;
      float2 v = make_float2(0, 0);
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) {
        const float2 one = *reinterpret_cast<const float2*>(sums + (s * WIDTH + token) * BLOCK + at);
        v.x += one.x, v.y += one.y;
      }
      *reinterpret_cast<__nv_bfloat162*>(p.out + (size_t(token) * gridDim.y + group) * p.n + first + at) =
          __floats2bfloat162_rn(v.x, v.y);
    }
  }
};

template <int TOKENS, int SPLIT, int AHEAD, bool WEIGHTS_FIRST>
__device__ __forceinline__ void run(void* staged, void* sums, const void* x, const void* x_sf, const void* w,
                                    const void* w_sf, const void* out, int m, int n, int k, int x_m, int x_g, int sf_m,
                                    int sf_g, int sf_k, int w_sf_g, int w_sf_n, int w_sf_k) {
  const Operands p{static_cast<const uint8_t*>(x),
                   static_cast<const float*>(x_sf),
                   static_cast<const uint8_t*>(w),
                   static_cast<const float*>(w_sf),
                   static_cast<__nv_bfloat16*>(const_cast<void*>(out)),
                   m,
                   n,
                   k,
                   x_m,
                   x_g,
                   sf_m,
                   sf_g,
                   sf_k,
                   w_sf_g,
                   w_sf_n,
                   w_sf_k};
  Kernel<TOKENS, SPLIT, AHEAD>{p, static_cast<uint4*>(staged), static_cast<float*>(sums)}.template run<WEIGHTS_FIRST>();
}

}  // namespace skinny
