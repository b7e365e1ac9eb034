// Tensor core operations: the one form that kernels of this project use.
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

}  // namespace sim
