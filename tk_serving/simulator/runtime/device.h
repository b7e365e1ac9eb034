// What CUDA provides to device code, for g++: built-in variables, barriers, warp operations, atomics, intrinsics.
//
// Included before everything else of a simulated kernel, and precompiled: NVIDIA's own headers give the number types
// and their conversions (host implementations), TileLang's templates the rest.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "memory.h"
#include "scheduler.h"

#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__
#undef __grid_constant__
#define __grid_constant__
// The threads of a block share memory; g++ must not assume that pointers are exclusive across a barrier.
#define __restrict__

#define threadIdx (sim::indices.thread)
#define blockIdx (sim::indices.block)
#define blockDim (sim::indices.block_size)
#define gridDim (sim::indices.grid_size)
constexpr int warpSize = 32;

// Of functions whose accesses are not the kernel's own.
#define SIM_UNCHECKED __attribute__((no_sanitize("thread")))
// The place of the call, for messages.
#define SIM_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace sim {

constexpr unsigned kFullMask = 0xffffffffu;

// Every lane gets the value of its source lane; from a lane outside the operation, a poison pattern.
template <class T> T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  T result;
  Visit visit{[](Visit* const* lanes) {
                for (int i = 0; i < 32; i++)
                  if (lanes[i]) {
                    const Visit* from = lanes[lanes[i]->source & 31];
                    if (from) memcpy(lanes[i]->result, from->value, sizeof(T));
                    else memset(lanes[i]->result, 0xff, sizeof(T));
                  }
              },
              mask, file, line, &value, &result, source};
  warp_wait(visit);
  return result;
}

// Every lane gets combine(... combine(first, second) ..., last) over the lanes of the mask.
template <class T, class Combine> T reduce(unsigned mask, T value, Combine, const char* file, int line) {
  T result;
  Visit visit{[](Visit* const* lanes) {
                T total{};
                bool started = false;
                for (int i = 0; i < 32; i++)
                  if (lanes[i]) {
                    const T& next = *static_cast<const T*>(lanes[i]->value);
                    total = started ? Combine()(total, next) : next;
                    started = true;
                  }
                for (int i = 0; i < 32; i++)
                  if (lanes[i]) *static_cast<T*>(lanes[i]->result) = total;
              },
              mask, file, line, &value, &result, 0};
  warp_wait(visit);
  return result;
}

inline unsigned ballot(unsigned mask, bool predicate, const char* file, int line) {
  return reduce(mask, predicate ? 1u << lane() : 0u, [](unsigned a, unsigned b) { return a | b; }, file, line);
}

template <class To, class From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// One access at a time reaches memory, so a plain read-modify-write is atomic.
template <class T, class F> SIM_UNCHECKED T atomic(T* address, F change) {
  memory_access(address, sizeof(T), Access::kAtomic, __builtin_return_address(0));
  T old = *address;
  *address = change(old);
  return old;
}

// NaN, or a rare integer.
template <class T, size_t n> void poison(T (&local)[n]) {
  memset(local, std::is_integral_v<T> ? 0xa5 : 0xff, sizeof(local));
}

inline unsigned short bf16_from_half(unsigned short h) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(__half2float(__ushort_as_half(h))));
}

}  // namespace sim

#include "mma.h"

