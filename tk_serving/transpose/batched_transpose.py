"""Transpose of each matrix of a batch."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, operator
from tk_serving.transpose._tiles import matrices, plan
from tk_serving.workloads import Maker, Workload

_expect = Expect("batched_transpose")


def _plan(x: Tensor) -> Plan:
    return plan(_expect, x, ("B", "M", "N"))


def _inputs(make: Maker, *, batch: int, tokens: int, columns: int, dtype: str = "bfloat16", pad: int = 0) -> tuple:
    return (matrices(make, (batch, tokens, columns), dtype, pad),)


@operator(
    spec="operators.md P44",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"batch": 0, "tokens": 64, "columns": 64},
        {"batch": 3, "tokens": 64, "columns": 128},
        {"batch": 2, "tokens": 72, "columns": 40, "pad": 8},
        {"batch": 2, "tokens": 33, "columns": 70, "dtype": "float32", "pad": 1},
        {"batch": 2, "tokens": 160, "columns": 144, "dtype": "float8_e4m3fn"},
    ],
    workloads=[
        Workload("v4.1-experts", {"batch": 8, "columns": 5120}, (512, 2304), "v4.1"),
        Workload("deepseek-v3-experts-fp8", {"batch": 8, "columns": 7168, "dtype": "float8_e4m3fn"}, (512, 4096), "v3"),
    ],
)
def batched_transpose(x: Tensor) -> Tensor:
    """The transpose of each matrix of a batch, as dense rows. Bytes are moved, never interpreted.

    Fastest where M, N and the strides are multiples of 64.

    Args:
        x: [B, M, N], any dtype of 1, 2 or 4 bytes, dense last dimension; the other strides are free.

    Returns:
        [B, N, M], contiguous, of the same dtype; empty if any size is 0.

    Raises:
        TypeError: a dtype of another size.
        ValueError: wrong rank, or stride(-1) is not 1.
    """
    return x.transpose(1, 2).contiguous()
