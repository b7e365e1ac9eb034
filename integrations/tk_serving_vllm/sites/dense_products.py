"""Products of few rows with dense FP8 weights: linear layers, and V4's grouped output projection, at decode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tk_serving.gemm.skinny_gemm_fp8 import GROUP, MAX_ROWS, skinny_gemm_fp8
from tk_serving.operator import Quantized
from tk_serving_patches import Function, Site, warm
from tk_serving_vllm.sites._calls import left_to_engine, on, plan

_OPERATORS = ("skinny_gemm_fp8",)
_MANY = f"more than {MAX_ROWS} rows"
_EINSUM, _RECIPE = "bhr,hdr->bhd", {"recipe": (1, 128, 128)}

_CONSTANT = True  # no launch of a step writes weights

_DEEP_GEMM = "vllm.utils.deep_gemm"
_LINEAR = "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm"
_V4 = "vllm.models.deepseek_v4"


def _fp8_gemm_nt(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fp8_gemm_nt``: what vLLM's operator for linear layers calls, in eager and in compiled models."""

    def fp8_gemm_nt(*args: Any, **kwargs: Any) -> Any:
        known = len(args) == 3 and all(name == "is_deep_gemm_e8m0_used" for name in kwargs)
        if known and _into("fp8-linear", *args):
            return None
        if not known:
            left_to_engine(_OPERATORS, "arguments that a linear layer does not have")
        return original(*args, **kwargs)

    return fp8_gemm_nt


def _fp8_einsum(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``fp8_einsum``: each group of heads by its own weights."""

    def fp8_einsum(*args: Any, **kwargs: Any) -> Any:
        known = len(args) == 4 and args[0] == _EINSUM and kwargs == _RECIPE
        if known and _into("output-projection", *args[1:]):
            return None
        if not known:
            left_to_engine(_OPERATORS, f"another einsum than {_EINSUM} in blocks of 128 x 128")
        return original(*args, **kwargs)

    return fp8_einsum


def _flashinfer(original: Callable[..., Any]) -> Callable[..., Any]:
    """For FlashInfer's product of bfloat16 rows, which vLLM prefers where it is usable: counted, and left to it."""

    def flashinfer_fp8_blockscale_gemm(*args: Any, **kwargs: Any) -> Any:
        left_to_engine(_OPERATORS, "vLLM chose FlashInfer for linear layers")
        return original(*args, **kwargs)

    return flashinfer_fp8_blockscale_gemm


def _into(site: str, x: Quantized, weight: Quantized, out: Tensor) -> bool:
    """Multiply into ``out``, if the operator covers the call."""
    rows = x[0].shape[0]
    of_rows = functools.partial(_of_rows, weight[0].shape)
    warm.note_made((site, weight[0].shape), of_rows)  # the profiling run has more rows than the operator takes
    if rows > MAX_ROWS:
        reason: str | None = _MANY
    else:
        reason = _unsupported(x[1], weight[1], out)
    planned = plan(site, rows, skinny_gemm_fp8, x, weight, _CONSTANT, reason=reason)
    if planned is None:
        return False
    planned.into([out])
    return True


def _unsupported(x_sf: Tensor, weight_sf: Tensor, out: Tensor) -> str | None:
    if x_sf.dtype != torch.float32 or weight_sf.dtype != torch.float32:  # on Blackwell four scales are packed in a word
        return f"scales of {x_sf.dtype} and {weight_sf.dtype}"
    if out.dtype != torch.bfloat16 or not out.is_contiguous():
        return f"results of {out.dtype} with strides {list(out.stride())}"
    return None


def _of_rows(shape: torch.Size, rows: int) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """The calls that these weights get with so many rows, on meta tensors."""
    if rows <= MAX_ROWS:
        *groups, n, k = shape
        make = functools.partial(torch.empty, device="meta")
        x = make(rows, *groups, k, dtype=torch.float8_e4m3fn), make(rows, *groups, k // GROUP)
        weight = make(shape, dtype=torch.float8_e4m3fn), make(*groups, -(-n // GROUP), k // GROUP)
        yield skinny_gemm_fp8, (x, weight, _CONSTANT), {}


def _unsuitable() -> str | None:
    from vllm import envs

    elsewhere = on("cuda")()
    if elsewhere is None and envs.VLLM_BATCH_INVARIANT:
        return "results must not depend on the number of tokens"
    return elsewhere


SITES = (
    Site(
        name="fp8-linear",
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_DEEP_GEMM}:fp8_gemm_nt",
                _fp8_gemm_nt,
                relies_on=(
                    f"{_LINEAR}:_fp8_gemm_nt_op",
                    f"{_LINEAR}:DeepGemmFp8BlockScaledMMKernel.apply_block_scaled_mm",
                ),
            ),
            Function("vllm.utils.flashinfer:flashinfer_fp8_blockscale_gemm", _flashinfer, comparable=False),
        ),
        why="With few rows a linear layer takes the time of reading its weights, and DeepGEMM reads them at a fraction "
        "of the memory's bandwidth.",
        how=f"Multiplies up to {MAX_ROWS} rows with float32 scales; more rows and packed scales stay with DeepGEMM. "
        "Its warm-up in vLLM goes the same way and compiles nothing that no call reaches. Where vLLM chose FlashInfer "
        "for linear layers, that multiplies fewer than 32 rows: such calls are counted and stay with it.",
        until="DeepGEMM has a kernel for few rows.",
        sources={"0.33.0": "48c0521d45106efc"},
        unsuitable=_unsuitable,
    ),
    Site(
        name="output-projection",
        operators=_OPERATORS,
        patches=(
            Function(
                f"{_DEEP_GEMM}:fp8_einsum",
                _fp8_einsum,
                relies_on=(
                    f"{_V4}.nvidia.ops.o_proj:deep_gemm_fp8_o_proj",
                    f"{_V4}.common.ops.fused_inv_rope_fp8_quant:_fused_inv_rope_fp8_quant_kernel_impl",
                ),
            ),
        ),
        why="As fp8-linear, for the first of V4's two output projections, which has weights for each group of heads.",
        how="Takes rows and scales as the inverse rotary embedding leaves them, group by group.",
        until="DeepGEMM has a kernel for few rows.",
        sources={"0.33.0": "5875da5665fa3b82"},
        unsuitable=_unsuitable,
    ),
)
