// Tensor core operations: the forms that kernels of this project use.
#pragma once

namespace sim {

// mma.sync.m16n8k8 on TF32: c += a b with exact products, rounded once; the hardware's own summation differs in last
// bits.
inline void mma_tf32_16x8x8(float* c, const unsigned* a, const unsigned* b, SIM_PLACE) {
  struct Operands {
    float* c;
    const unsigned *a, *b;
  } mine{c, a, b};
  Visit visit{[](Visit* const* lanes) {
                double left[16][8], right[8][8];
                auto tf32 = [](unsigned word) { return double(bits<float>(word & 0xffffe000u)); };
                for (int i = 0; i < 32; i++) {
                  if (!lanes[i]) fail("mma.sync needs all 32 lanes of a warp");
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int r = 0; r < 4; r++) left[i / 4 + 8 * (r % 2)][i % 4 + 4 * (r / 2)] = tf32(o.a[r]);
                  for (int r = 0; r < 2; r++) right[i % 4 + 4 * r][i / 4] = tf32(o.b[r]);
                }
                for (int i = 0; i < 32; i++) {
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int r = 0; r < 4; r++) {
                    double sum = o.c[r];
                    for (int k = 0; k < 8; k++) sum += left[i / 4 + 8 * (r / 2)][k] * right[k][i % 4 * 2 + r % 2];
                    o.c[r] = float(sum);
                  }
                }
              },
              kFullMask,
              file,
              line,
              &mine,
              nullptr,
              0};
  warp_wait(visit);
}

SIM_UNCHECKED inline float fp8_value(unsigned char code, __nv_fp8_interpretation_t kind) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}

// mma.sync.m16n8k32 on e4m3: as above.
SIM_UNCHECKED inline void mma_e4m3_16x8x32(float* const* c, const unsigned* a, const unsigned* b, SIM_PLACE) {
  struct Operands {
    float* const* c;
    const unsigned *a, *b;
  } mine{c, a, b};
  Visit visit{[](Visit* const* lanes) SIM_UNCHECKED {
                static float left[16][32], right[8][32];
                for (int i = 0; i < 32; i++) {
                  if (!lanes[i]) fail("mma.sync needs all 32 lanes of a warp");
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int j = 0; j < 4; j++) {
                    for (int r = 0; r < 4; r++)
                      left[i / 4 + 8 * (r % 2)][16 * (r / 2) + i % 4 * 4 + j] = fp8_value(o.a[r] >> 8 * j & 255, __NV_E4M3);
                    for (int r = 0; r < 2; r++) right[i / 4][16 * r + i % 4 * 4 + j] = fp8_value(o.b[r] >> 8 * j & 255, __NV_E4M3);
                  }
                }
                for (int i = 0; i < 32; i++) {
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int r = 0; r < 4; r++) {
                    double sum = *o.c[r];
                    for (int k = 0; k < 32; k++) sum += double(left[i / 4 + 8 * (r / 2)][k]) * right[i % 4 * 2 + r % 2][k];
                    *o.c[r] = float(sum);
                  }
                }
              },
              kFullMask,
              file,
              line,
              &mine,
              nullptr,
              0};
  warp_wait(visit);
}

// wgmma.mma_async m64nNk32, e5m2 in registers by e4m3 in shared memory with 128-byte swizzle: each warp makes its 16
// rows. Here the product is there at once, rounded once; the hardware's own summation differs in last bits.
template <int N> SIM_UNCHECKED inline void wgmma(float* const* d, const unsigned (&a)[4], uint64_t b, int add, SIM_PLACE) {
  struct Operands {
    float* const* d;
    const unsigned* a;
    uint64_t b;
    int add;
  } mine{d, a, b, add};
  if ((b >> 62) != 1 || (b >> 32 & 0x3fff) != 64) fail("wgmma: only the 128-byte swizzle with 1024 bytes for 8 rows is simulated");
  Visit visit{[](Visit* const* lanes) SIM_UNCHECKED {
                static float left[16][32], right[N][32];
                for (int i = 0; i < 32; i++) {
                  if (!lanes[i]) fail("wgmma needs all 32 lanes of a warp");
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int r = 0; r < 4; r++)
                    for (int j = 0; j < 4; j++)
                      left[i / 4 + 8 * (r % 2)][16 * (r / 2) + i % 4 * 4 + j] = fp8_value(o.a[r] >> 8 * j & 255, __NV_E5M2);
                }
                unsigned begin = unsigned(static_cast<const Operands*>(lanes[0]->value)->b & 0x3fff) << 4;
                for (int n = 0; n < N; n++)
                  for (int k = 0; k < 32; k += 16) {
                    unsigned address = begin + n * 128 + k;
                    const char* at = static_cast<const char*>(shared_pointer(address ^ (address >> 7 & 7) << 4));
                    memory_access(at, 16, Access::kRead);
                    for (int j = 0; j < 16; j++) right[n][k + j] = fp8_value(at[j], __NV_E4M3);
                  }
                for (int i = 0; i < 32; i++) {
                  const Operands& o = *static_cast<const Operands*>(lanes[i]->value);
                  for (int r = 0; r < N / 2; r++) {
                    const float *x = left[i / 4 + 8 * (r / 2 % 2)], *y = right[8 * (r / 4) + i % 4 * 2 + r % 2];
                    double sum = o.add ? *o.d[r] : 0;
                    for (int k = 0; k < 32; k++) sum += double(x[k]) * y[k];
                    *o.d[r] = float(sum);
                  }
                }
              },
              kFullMask,
              file,
              line,
              &mine,
              nullptr,
              0};
  warp_wait(visit);
}

// stmatrix .trans: matrices of 8 x 8 two-byte elements, whose rows the lanes 8 i to 8 i + 7 name for the matrix i.
template <int COUNT> SIM_UNCHECKED inline void store_matrices(unsigned row, const unsigned (&words)[COUNT], SIM_PLACE) {
  struct Operands {
    unsigned row;
    const unsigned* words;
  } mine{row, words};
  Visit visit{[](Visit* const* lanes) SIM_UNCHECKED {
                for (int i = 0; i < 32; i++)
                  if (!lanes[i]) fail("stmatrix needs all 32 lanes of a warp");
                auto of = [&](int i) SIM_UNCHECKED -> const Operands& { return *static_cast<const Operands*>(lanes[i]->value); };
                for (int i = 0; i < 32; i++)
                  for (int m = 0; m < COUNT; m++)
                    for (int j = 0; j < 2; j++) {
                      // Transposed: the lane holds rows 2 (i % 4) + j of column i / 4.
                      char* at = static_cast<char*>(shared_pointer(of(8 * m + i % 4 * 2 + j).row)) + i / 4 * 2;
                      unsigned short value = of(i).words[m] >> 16 * j;
                      memory_access(at, 2, Access::kWrite);
                      memcpy(at, &value, 2);
                    }
              },
              kFullMask,
              file,
              line,
              &mine,
              nullptr,
              0};
  warp_wait(visit);
}

}  // namespace sim
