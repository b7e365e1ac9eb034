"""Transpose of a matrix."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, operator
from tk_serving.transpose._tiles import matrices, plan
from tk_serving.workloads import Maker, serving

_expect = Expect("transpose")


def _plan(x: Tensor) -> Plan:
    return plan(_expect, x, ("M", "N"))


def _inputs(make: Maker, *, tokens: int, columns: int, dtype: str = "bfloat16", pad: int = 0) -> tuple:
    return (matrices(make, (tokens, columns), dtype, pad),)


@operator(
    spec="operators.md P43",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    moves_data=True,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "columns": 64},
        {"tokens": 1, "columns": 1},
        {"tokens": 64, "columns": 64},
        {"tokens": 128, "columns": 192},
        {"tokens": 129, "columns": 72},
        {"tokens": 24, "columns": 65, "pad": 3},
        {"tokens": 96, "columns": 64, "dtype": "float32", "pad": 4},
        {"tokens": 7, "columns": 100, "dtype": "int32"},
        {"tokens": 128, "columns": 256, "dtype": "float8_e4m3fn"},
        {"tokens": 130, "columns": 48, "dtype": "int8", "pad": 16},
    ],
    workloads=serving(lambda m: {"columns": m.hidden_size}),
)
def transpose(x: Tensor) -> Tensor:
    """The transpose of a matrix, as dense rows. Bytes are moved, never interpreted.

    Fastest where M, N and the row stride are multiples of 64.

    Args:
        x: [M, N], any dtype of 1, 2 or 4 bytes, dense last dimension; the row stride is free.

    Returns:
        [N, M], contiguous, of the same dtype; empty if M or N is 0.

    Raises:
        TypeError: a dtype of another size.
        ValueError: wrong rank, or stride(-1) is not 1.
    """
    return x.t().contiguous()
