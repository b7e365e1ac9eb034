"""The comparison of ring 2 sees faults: each, put into the generated CUDA of a real kernel, makes some case fail."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from harness import check, compare

from tk_serving import simulator
from tk_serving.operator import find
from tk_serving.simulator import Kernel, SimulationError

ALL = -1


@dataclass(frozen=True)
class Fault:
    """``pattern -> replacement`` in the CUDA of the kernels of an operator, at one occurrence or at all."""

    name: str
    operator: str
    pattern: str
    replacement: str
    occurrence: int = ALL

    def edit(self, cuda: str) -> str:
        if self.occurrence == ALL:
            return re.sub(self.pattern, self.replacement, cuda)
        matches = list(re.finditer(self.pattern, cuda))
        if len(matches) <= self.occurrence:
            return cuda
        match = matches[self.occurrence]
        return cuda[: match.start()] + match.expand(self.replacement) + cuda[match.end() :]


BARRIER = r"\n *__syncthreads\(\);"

FAULTS = [
    Fault("barrier after the histogram dropped", "get_fused_mapping", BARRIER, "", 1),
    Fault("barrier between the halves of a transpose dropped", "transpose", BARRIER, "", 0),
    Fault(
        "barrier reached by half of the threads", "transpose", BARRIER, r"\n if (threadIdx.x < 64) __syncthreads();", 0
    ),
    Fault(
        "syncwarp and barrier after a read dropped", "get_fused_mapping", r"__syncwarp\(\);\s*__syncthreads\(\);", ""
    ),
    Fault("barrier between padding and pairs dropped", "get_block_mapping", BARRIER, "", 0),
    Fault("atomic repeated", "get_fused_mapping", r"(?m)^( *AtomicAdd\(.*\);)$", r"\1 \1", 0),
    Fault("-1 guard missing", "expand_to_fused", r"\(int64_t\)0 <= place\[k\w*\]", "true"),
    Fault("-1 guard missing where rows are read", "reduce_fused", r"\(int64_t\)0 <= place\[k\w*\]", "true"),
    Fault("ids of other ranks kept", "mask_indices_by_tp", r"\(block\[0\] % num_tp_ranks\) != tp_rank", "false"),
    Fault("padding rows not written", "expand_to_fused", r"padding\[r\w*\] < 0", "false"),
    Fault("last row left out", "sinkhorn_normalize", r"< tokens\)", "< tokens - 1)"),
    Fault("one row too many", "sinkhorn_normalize", r"< tokens\)", "< tokens + 1)"),
    Fault("one iteration short", "sinkhorn_normalize", r"repeat - 1", "repeat - 2"),
    Fault("last column left out", "per_token_cast", r"< \(width >> 3\)", "< ((width >> 3) - 1)"),
    Fault(
        "rounding towards zero",
        "per_token_cast",
        r"__nv_cvt_float2_to_fp8x2\(\(\(float2\*\)\(&(\w+)\)\)\[(\d)\]",
        r"chopped(((float2*)(&\1))[\2]",
    ),
    Fault(
        "quotient instead of multiplier",
        "per_token_cast",
        r"\(0x1\.cp\+8f/\*4\.480000e\+02\*/ / capped\[0\]\)",
        "(1.0f / quotient[0])",
    ),
    Fault("nibbles swapped", "per_token_cast", r"\(eight\[(i_\d+)\] \* \(factor", r"(eight[\1 ^ 1] * (factor"),
    Fault("FP4 ties away from zero", "per_token_cast", r"0x1p\+1f/\*2\.0", "0x1.000002p+1f/*2.0"),
    Fault("scale row and column exchanged", "per_token_cast", r"(?m)^( *sf\[)", r"\1(blocks - 1) - "),
    Fault("wide access where it may be misaligned", "transpose", r"wide_in != 0", "true"),
    Fault("tie goes to the higher index", "topk_gate", r"__reduce_min_sync\(", "highest("),
    Fault("NaN ranks first", "topk_gate", r"__fadd_rn\(fmaxf\(", "__fadd_rn(nan_kept("),
    Fault("-0 ranks below +0", "topk_gate", r"__fadd_rn\(fmaxf\(", "first_of(fmaxf("),
    Fault("weight not applied", "reduce_fused", r", scale\[(k_\d+)\], acc", ", 1.0f, acc"),
]

HELPERS = """
static inline unsigned short chopped(float2 x, __nv_saturation_t s, __nv_fp8_interpretation_t k) {
  float v[2] = {x.x, x.y}; unsigned short out = 0;
  for (int i = 0; i < 2; i++) {
    __nv_fp8_storage_t c = __nv_cvt_float_to_fp8(v[i], s, k);
    float back = __half2float(__half(__nv_cvt_fp8_to_halfraw(c, k)));
    if (fabsf(back) > fabsf(v[i])) c--;
    out |= c << 8 * i;
  }
  return out;
}
static inline float nan_kept(float x, float low) { return x != x ? x : fmaxf(x, low); }
static inline float first_of(float x, float) { return x; }
static inline int highest(unsigned mask, int x) { return __reduce_max_sync(mask, x == 0x7fffffff ? -1 : x); }
"""


class Seeded:
    """Loads kernels with the fault; counts where it applies."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.applied = 0
        self.kernels: dict = {}

    def __call__(self, launch):
        if launch not in self.kernels:
            self.kernels[launch] = Kernel(f"faulty.{launch.kernel.replace(':', '.')}", launch.prim_func(), self.edit)
        return self.kernels[launch]

    def edit(self, cuda: str) -> str:
        changed = self.fault.edit(cuda)
        self.applied += changed != cuda
        return changed.replace('extern "C"', HELPERS + 'extern "C"', 1)


def caught(fault: Fault, cases: Sequence[dict]) -> bool:
    op = find(fault.operator)
    for seed, case in enumerate(cases):
        try:
            for misalign in (False, True):
                with simulator.options(fiber_seed=seed):
                    check(op, "simulator", case, misalign=misalign)
        except (AssertionError, SimulationError) as found:
            print(found)
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.operator}: {f.name}")
def test_fault_is_caught(fault, monkeypatch):
    seeded = Seeded(fault)
    monkeypatch.setattr(simulator, "load", seeded)
    found = caught(fault, find(fault.operator).cases)
    assert seeded.applied, "the pattern occurs in no kernel any more: adapt the fault"
    assert found, "no case of the operator sees it"


def test_32_bit_row_offset_is_caught(monkeypatch):
    """A row stride beyond 2^31 elements, cut to 32 bits."""
    op = find("per_token_cast")
    x = torch.empty(2**31 + 1024, dtype=torch.bfloat16).as_strided((2, 256), (2**31 + 64, 1))
    x.copy_(torch.randn(2, 256))
    args = op.bind(x, "e4m3", 128)
    compare(op, "simulator", args)
    seeded = Seeded(Fault("", "per_token_cast", r"\bx_stride(?=\)| >>)", "(int)x_stride"))
    monkeypatch.setattr(simulator, "load", seeded)
    with pytest.raises((AssertionError, SimulationError)):
        compare(op, "simulator", args)
    assert seeded.applied