// --- Barriers and fences ----------------------------------------------------------------------------------------
inline void __syncthreads(SIM_PLACE) { sim::barrier_wait(0, 0, file, line); }
inline void __syncwarp(unsigned mask = sim::kFullMask, SIM_PLACE) {
  sim::Visit visit{nullptr, mask, file, line, nullptr, nullptr, 0};
  sim::warp_wait(visit);
}
inline int __syncthreads_or(int predicate, SIM_PLACE) {
  static int any;
  if (predicate) any = 1;
  sim::barrier_wait(0, 0, file, line);
  int result = any;
  sim::barrier_wait(0, 0, file, line);
  any = 0;
  sim::barrier_wait(0, 0, file, line);
  return result;
}
inline int __syncthreads_and(int predicate, SIM_PLACE) { return !__syncthreads_or(!predicate, file, line); }
inline int __syncthreads_count(int predicate, SIM_PLACE) {
  static int count;
  sim::barrier_wait(0, 0, file, line);
  count = 0;
  sim::barrier_wait(0, 0, file, line);
  count += predicate != 0;
  sim::barrier_wait(0, 0, file, line);
  return count;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { sim::yield(); }
inline void __trap() { sim::fail("__trap"); }
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// --- Warp operations --------------------------------------------------------------------------------------------
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIM_PLACE) {
  return sim::shuffle(mask, value, (sim::lane() & ~(width - 1)) | (source & (width - 1)), file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, SIM_PLACE) {
  int lane = sim::lane(), source = lane ^ distance;
  return sim::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, SIM_PLACE) {
  int lane = sim::lane();
  bool inside = (lane & (width - 1)) + distance < unsigned(width);
  return sim::shuffle(mask, value, inside ? lane + distance : lane, file, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, SIM_PLACE) {
  int lane = sim::lane();
  return sim::shuffle(mask, value, unsigned(lane & (width - 1)) >= distance ? lane - distance : lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIM_PLACE) {
  return sim::ballot(mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, SIM_PLACE) {
  return sim::ballot(mask, predicate != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIM_PLACE) {
  return sim::ballot(mask, predicate == 0, file, line) == 0;
}
inline unsigned __activemask() { sim::fail("__activemask depends on how a GPU schedules; it is not simulated"); }
template <class T> unsigned __match_any_sync(unsigned mask, T value, SIM_PLACE) {
  unsigned result = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) {
      T other = sim::shuffle(mask, value, i, file, line);
      if (memcmp(&other, &value, sizeof(T)) == 0) result |= 1u << i;
    }
  return result;
}
template <class T> unsigned __match_all_sync(unsigned mask, T value, int* predicate, SIM_PLACE) {
  bool same = __match_any_sync(mask, value, file, line) == mask;
  *predicate = __all_sync(mask, same, file, line);
  return *predicate ? mask : 0;
}

#define SIM_REDUCE(name, expression)                                                          \
  inline int __reduce_##name##_sync(unsigned mask, int value, SIM_PLACE) {                    \
    return sim::reduce(mask, value, [](int a, int b) { return expression; }, file, line);     \
  }                                                                                           \
  inline unsigned __reduce_##name##_sync(unsigned mask, unsigned value, SIM_PLACE) {          \
    return sim::reduce(mask, value, [](unsigned a, unsigned b) { return expression; }, file, line); \
  }
SIM_REDUCE(add, decltype(a)(unsigned(a) + unsigned(b)))
SIM_REDUCE(min, a < b ? a : b)
SIM_REDUCE(max, a < b ? b : a)
SIM_REDUCE(and, a & b)
SIM_REDUCE(or, a | b)
SIM_REDUCE(xor, a ^ b)
#undef SIM_REDUCE

// --- Atomics ----------------------------------------------------------------------------------------------------
#define SIM_ATOMIC(name, expression)                                                     \
  template <class T, class V> T name(T* address, V operand) {                            \
    T v = T(operand);                                                                    \
    return sim::atomic(address, [v](T old) -> T { return expression; });                 \
  }                                                                                      \
  template <class T, class V> T name##_block(T* address, V operand) { return name(address, operand); } \
  template <class T, class V> T name##_system(T* address, V operand) { return name(address, operand); }
SIM_ATOMIC(atomicAdd, T(old + v))
SIM_ATOMIC(atomicSub, T(old - v))
SIM_ATOMIC(atomicMax, old < v ? v : old)
SIM_ATOMIC(atomicMin, v < old ? v : old)
SIM_ATOMIC(atomicAnd, T(old & v))
SIM_ATOMIC(atomicOr, T(old | v))
SIM_ATOMIC(atomicXor, T(old ^ v))
SIM_ATOMIC(atomicExch, v)
SIM_ATOMIC(atomicInc, old >= v ? T(0) : T(old + 1))
SIM_ATOMIC(atomicDec, old == 0 || old > v ? v : T(old - 1))
#undef SIM_ATOMIC
template <class T, class C, class V> T atomicCAS(T* address, C compare, V operand) {
  return sim::atomic(address, [=](T old) -> T { return old == T(compare) ? T(operand) : old; });
}

// --- Memory -----------------------------------------------------------------------------------------------------
#define SIM_LOAD(name) template <class T> T name(const T* address) { return *address; }
SIM_LOAD(__ldg) SIM_LOAD(__ldcg) SIM_LOAD(__ldca) SIM_LOAD(__ldcs) SIM_LOAD(__ldlu) SIM_LOAD(__ldcv)
#undef SIM_LOAD
#define SIM_STORE(name) template <class T, class V> void name(T* address, V value) { *address = value; }
SIM_STORE(__stwb) SIM_STORE(__stcg) SIM_STORE(__stcs) SIM_STORE(__stwt)
#undef SIM_STORE
inline size_t __cvta_generic_to_shared(const void* pointer) { return sim::shared_address(pointer); }
inline size_t __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<size_t>(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return sim::shared_pointer(unsigned(address)); }

// --- Integers ---------------------------------------------------------------------------------------------------
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned long long __brevll(unsigned long long x) {
  unsigned long long r = 0;
  for (int i = 0; i < 64; i++) r |= (x >> i & 1) << (63 - i);
  return r;
}
inline unsigned __brev(unsigned x) { return unsigned(__brevll(x) >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t all = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned pick = selector >> 4 * i & 15, byte = unsigned(all >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return unsigned((shift >= 32 ? uint64_t(low) << 32 : (uint64_t(high) << 32 | low) << shift) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift < 32 ? shift : 32));
}
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128(a) * b) >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)(a) * b >> 64);
}
inline int __mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
inline int __hadd(int a, int b) { return int((int64_t(a) + b) >> 1); }
inline int __rhadd(int a, int b) { return int((int64_t(a) + b + 1) >> 1); }
inline unsigned __sad(int a, int b, unsigned c) { return c + unsigned(a > b ? int64_t(a) - b : int64_t(b) - a); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; i++) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
  return c;
}

