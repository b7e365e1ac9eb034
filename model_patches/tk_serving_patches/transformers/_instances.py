"""Changes to the modules of one model; their classes, and other models, stay as they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from tk_serving_patches import engine
from tk_serving_patches.engine import Function, Ledger, Site

_MARK = "tk_serving_site"
_owned: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules whose forward a ledger replaced and will restore. A copy of a patched module is patched but has no owner."""


@dataclass(frozen=True)
class ModuleSite(Site):
    """A site whose one patch replaces the forward of a module class.

    Attributes:
        refuses: why the operators do not suit a module, whatever its inputs, or None.
    """

    refuses: Callable[[Any], str | None] = lambda module: None

    @property
    def function(self) -> Function:
        (patch,) = self.patches
        assert isinstance(patch, Function)
        return patch

    @property
    def original(self) -> Callable[..., Any]:
        """The forward of the class."""
        return engine._plain(engine._locate(self.function.target)[2])

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model that run the class's forward, once each."""
        owner = engine._locate(self.function.target)[0]
        original = self.original
        return [m for m in model.modules() if isinstance(m, owner) and type(m).forward is original]


def is_ours(function: Any) -> bool:
    """The function is a replacement of ours."""
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("tk_serving_patches.")


class ModelLedger(Ledger):
    """Replaces the forward of single modules."""

    def __init__(self, modules: Mapping[str, Sequence[nn.Module]]) -> None:
        """Args: modules: for each name of a site, the modules to change."""
        super().__init__()
        self._modules = modules

    def _apply(self, site: Site) -> None:
        assert isinstance(site, ModuleSite)
        self._check_sources(site)
        modules = [m for m in self._modules[site.name] if m not in _owned]
        _check_untouched(modules)
        original = site.original
        replacement = functools.wraps(original)(site.function.make(original))
        setattr(replacement, _MARK, site.name)
        self._changes += [_bind(site, module, replacement) for module in modules]


def _slot(module: nn.Module) -> str:
    """The attribute that holds the module's own forward: accelerate keeps it aside and calls it from a hook."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _check_untouched(modules: Sequence[nn.Module]) -> None:
    """Refuse the site if other code has replaced the forward of a module."""
    others = []
    for module in modules:
        current = module.__dict__.get(_slot(module))
        function = getattr(current, "__func__", None)
        clean = current is None or function is type(module).forward or hasattr(function, _MARK)
        if not clean:
            others.append(getattr(function or current, "__module__", None) or type(current).__name__)
    if others:
        whose = ", ".join(sorted(set(others)))
        raise engine._UnsuitableError(
            f"forward of {len(others)} of {len(modules)} modules was already replaced by {whose}"
        )


def _bind(site: ModuleSite, module: nn.Module, replacement: Callable[..., Any]) -> engine._Change:
    # A bound method: deepcopy binds it to the copy, and pickle stores the name alone, so that what it loads runs the
    # forward of the class.
    slot, new = _slot(module), types.MethodType(replacement, module)
    before = module.__dict__.get(slot)
    if hasattr(getattr(before, "__func__", None), _MARK):  # inherited from the model that this is a copy of
        before = types.MethodType(type(module).forward, module) if slot == "_old_forward" else None

    def place() -> str | None:
        return next((s for s in ("forward", "_old_forward") if module.__dict__.get(s) is new), None)

    def undo() -> None:
        where = place()
        assert where is not None
        if before is None and where == "forward":
            del module.__dict__["forward"]
        else:
            module.__dict__[where] = before or types.MethodType(type(module).forward, module)
        _owned.pop(module, None)

    module.__dict__[slot] = new
    _owned[module] = site.name
    return engine._Change(site, f"{type(module).__name__}.forward", lambda: place() is not None, undo)
