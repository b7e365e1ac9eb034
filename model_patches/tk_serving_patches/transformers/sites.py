"""The tables: which forwards of which classes are replaced, by model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tk_serving_patches.engine import Function
from tk_serving_patches.transformers import experts, experts_fp8, hyper_connections, norms, routers, swiglu
from tk_serving_patches.transformers._calls import Seam
from tk_serving_patches.transformers._instances import ModuleSite

_MOE = "transformers.integrations.moe"
_UNTIL = "transformers lets a layer's implementation be chosen by name, as it does for experts and attention."
_REGISTRY = "kept for models that are loaded already; new ones can be loaded with experts_implementation='tilekernels'."

SOURCES: dict[str, dict[str, str]] = {
    "TopkRouter": {"5.16.0": "ae44633475492459"},  # V2
    "GroupedRouter": {"5.16.0": "c826a8f75cfa2d3e"},  # V3 and V3.2
    "TopKRouter": {"5.16.0": "1a6707dd72d00411"},  # V4
    "HashRouter": {"5.16.0": "590169ed0b0cede5"},
    "Experts": {"5.16.0": "72afb746310f0f35", "5.19.0": "10b0326413966e9c"},
    "ExpertsWithLimit": {"5.16.0": "2c0d593afa48dac4", "5.19.0": "776a7365ee1a4106"},
    "MLP": {"5.16.0": "b4e9c2637c7f1172"},
    "MLPWithLimit": {"5.16.0": "b0aefc5125d025b9"},
    "RMSNorm": {"5.16.0": "d676bfe9af0e524d"},
    "RMSNormInFloat32": {"5.16.0": "d676bfe9af0e524d", "5.20.0": "414887885ad3d50c"},
    "UnweightedRMSNorm": {"5.16.0": "60c6c36f6aceb474"},
    "HyperConnection": {"5.16.0": "38038831c94a3fe2", "5.19.0": "b99881c953f159c0"},
    "DecoderLayer": {"5.16.0": "b64046c937384801"},
    "HyperHead": {"5.16.0": "1dcde9526136cfba"},
    "FP8Experts": {"5.16.0": "7c6946253b4bd8a6", "5.24.0": "1ba686012b9134c2"},
}
"""Fingerprints by the first tested version of transformers that has them; TESTED lists the versions."""

TESTED = ("5.16.0", "5.17.0", "5.19.0", "5.20.0", "5.24.0")


def _nothing(module: Any) -> str | None:
    return None


def _site(
    target: str,
    seam: Seam,
    make: Callable[..., Any],
    sources: Mapping[str, str],
    *,
    name: str = "",
    relies_on: tuple[str, ...] = (),
    refuses: Callable[[Any], str | None] = _nothing,
    why: str,
    how: str,
    until: str = _UNTIL,
) -> ModuleSite:
    return ModuleSite(
        name=name or seam.name,
        operators=seam.operators,
        patches=(Function(target, make, relies_on),),
        why=why,
        how=how,
        until=until,
        sources=sources,
        refuses=refuses,
    )


def _experts(target: str, sources: Mapping[str, str], *relies_on: str) -> ModuleSite:
    return _site(
        target,
        experts.EXPERTS,
        experts.experts,
        sources,
        relies_on=(*relies_on, f"{_MOE}:_grouped_linear"),
        refuses=experts.refuses,
        why="Mapping, gather and reduction in place of sort, index, weighting, inverse permutation and sum.",
        how="Keeps the grouped products of transformers; weights the rows inside SwiGLU. Leaves experts without a "
        "gate, sharded weights, and models for which another implementation was chosen.",
        until=_REGISTRY,
    )


def _swiglu(target: str, sources: Mapping[str, str]) -> ModuleSite:
    return _site(
        target,
        swiglu.SWIGLU,
        swiglu.mlp,
        sources,
        refuses=swiglu.refuses,
        why="One pass over gate and up, float32 inside, in place of two to four.",
        how="Lets both projections write one buffer when nothing records a graph. Leaves float16, and widths that are "
        "no multiple of 8.",
    )


def _norm(target: str, sources: Mapping[str, str]) -> ModuleSite:
    return _site(
        target,
        norms.NORM,
        norms.weighted,
        sources,
        why="One pass over the rows in place of six.",
        how="Rounds once, after the weight. Leaves float16, and weights of a dtype to which the class would promote.",
    )


def _grouped_router(target: str, sources: Mapping[str, str]) -> ModuleSite:
    return _site(
        target,
        routers.GROUPED,
        routers.grouped,
        sources,
        why="Scores, groups, top-k, normalisation and scaling in one launch in place of about fifteen.",
        how="Equal keys go to the lower expert. Leaves groups that the operator does not take.",
    )


def _model(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


_V2, _V3, _V32, _V4 = (_model(f"deepseek_{version}") for version in ("v2", "v3", "v32", "v4"))

DEEPSEEK_V2 = (
    _site(
        f"{_V2}:DeepseekV2TopkRouter.forward",
        routers.SOFTMAX,
        routers.softmax,
        SOURCES["TopkRouter"],
        refuses=routers.refuses_method,
        why="The choice of experts in one or two launches.",
        how="Keeps the softmax and its gradient in torch. Leaves unknown methods of choice.",
    ),
    _experts(f"{_V2}:DeepseekV2Experts.forward", SOURCES["Experts"]),
    _swiglu(f"{_V2}:DeepseekV2MLP.forward", SOURCES["MLP"]),
    _norm(f"{_V2}:DeepseekV2RMSNorm.forward", SOURCES["RMSNorm"]),
)

DEEPSEEK_V3 = (
    _grouped_router(f"{_V3}:DeepseekV3TopkRouter.forward", SOURCES["GroupedRouter"]),
    _experts(f"{_V3}:DeepseekV3Experts.forward", SOURCES["Experts"]),
    _swiglu(f"{_V3}:DeepseekV3MLP.forward", SOURCES["MLP"]),
    _norm(f"{_V3}:DeepseekV3RMSNorm.forward", SOURCES["RMSNorm"]),
)

DEEPSEEK_V32 = (
    _grouped_router(f"{_V32}:DeepseekV32TopkRouter.forward", SOURCES["GroupedRouter"]),
    _experts(f"{_V32}:DeepseekV32Experts.forward", SOURCES["Experts"]),
    _swiglu(f"{_V32}:DeepseekV32MLP.forward", SOURCES["MLP"]),
    _norm(f"{_V32}:DeepseekV32RMSNorm.forward", SOURCES["RMSNorm"]),
)

_SCORE = "transformers.activations:SqrtSoftplusActivation.forward"
_FLOAT32 = "Computes in float32 from the logits, as DeepSeek does; transformers scores in the dtype of the model. "

DEEPSEEK_V4 = (
    _site(
        f"{_V4}:DeepseekV4TopKRouter.forward",
        routers.GATE,
        routers.topk,
        SOURCES["TopKRouter"],
        relies_on=(_SCORE,),
        refuses=routers.refuses_scoring,
        why="Scores, top-k, normalisation and scaling in one launch in place of eight.",
        how=_FLOAT32 + "Leaves softmax scores, which the operator ranks by logit.",
    ),
    _site(
        f"{_V4}:DeepseekV4HashRouter.forward",
        routers.GATE,
        routers.by_token,
        SOURCES["HashRouter"],
        name="hash-routing",
        relies_on=(_SCORE,),
        refuses=routers.refuses_scoring,
        why="Table, scores, normalisation and scaling in one launch in place of seven.",
        how=_FLOAT32 + "Leaves softmax scores.",
    ),
    _experts(f"{_V4}:DeepseekV4Experts.forward", SOURCES["ExpertsWithLimit"], f"{_V4}:DeepseekV4Experts._apply_gate"),
    _swiglu(f"{_V4}:DeepseekV4MLP.forward", SOURCES["MLPWithLimit"]),
    _norm(f"{_V4}:DeepseekV4RMSNorm.forward", SOURCES["RMSNormInFloat32"]),
    _site(
        f"{_V4}:DeepseekV4UnweightedRMSNorm.forward",
        norms.NORM,
        norms.unweighted,
        SOURCES["UnweightedRMSNorm"],
        name="unweighted-rms-norm",
        why="One pass over the query heads in place of five.",
        how="Rounds once. Leaves float16.",
    ),
    _site(
        f"{_V4}:DeepseekV4HyperConnection.forward",
        hyper_connections.PRE,
        hyper_connections.pre,
        SOURCES["HyperConnection"],
        relies_on=(f"{_V4}:DeepseekV4UnweightedRMSNorm.forward",),
        why="Norm, projection, mixes, Sinkhorn and collapse in two launches in place of about a hundred.",
        how="The projection runs in TF32. Leaves streams that are not bfloat16, and other numbers of streams than 4.",
    ),
    _site(
        f"{_V4}:DeepseekV4DecoderLayer.forward",
        hyper_connections.POST,
        hyper_connections.layer,
        SOURCES["DecoderLayer"],
        why="Expansion and mixing of the streams in one pass, float32 inside.",
        how="Repeats the layer's forward around the two sublayers. Leaves streams that are not bfloat16.",
    ),
    _site(
        f"{_V4}:DeepseekV4HyperHead.forward",
        hyper_connections.HEAD,
        hyper_connections.head,
        SOURCES["HyperHead"],
        relies_on=(f"{_V4}:DeepseekV4UnweightedRMSNorm.forward",),
        why="Norm, projection, mix and collapse in three launches in place of about ten.",
        how="The projection runs in TF32. Leaves streams that are not bfloat16.",
    ),
)

_FP8 = "transformers.integrations.finegrained_fp8"

FINEGRAINED_FP8 = (
    _site(
        f"{_FP8}:FP8Experts.forward",
        experts_fp8.EXPERTS_FP8,
        experts_fp8.experts_fp8,
        SOURCES["FP8Experts"],
        relies_on=(f"{_FP8}:FP8Experts._apply_gate",),
        refuses=experts_fp8.refuses,
        why="Expansion and cast are one pass; so are SwiGLU, weighting and the second cast.",
        how="Products by DeepGEMM on compute capability 9.0. Leaves FP4 weights, static scales, and training.",
        until=_REGISTRY,
    ),
)

FAMILIES: dict[str, tuple[ModuleSite, ...]] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "finegrained_fp8": FINEGRAINED_FP8,
}
"""Sites by the ``model_type`` of the model whose classes they replace; FP8 experts occur in all of them."""


def module_of(family: str) -> str:
    """The module of transformers that defines a family's classes."""
    return FAMILIES[family][0].function.target.partition(":")[0]


def families_of(model: nn.Module) -> list[str]:
    """The families whose classes occur in a model."""
    found = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return [family for family in FAMILIES if module_of(family) in found]