// --- Reinterpretation and conversion ----------------------------------------------------------------------------
inline unsigned __float_as_uint(float x) { return sim::bits<unsigned>(x); }
inline int __float_as_int(float x) { return sim::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return sim::bits<float>(x); }
inline float __int_as_float(int x) { return sim::bits<float>(x); }
inline long long __double_as_longlong(double x) { return sim::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return sim::bits<double>(x); }
inline int __double2loint(double x) { return int(sim::bits<uint64_t>(x)); }
inline int __double2hiint(double x) { return int(sim::bits<uint64_t>(x) >> 32); }
inline double __hiloint2double(int high, int low) {
  return sim::bits<double>(uint64_t(unsigned(high)) << 32 | unsigned(low));
}

namespace sim {
// CUDA's conversions to integers saturate, and give 0 (32 bits) or the smallest value (64 bits) for NaN.
template <class I, class F> I saturate(F x) {
  constexpr I low = std::is_signed_v<I> ? I(I(1) << (sizeof(I) * 8 - 1)) : I(0), high = I(~low);
  if (x != x) return sizeof(I) == 8 ? I(uint64_t(1) << 63) : I(0);
  if (x <= F(low)) return low;
  return x >= F(high) ? high : I(x);
}
}  // namespace sim
#define SIM_CONVERT(from, F, to, I)                                                       \
  inline I __##from##2##to##_rn(F x) { return sim::saturate<I>(std::nearbyint(x)); }      \
  inline I __##from##2##to##_rz(F x) { return sim::saturate<I>(std::trunc(x)); }          \
  inline I __##from##2##to##_ru(F x) { return sim::saturate<I>(std::ceil(x)); }           \
  inline I __##from##2##to##_rd(F x) { return sim::saturate<I>(std::floor(x)); }
SIM_CONVERT(float, float, int, int) SIM_CONVERT(float, float, uint, unsigned)
SIM_CONVERT(float, float, ll, long long) SIM_CONVERT(float, float, ull, unsigned long long)
SIM_CONVERT(double, double, int, int) SIM_CONVERT(double, double, uint, unsigned)
SIM_CONVERT(double, double, ll, long long) SIM_CONVERT(double, double, ull, unsigned long long)
#undef SIM_CONVERT

// --- Arithmetic in a named rounding -----------------------------------------------------------------------------
#include "rounding.h"

inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return float(std::pow(10.0, double(x))); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float rcbrtf(float x) { return 1.f / cbrtf(x); }
inline float normcdff(float x) { return float(0.5 * std::erfc(-double(x) * 0.70710678118654752440)); }
inline float sinpif(float x) { return float(std::sin(3.14159265358979323846 * double(x))); }
inline float cospif(float x) { return float(std::cos(3.14159265358979323846 * double(x))); }
using std::isfinite;
using std::isinf;
using std::isnan;
inline int __isnanf(float x) { return std::isnan(x); }
inline int __isinff(float x) { return std::isinf(x); }
inline int __finitef(float x) { return std::isfinite(x); }

