"""Apply the tables to a model, or to the classes of transformers before a model is loaded."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable

from torch import nn

from tk_serving.config import settings
from tk_serving_patches.engine import OFF, PATCHED, SKIPPED, UNUSED, Ledger, PatchError
from tk_serving_patches.transformers import experts, experts_fp8
from tk_serving_patches.transformers._instances import ModelLedger, ModuleSite, is_ours
from tk_serving_patches.transformers.handle import PatchHandle, SiteReport
from tk_serving_patches.transformers.sites import FAMILIES, families_of

log = logging.getLogger(__name__)


def apply(
    model_or_framework: nn.Module | str, *, ops: Collection[str] | None = None, strict: bool = False
) -> PatchHandle:
    """Let operators of tk-serving take over their places in a model of transformers.

    Only the given model changes, not its classes. Applying twice changes nothing the second time. Calls that the
    operators do not cover run the original code, counted with their reason in the report.

    Args:
        model_or_framework: the model, also one wrapped by peft or prepared by accelerate; or ``"transformers"``, or
            the ``model_type`` of one family (``"deepseek_v4"``), to change the classes instead, for models that are
            created or loaded from now on.
        ops: names of sites or operators to use; all by default. A site is used if it or one of its operators is named.
            ``TK_SERVING_DISABLE`` takes away from them.
        strict: raise unless every site of the model that was not switched off could be patched.

    Raises:
        ValueError: no known class in the model, unknown framework, or unknown name in ``ops``.
        PatchError: ``strict``, and a site could not be patched; nothing is left changed.
    """
    if isinstance(model_or_framework, str):
        return _apply_to_classes(_families(model_or_framework), ops, strict)
    families = families_of(model_or_framework)
    if not families:
        raise ValueError(
            f"apply: model_or_framework: expected a model with classes of {', '.join(FAMILIES)}, "
            f"got {type(model_or_framework).__name__}"
        )
    return _apply_to_model(model_or_framework, families, ops, strict)


def apply_tilekernels_to_deepseek_v2(model: nn.Module | None = None, **op_switches: bool) -> PatchHandle:
    """:func:`apply` for DeepSeek-V2, to a model or, without one, to the classes before loading.

    Args:
        model: the model.
        op_switches: ``routing``, ``experts``, ``swiglu``, ``rms_norm``; all True by default.
    """
    return _apply_family("deepseek_v2", model, op_switches)


def apply_tilekernels_to_deepseek_v3(model: nn.Module | None = None, **op_switches: bool) -> PatchHandle:
    """:func:`apply` for DeepSeek-V3, to a model or, without one, to the classes before loading.

    Args:
        model: the model.
        op_switches: ``routing``, ``experts``, ``experts_fp8``, ``swiglu``, ``rms_norm``; all True by default.
    """
    return _apply_family("deepseek_v3", model, op_switches)


def apply_tilekernels_to_deepseek_v32(model: nn.Module | None = None, **op_switches: bool) -> PatchHandle:
    """:func:`apply` for DeepSeek-V3.2, to a model or, without one, to the classes before loading.

    Args:
        model: the model.
        op_switches: ``routing``, ``experts``, ``experts_fp8``, ``swiglu``, ``rms_norm``; all True by default.
    """
    return _apply_family("deepseek_v32", model, op_switches)


def apply_tilekernels_to_deepseek_v4(model: nn.Module | None = None, **op_switches: bool) -> PatchHandle:
    """:func:`apply` for DeepSeek-V4, to a model or, without one, to the classes before loading.

    Args:
        model: the model.
        op_switches: ``routing``, ``hash_routing``, ``experts``, ``experts_fp8``, ``swiglu``, ``rms_norm``,
            ``unweighted_rms_norm``, ``mhc_pre``, ``mhc_post``, ``mhc_head``; all True by default.
    """
    return _apply_family("deepseek_v4", model, op_switches)


def register_experts() -> None:
    """Make ``from_pretrained(..., experts_implementation="tilekernels")`` known to transformers.

    It works for the experts of every model of transformers, in bfloat16, float32 and FP8 with 128x128 blocks.
    """
    for registry, function in _registries():
        registry.register(experts.NAME, function)


def unregister_experts() -> None:
    """Undo :func:`register_experts`. Models that were loaded with the name no longer run."""
    for registry, _ in _registries():
        registry._global_mapping.pop(experts.NAME, None)


def _registries() -> list[tuple]:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return [
        (type(ALL_EXPERTS_FUNCTIONS), experts.registered),
        (type(ALL_FP8_EXPERTS_FUNCTIONS), experts_fp8.registered),
    ]


def _families(framework: str) -> list[str]:
    known = [family for family in FAMILIES if family.startswith("deepseek")]
    if framework == "transformers":
        return known
    if framework in known:
        return [framework]
    raise ValueError(
        f"apply: model_or_framework: expected a model, 'transformers' or one of {', '.join(known)}, got {framework!r}"
        " (vLLM and SGLang are patched by --kernel-backend tilekernels)"
    )


def _apply_family(family: str, model: nn.Module | None, switches: dict[str, bool]) -> PatchHandle:
    names = [site.name for f in (family, "finegrained_fp8") for site in FAMILIES[f]]
    known = [name.replace("-", "_") for name in names]
    for switch in switches:
        if switch not in known:
            raise TypeError(f"apply_tilekernels_to_{family}() got an unexpected switch {switch!r}; known: {known}")
    ops = [name for name, switch in zip(names, known, strict=True) if switches.get(switch, True)]
    if model is None:
        return _apply_to_classes([family], ops, strict=False)
    families = families_of(model)
    if family not in families:
        raise ValueError(
            f"apply_tilekernels_to_{family}: model: expected a model of this family, got {type(model).__name__}"
        )
    return _apply_to_model(model, [f for f in families if f in (family, "finegrained_fp8")], ops, strict=False)


def _apply_to_model(model: nn.Module, families: list[str], ops: Collection[str] | None, strict: bool) -> PatchHandle:
    _check_names(ops, families)
    ledgers: dict[str, Ledger] = {}
    rows = []
    for family in families:
        chosen: dict[str, list[nn.Module]] = {}
        ledger = ledgers[family] = ModelLedger(chosen)
        for site in FAMILIES[family]:
            skip, status, note = _switch(site, ops), OFF, ""
            if not skip:
                skip, status, note, chosen[site.name] = _modules(site, model)
            rows.append(_row(ledger, family, site, skip, status, note, len(chosen.get(site.name, ()))))
    return _finish(PatchHandle(ledgers, rows), rows, strict)


def _modules(site: ModuleSite, model: nn.Module) -> tuple[str, str, str, list[nn.Module]]:
    """Why to skip the site and with which status; which modules are left alone, and why; the modules to change."""
    if is_ours(site.original):
        return "the class is patched", PATCHED, "", []
    modules = site.modules(model)
    if not modules:
        return "no such module", UNUSED, "", []
    refused: dict[str, int] = {}
    suited = []
    for module in modules:
        reason = site.refuses(module)
        if reason is None:
            suited.append(module)
        else:
            refused[reason] = refused.get(reason, 0) + 1
    note = "; ".join(f"{count} of {len(modules)} modules left alone: {reason}" for reason, count in refused.items())
    return ("" if suited else "; ".join(refused)), SKIPPED, note, suited


def _apply_to_classes(families: list[str], ops: Collection[str] | None, strict: bool) -> PatchHandle:
    _check_names(ops, families)
    ledgers: dict[str, Ledger] = {}
    rows = []
    for family in families:
        ledger = ledgers[family] = Ledger()
        for site in FAMILIES[family]:
            skip, status = _switch(site, ops), OFF
            if not skip and is_ours(site.original):
                skip, status = "applied before", PATCHED
            rows.append(_row(ledger, family, site, skip, status, "", 0))
    return _finish(PatchHandle(ledgers, rows), rows, strict)


def _switch(site: ModuleSite, ops: Collection[str] | None) -> str:
    if ops is None or site.name in ops or any(name in ops for name in site.operators):
        return ""
    return "not among ops"


def _row(ledger: Ledger, family: str, site: ModuleSite, skip: str, status: str, note: str, modules: int) -> SiteReport:
    outcome = ledger.apply(site, disabled=settings.disable, skip=skip, status=status)[0]
    patched = outcome.status == PATCHED
    return SiteReport(
        family=family,
        site=site.name,
        operators=site.operators,
        status=outcome.status,
        modules=modules if patched else 0,
        reason=outcome.reason or note,
        left={},
    )


def _finish(handle: PatchHandle, rows: Iterable[SiteReport], strict: bool) -> PatchHandle:
    skipped = [f"{row.family}: {row.site}: {row.reason}" for row in rows if row.status == SKIPPED]
    if strict and skipped:
        handle.revert()
        raise PatchError("not every site could be patched:" + "".join(f"\n  - {line}" for line in skipped))
    report = handle.report()
    log.log(logging.INFO if report.patched else logging.WARNING, "tk-serving in transformers:\n%s", report)
    return handle


def _check_names(ops: Collection[str] | None, families: list[str]) -> None:
    if ops is None:
        return
    if isinstance(ops, str):
        raise TypeError(f"apply: ops: expected a collection of names, got the string {ops!r}")
    sites = [site for family in {*families, "finegrained_fp8"} for site in FAMILIES[family]]
    known = {name for site in sites for name in (site.name, *site.operators)}
    for name in ops:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3) or sorted(known)
            raise ValueError(
                f"apply: ops: expected names of sites or operators such as {', '.join(close)}, got {name!r}"
            )
