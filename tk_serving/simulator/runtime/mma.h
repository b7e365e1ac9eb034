// Tensor core operations: the two forms that kernels of this project use.
#pragma once

namespace sim {

// mma.sync.m16n8kK: c += a b with exact products, rounded once; the hardware's own summation differs in last bits.
// A 32-bit register holds one TF32 value (K = 8) or two bfloat16 values of neighbouring k (K = 16).
template <int K>
inline void mma_16x8(float* c, const unsigned* a, const unsigned* b, SIM_PLACE) {
  struct Operands {
    float* c;
    const unsigned *a, *b;
  } mine{c, a, b};
  Visit visit{[](Visit* const* lanes) {
                constexpr int kEach = K / 8;
                double left[16][K], right[K][8];
                auto value = [](unsigned word, int i) {
                  return double(bits<float>(K == 8 ? word & 0xffffe000u : i ? word & 0xffff0000u : word << 16));
                };
                for (int lane = 0; lane < 32; lane++) {
                  if (!lanes[lane]) fail("mma.sync needs all 32 lanes of a warp");
                  const Operands& o = *static_cast<const Operands*>(lanes[lane]->value);
                  for (int i = 0; i < kEach; i++) {
                    int k = lane % 4 * kEach + i;
                    for (int r = 0; r < 4; r++) left[lane / 4 + 8 * (r % 2)][k + K / 2 * (r / 2)] = value(o.a[r], i);
                    for (int r = 0; r < 2; r++) right[k + K / 2 * r][lane / 4] = value(o.b[r], i);
                  }
                }
                for (int lane = 0; lane < 32; lane++) {
                  const Operands& o = *static_cast<const Operands*>(lanes[lane]->value);
                  for (int r = 0; r < 4; r++) {
                    double sum = o.c[r];
                    for (int k = 0; k < K; k++) sum += left[lane / 4 + 8 * (r / 2)][k] * right[k][lane % 4 * 2 + r % 2];
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

inline void mma_tf32_16x8x8(float* c, const unsigned* a, const unsigned* b, SIM_PLACE) {
  mma_16x8<8>(c, a, b, file, line);
}

inline void mma_bf16_16x8x16(float* c, const unsigned* a, const unsigned* b, SIM_PLACE) {
  mma_16x8<16>(c, a, b, file, line);
}

}  // namespace sim