// min and max: a NaN operand is ignored, as on the device.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
template <class A, class B> requires(std::is_integral_v<A> && std::is_integral_v<B>) auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(b) : C(a);
}
template <class A, class B> requires(std::is_integral_v<A> && std::is_integral_v<B>) auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(b) < C(a) ? C(b) : C(a);
}

// --- Half and bfloat16 functions that the CUDA headers declare for devices only -----------------------------------
#define SIM_HALF(name, expression)                                                                                     \
  inline __half name(__half value) {                                                                                   \
    float x = __half2float(value);                                                                                     \
    return __float2half_rn(expression);                                                                                \
  }                                                                                                                    \
  inline __nv_bfloat16 name(__nv_bfloat16 value) {                                                                     \
    float x = __bfloat162float(value);                                                                                 \
    return __float2bfloat16_rn(expression);                                                                            \
  }                                                                                                                    \
  inline __half2 h2##name(__half2 x) { return __half2(name(x.x), name(x.y)); }                                         \
  inline __nv_bfloat162 h2##name(__nv_bfloat162 x) { return __nv_bfloat162(name(x.x), name(x.y)); }
#define h2hexp h2exp
#define h2hexp2 h2exp2
#define h2hexp10 h2exp10
#define h2hlog h2log
#define h2hlog2 h2log2
#define h2hlog10 h2log10
#define h2hsqrt h2sqrt
#define h2hrsqrt h2rsqrt
#define h2hrcp h2rcp
#define h2hsin h2sin
#define h2hcos h2cos
#define h2htanh h2tanh
#define h2hfloor h2floor
#define h2hceil h2ceil
#define h2hrint h2rint
#define h2htrunc h2trunc
SIM_HALF(hexp, expf(x)) SIM_HALF(hexp2, exp2f(x)) SIM_HALF(hexp10, __exp10f(x))
SIM_HALF(hlog, logf(x)) SIM_HALF(hlog2, log2f(x)) SIM_HALF(hlog10, log10f(x))
SIM_HALF(hsqrt, sqrtf(x)) SIM_HALF(hrsqrt, rsqrtf(x)) SIM_HALF(hrcp, 1.f / x)
SIM_HALF(hsin, sinf(x)) SIM_HALF(hcos, cosf(x)) SIM_HALF(htanh, tanhf(x))
SIM_HALF(hfloor, floorf(x)) SIM_HALF(hceil, ceilf(x)) SIM_HALF(hrint, rintf(x)) SIM_HALF(htrunc, truncf(x))
#undef SIM_HALF
namespace sim {
// a * b + c with the last bit set where it is inexact (round to odd), so that rounding once more to a narrow type is
// the only rounding. The product of two half or bfloat16 values is exact in double.
inline double fused(double a, double b, double c) {
  double product = a * b, sum = product + c;
  double part = sum - product, error = (product - (sum - part)) + (c - part);
  uint64_t image = bits<uint64_t>(sum);
  if (error == 0 || error != error || image & 1) return sum;
  return bits<double>((error > 0) == (sum > 0) ? image + 1 : image - 1);
}
}  // namespace sim
#define SIM_FMA(T, T2, widen, narrow)                                                                        \
  inline T __hfma(T a, T b, T c) { return narrow(sim::fused(widen(a), widen(b), widen(c))); }                \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
SIM_FMA(__half, __half2, __half2float, __double2half)
SIM_FMA(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __double2bfloat16)
#undef SIM_FMA

// --- TileLang's templates, also precompiled ------------------------------------------------------------------------
#include <tl_templates/cuda/reduce.h>
#include <tl_templates/cuda/scan.h>
#include <tl_templates/cuda/ldsm.h>
#include <tl_templates/cuda/threadblock_swizzle.h>
#include <tl_templates/cuda/debug.h>
#ifdef ENABLE_BF16
#include <tl_templates/cuda/cuda_bf16_fallbacks.cuh>
#endif
#include <tl_templates/cuda/atomic.h>
#include <tl_templates/cuda/copy.h>
#include <tl_templates/cuda/cuda_fp4.h>
#include <tl_templates/cuda/cuda_fp8.h>

#include "tvm/ffi/c_api.h"
