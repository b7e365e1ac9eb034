"""For every call site on CUDA, the call that SGLang makes of it, on the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_serving_patches import Function, Site
from tk_serving_sglang.sites import SITES

TOKENS = (1, 64, 4096)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Run = Callable[[Callable[..., Any]], Any]

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
_GROUP = 128


@dataclass(frozen=True)
class Case:
    """One call of one site.

    Attributes:
        name: of the case.
        site: whose replacement is compared.
        models: keys of :data:`tk_serving.workloads.MODELS`.
        make: model facts, tokens and a generator to a function that calls what it is given.
        values: float64 tensors of a result, in which the order of equals does not count.
        tolerance: of the largest difference, relative to the largest value.
    """

    name: str
    site: Site
    models: tuple[str, ...]
    make: Callable[[Any, int, torch.Generator], Run]
    values: Callable[[Any], Iterable[Tensor]]
    tolerance: float

    @property
    def target(self) -> str:
        (patch,) = self.site.patches
        assert isinstance(patch, Function)
        return patch.target


def _site(name: str) -> Site:
    return next(site for site in SITES if site.name == name)  # of alternatives, the first is for CUDA


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = _BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def _plain(result: Any) -> list[Tensor]:
    return [t.double() for t in (result if isinstance(result, (tuple, list)) else (result,))]


def _by_expert(result: tuple[Tensor, Tensor]) -> list[Tensor]:
    """[T, experts] of weights."""
    weights, ids = result
    by_expert = torch.zeros(ids.shape[0], 512, dtype=torch.float64, device=ids.device)
    return [by_expert.scatter_(1, ids.long().clamp(min=0), weights.double() * (ids >= 0))]


def _cast_back(result: Sequence[Tensor]) -> list[Tensor]:
    data, scales = result[0], result[1]
    return [(data.float().unflatten(-1, (-1, _GROUP)) * scales[..., None].float()).flatten(-2).double()]


# -- routing -------------------------------------------------------------------------------------------------------


def _routing(model: Any, tokens: int, generator: torch.Generator) -> Run:
    logits = _normal(generator, tokens, model.n_routed_experts, dtype=torch.float32, scale=2.0)
    bias = _normal(generator, model.n_routed_experts, dtype=torch.float32, scale=0.1)
    hidden = torch.empty(tokens, 8, dtype=_BF16, device=DEVICE)
    call = (hidden, logits, bias, model.num_experts_per_tok + 1, True, model.n_group, model.topk_group)
    return lambda f: f(*call, num_fused_shared_experts=1, routed_scaling_factor=model.routed_scaling_factor)


def _routing_scores(model: Any, tokens: int, generator: torch.Generator) -> Run:
    logits = _normal(generator, tokens, model.n_routed_experts, dtype=torch.float32, scale=2.0)
    bias = _normal(generator, model.n_routed_experts, scale=0.1)
    hidden = torch.empty(tokens, 8, dtype=_BF16, device=DEVICE)
    call = (hidden, logits, bias, model.num_experts_per_tok, True)
    return lambda f: f(*call, scoring_func="sqrtsoftplus", routed_scaling_factor=model.routed_scaling_factor)


def _routing_hash(model: Any, tokens: int, generator: torch.Generator) -> Run:
    logits = _normal(generator, tokens, model.n_routed_experts, dtype=torch.float32, scale=2.0)
    order = torch.rand(4096, model.n_routed_experts, generator=generator, device=DEVICE).argsort(1)
    table = order[:, : model.num_experts_per_tok].int().contiguous()
    ids = torch.randint(4096, (tokens,), generator=generator, device=DEVICE)
    return lambda f: f(logits, ids, table, routed_scaling_factor=model.routed_scaling_factor)


# -- experts -------------------------------------------------------------------------------------------------------


def _reduce(model: Any, tokens: int, generator: torch.Generator) -> Run:
    rows = _normal(generator, tokens, model.num_experts_per_tok + model.n_shared_experts, model.hidden_size)
    out = torch.empty(tokens, model.hidden_size, dtype=_BF16, device=DEVICE)
    return lambda f: f(rows, out, model.routed_scaling_factor)


def _places(model: Any, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    """Ids int32 [T, k], rows of each expert, the same padded, and all rows."""
    experts = model.n_routed_experts
    ids = torch.rand(tokens, experts, generator=generator, device=DEVICE).argsort(1)[:, : model.num_experts_per_tok]
    count = torch.bincount(ids.flatten(), minlength=experts)
    padded = (count + _GROUP - 1) // _GROUP * _GROUP
    return ids.int().contiguous(), count.int(), padded.int(), int(padded.sum())


def _scatter(model: Any, tokens: int, generator: torch.Generator) -> Run:
    ids, count, padded, rows = _places(model, tokens, generator)
    hidden, groups = model.hidden_size, model.hidden_size // _GROUP
    x = _normal(generator, tokens, hidden).to(_FP8)
    scales = torch.rand(tokens, groups, generator=generator, device=DEVICE)
    out = torch.zeros(rows, hidden, dtype=_FP8, device=DEVICE)
    out_scales = torch.zeros(rows, groups, device=DEVICE)
    owners = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    places = torch.empty_like(ids)
    starts = torch.empty_like(count)

    def run(f: Callable[..., Any]) -> Any:
        f(x, scales, ids, padded, count, starts, out, out_scales, owners, places, expert_alignment=_GROUP)
        return out, out_scales, places, owners

    return run


def _gathered(result: Sequence[Tensor]) -> list[Tensor]:
    """The rows of every choice in the order of tokens, and the owners: where a row lies in its segment is free."""
    out, scales, places, owners = result
    at = places.long().clamp(min=0).flatten()
    return [out[at].double(), scales[at].double(), owners.double()]


def _post_reorder(model: Any, tokens: int, generator: torch.Generator) -> Run:
    topk, hidden = model.num_experts_per_tok, model.hidden_size
    down = _normal(generator, tokens * topk, hidden)
    places = torch.randperm(tokens * topk, generator=generator, device=DEVICE).int()
    ids = torch.zeros(tokens, topk, dtype=torch.int32, device=DEVICE)
    weights = torch.rand(tokens, topk, generator=generator, device=DEVICE)
    out = torch.empty(tokens, hidden, dtype=_BF16, device=DEVICE)

    def run(f: Callable[..., Any]) -> Tensor:
        f(down, out, places, ids, weights, topk, tokens, hidden, model.routed_scaling_factor)
        return out

    return run


# -- casts and SwiGLU ----------------------------------------------------------------------------------------------


def _cast(**layout: bool) -> Callable[[Any, int, torch.Generator], Run]:
    def make(model: Any, tokens: int, generator: torch.Generator) -> Run:
        x = _normal(generator, tokens, model.hidden_size)
        return lambda f: f(x, _GROUP, **layout)

    return make


def _swiglu(model: Any, tokens: int, generator: torch.Generator) -> Run:
    x = _normal(generator, tokens, 2 * model.moe_intermediate_size)
    out = torch.empty(tokens, model.moe_intermediate_size, dtype=_BF16, device=DEVICE)

    def run(f: Callable[..., Any]) -> Tensor:
        f(x, out)
        return out

    return run


def _swiglu_clamp(model: Any, tokens: int, generator: torch.Generator) -> Run:
    x = _normal(generator, tokens, 2 * model.moe_intermediate_size, scale=6.0)
    out = torch.empty(tokens, model.moe_intermediate_size, dtype=_BF16, device=DEVICE)

    def run(f: Callable[..., Any]) -> Tensor:
        f(x, out, model.swiglu_limit)
        return out

    return run


def _swiglu_quant(model: Any, tokens: int, generator: torch.Generator) -> Run:
    width = model.moe_intermediate_size
    x = _normal(generator, tokens, 2 * width, scale=3.0)
    out = torch.empty(tokens, width, dtype=_FP8, device=DEVICE)
    scales = torch.empty(tokens, width // _GROUP, device=DEVICE)

    def run(f: Callable[..., Any]) -> Any:
        f(x, out, scales, _GROUP, swiglu_limit=model.swiglu_limit)
        return out, scales

    return run


# -- hyper-connections and Engram ----------------------------------------------------------------------------------


@dataclass
class _Streams:
    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor
    mixer: tuple[Any, ...]
    norm: dict[str, Any]


def _streams(model: Any, tokens: int, generator: torch.Generator) -> _Streams:
    hc, hidden = model.hc_mult, model.hidden_size
    fn = _normal(generator, 2 * hc + hc * hc, hc * hidden, dtype=torch.float32, scale=(hc * hidden) ** -0.5)
    scale = torch.tensor([0.9, 1.1, 1.2], device=DEVICE)
    base = _normal(generator, 2 * hc + hc * hc, dtype=torch.float32, scale=0.3)
    return _Streams(
        _normal(generator, tokens, hidden),
        _normal(generator, tokens, hc, hidden),
        torch.rand(tokens, hc, 1, generator=generator, device=DEVICE),
        torch.rand(tokens, hc, hc, generator=generator, device=DEVICE),
        (fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20),
        {"norm_weight": 1 + _normal(generator, hidden, scale=0.1), "norm_eps": 1e-6},
    )


def _mhc_pre(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    return lambda f: f(s.residual, *s.mixer, **s.norm)


def _mhc_post(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    return lambda f: f(s.x, s.residual, s.post, s.comb)


def _mhc_post_pre(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    return lambda f: f(s.x, s.residual, s.post, s.comb, *s.mixer, **s.norm)


def _mhc_sinkhorn(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    mixes = _normal(generator, tokens, 1, s.mixer[2].numel(), dtype=torch.float32)
    return lambda f: f(mixes, s.mixer[1], s.mixer[2], model.hc_mult, 20, 1e-6)


def _mhc_combine(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    flat, pre = s.residual.flatten(1), s.post[..., 0].contiguous()
    return lambda f: f(flat, pre, model.hc_mult, _BF16)


def _mhc_broadcast(model: Any, tokens: int, generator: torch.Generator) -> Run:
    x = _normal(generator, tokens, model.hidden_size)
    return lambda f: f(x, model.hc_mult)


def _mhc_head(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    fn, scale, base = s.mixer[0][: model.hc_mult].contiguous(), s.mixer[1][:1], s.mixer[2][: model.hc_mult]
    return lambda f: f(s.residual, fn, scale, base.contiguous(), 1e-6, 1e-6)


def _engram_gate(model: Any, tokens: int, generator: torch.Generator) -> Run:
    s = _streams(model, tokens, generator)
    kv = _normal(generator, tokens, (model.hc_mult + 1) * model.hidden_size)
    weights = [1 + _normal(generator, model.hc_mult, model.hidden_size, scale=0.1) for _ in range(2)]
    return lambda f: f(s.residual, kv, *weights, 1e-6, 1e-6)


_V3, _V4 = ("v3",), ("v4-flash",)
_BOTH = _V3 + _V4
_ROUNDING, _CAST = 1e-2, 8e-2  # bfloat16 has 8 bits; a code of e4m3 may fall to either side

CASES = (
    Case("routing", _site("routing"), _V3, _routing, _by_expert, 1e-5),
    Case("routing-scores", _site("routing-scores"), _V4, _routing_scores, _by_expert, 1e-5),
    Case("routing-hash", _site("routing-hash"), _V4, _routing_hash, _by_expert, 1e-5),
    Case("reduce, Triton", _site("routed-experts-triton"), _BOTH, _reduce, _plain, _ROUNDING),
    Case("scatter, DeepGEMM", _site("routed-experts-scatter"), _V3, _scatter, _gathered, 0.0),
    Case("reduce, DeepGEMM", _site("routed-experts-reduce"), _V3, _post_reorder, _plain, _ROUNDING),
    Case("cast, row-major", _site("quant"), _BOTH, _cast(), _cast_back, _CAST),
    Case(
        "cast, column-major",
        _site("quant"),
        _BOTH,
        _cast(column_major_scales=True, scale_tma_aligned=True),
        _cast_back,
        _CAST,
    ),
    Case("SwiGLU", _site("swiglu"), _BOTH, _swiglu, _plain, _ROUNDING),
    Case("SwiGLU, bounded", _site("swiglu-clamp"), _V4, _swiglu_clamp, _plain, _ROUNDING),
    Case("SwiGLU, cast", _site("swiglu-quant"), _V4, _swiglu_quant, _cast_back, _CAST),
    Case("mHC pre", _site("mhc-pre"), _V4, _mhc_pre, _plain, _ROUNDING),
    Case("mHC post", _site("mhc-post"), _V4, _mhc_post, _plain, _ROUNDING),
    Case("mHC post, pre", _site("mhc-post-pre"), _V4, _mhc_post_pre, _plain, _ROUNDING),
    Case("mHC Sinkhorn", _site("mhc-sinkhorn"), _V4, _mhc_sinkhorn, _plain, 1e-3),
    Case("mHC combine", _site("mhc-combine"), _V4, _mhc_combine, _plain, _ROUNDING),
    Case("mHC broadcast", _site("mhc-broadcast"), _V4, _mhc_broadcast, _plain, 0.0),
    Case("mHC head", _site("mhc-head"), _V4, _mhc_head, _plain, _ROUNDING),
    Case("Engram gate", _site("engram-gate"), ("v4.1",), _engram_gate, _plain, _ROUNDING),
)
