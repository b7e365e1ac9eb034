// __fadd_rn ... __dsqrt_ru: arithmetic in one of the four rounding modes of CUDA's names.
//
// Directed rounding moves the result of round-to-nearest by one unit where the exact error says so; the error of a
// sum is exact in double or long double for these operands.
#pragma once

namespace sim {

// Rounds the long double `exact` to F in mode n (nearest), z (to zero), u (up), d (down).
template <char mode, class F> F rounded(long double exact) {
  F nearest = F(exact);
  if (mode == 'n' || std::isnan(nearest) || std::isinf(exact) || (long double)(nearest) == exact) return nearest;
  bool up = mode == 'u' || mode == 'z' && exact < 0;
  if (up) return (long double)(nearest) > exact ? nearest : std::nextafter(nearest, F(INFINITY));
  return (long double)(nearest) < exact ? nearest : std::nextafter(nearest, -F(INFINITY));
}

}  // namespace sim

// The nearest mode uses the plain operators of the type; the others go through long double, which is exact for sums
// and products of floats and good to half a unit of the wider type for the rest.
#define SIM_MODES(name, F, parameters, nearest, exact)                         \
  inline F name##_rn parameters { return nearest; }                            \
  inline F name##_rz parameters { return sim::rounded<'z', F>(exact); }        \
  inline F name##_ru parameters { return sim::rounded<'u', F>(exact); }        \
  inline F name##_rd parameters { return sim::rounded<'d', F>(exact); }
#define SIM_WIDE(x) ((long double)(x))
SIM_MODES(__fadd, float, (float a, float b), a + b, SIM_WIDE(a) + b)
SIM_MODES(__fsub, float, (float a, float b), a - b, SIM_WIDE(a) - b)
SIM_MODES(__fmul, float, (float a, float b), a * b, SIM_WIDE(a) * b)
SIM_MODES(__fdiv, float, (float a, float b), a / b, SIM_WIDE(a) / b)
SIM_MODES(__frcp, float, (float a), 1.f / a, 1 / SIM_WIDE(a))
SIM_MODES(__fsqrt, float, (float a), sqrtf(a), sqrtl(SIM_WIDE(a)))
SIM_MODES(__fmaf, float, (float a, float b, float c), fmaf(a, b, c), fmal(SIM_WIDE(a), SIM_WIDE(b), SIM_WIDE(c)))
SIM_MODES(__dadd, double, (double a, double b), a + b, SIM_WIDE(a) + b)
SIM_MODES(__dsub, double, (double a, double b), a - b, SIM_WIDE(a) - b)
SIM_MODES(__dmul, double, (double a, double b), a * b, SIM_WIDE(a) * b)
SIM_MODES(__ddiv, double, (double a, double b), a / b, SIM_WIDE(a) / b)
SIM_MODES(__drcp, double, (double a), 1.0 / a, 1 / SIM_WIDE(a))
SIM_MODES(__dsqrt, double, (double a), sqrt(a), sqrtl(SIM_WIDE(a)))
SIM_MODES(__fma, double, (double a, double b, double c), fma(a, b, c), fmal(SIM_WIDE(a), SIM_WIDE(b), SIM_WIDE(c)))
#undef SIM_WIDE
#undef SIM_MODES
