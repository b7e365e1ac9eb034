"""Replaces functions of a model or a serving engine, and puts them back.

A :class:`Site` describes one place where operators of ``tk_serving`` take over: what it replaces, why, how, and when
the site can go. A :class:`Ledger` applies sites and remembers every change, so that they can be undone in reverse
order, reported, and checked against other code that replaces the same functions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tk_serving.config import settings
from tk_serving_patches import comparing

PATCHED, SKIPPED, OFF, UNUSED = "patched", "skipped", "switched off", "not used by this model"


class PatchError(RuntimeError):
    """A change could not be made or undone as recorded."""


class _UnsuitableError(Exception):
    """Why a target cannot be patched here; becomes the reason of a skipped site."""


@dataclass(frozen=True)
class Function:
    """A function or method to replace.

    Attributes:
        target: ``"package.module:name"`` or ``"package.module:Class.name"``.
        make: receives the original (unwrapped from ``staticmethod`` or ``classmethod``), returns its replacement,
            which has the same signature and calls the original for whatever it does not take over.
        relies_on: other functions whose behaviour the replacement reproduces; their sources are part of the
            fingerprint.
        comparable: both can run on the same arguments, one after the other, for ``TK_SERVING_COMPARE``.
        in_order: brings a result into an order in which those of both can be compared.
        bound: relative difference up to which they agree; by default that of rounding.
    """

    target: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    relies_on: tuple[str, ...] = ()
    comparable: bool = True
    in_order: Callable[[Any], Any] | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Override:
    """A kernel of a registered ``torch.ops`` operator to replace: all its call sites change, traced ones included.

    Attributes:
        operator: ``"namespace::name"``.
        dispatch_key: ``"CUDA"`` or ``"CPU"``.
        make: receives the original kernel as a callable, returns its replacement, with the same arguments.
        schema: the arguments and results as tested, ``"(Tensor! out, Tensor input) -> ()"``, without defaults; other
            ones are a reason to skip the site.
    """

    operator: str
    dispatch_key: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    schema: str

    @property
    def target(self) -> str:
        return f"torch.ops.{self.operator.replace('::', '.')} ({self.dispatch_key})"


@dataclass(frozen=True)
class Site:
    """One seam of an engine or a model.

    Attributes:
        name: what users write into ``TK_SERVING_DISABLE``.
        operators: the operators of tk_serving that take over.
        patches: all are applied, or none.
        why: what is gained.
        how: what the replacement does, and when it leaves a call to the original.
        until: when the site can be removed.
        sources: fingerprint of the replaced functions for every tested version; empty: any source is accepted.
        unsuitable: why the site does not apply on this machine, or None. Sites of one name are alternatives for
            different machines.
    """

    name: str
    operators: tuple[str, ...]
    patches: tuple[Function | Override, ...]
    why: str
    how: str
    until: str
    sources: Mapping[str, str] = field(default_factory=dict)
    unsuitable: Callable[[], str | None] = lambda: None

    def fingerprint(self) -> str:
        """Fingerprint of the functions that this site replaces or relies on, as installed."""
        names = [n for p in self.patches if isinstance(p, Function) for n in (p.target, *p.relies_on)]
        return fingerprint(*(_plain(_locate(name)[2]) for name in names))


@dataclass(frozen=True)
class Row:
    """One line of the report: what became of an operator at a site, and why."""

    site: str
    operator: str
    status: str
    reason: str = ""


@dataclass
class _Change:
    """One applied patch and how to undo it."""

    site: Site
    target: str
    intact: Callable[[], bool]
    undo: Callable[[], None]


class Ledger:
    """Every change made to other people's code, in order."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._rows: dict[str, list[Row]] = {}
        self._lock = threading.RLock()

    def apply(self, site: Site, *, disabled: Collection[str] = (), skip: str = "", status: str = SKIPPED) -> list[Row]:
        """Apply a site unless it is applied already, switched off, or unsuitable; return its rows of the report.

        Args:
            site: the site.
            disabled: names of operators and sites to leave alone; one switched-off operator leaves the whole site.
            skip: a reason of the caller's not to apply the site.
            status: the status reported with ``skip``.
        """
        with self._lock:
            if any(change.site is site for change in self._changes):
                return self._rows[site.name]
            off = [name for name in (site.name, *site.operators) if name in disabled]
            elsewhere = site.unsuitable()
            if elsewhere and site.name in self._rows:  # an alternative for this machine has been reported
                return self._rows[site.name]
            if skip:
                outcome, reason = status, skip
            elif elsewhere:
                outcome, reason = SKIPPED, elsewhere
            elif off:
                outcome, reason = OFF, f"{off[0]} is in TK_SERVING_DISABLE"
            else:
                outcome, reason = PATCHED, ""
                try:
                    self._apply(site)
                except _UnsuitableError as why:
                    outcome, reason = SKIPPED, str(why)
            self._rows[site.name] = [Row(site.name, name, outcome, reason) for name in site.operators or ("",)]
            return self._rows[site.name]

    def rows(self) -> list[Row]:
        """The report, in the order in which the sites were offered."""
        return [row for rows in self._rows.values() for row in rows]

    def foreign(self) -> list[str]:
        """Targets that other code has replaced after us; calls to them may no longer reach our replacement."""
        return [change.target for change in self._changes if not change.intact()]

    def revert(self) -> None:
        """Undo everything, last change first.

        Raises:
            PatchError: other code replaced a target after us. It is left as it is; all other targets are restored.
        """
        with self._lock:
            left = []
            while self._changes:
                change = self._changes.pop()
                if change.intact():
                    change.undo()
                else:
                    left.append(change.target)
            self._rows.clear()
            if left:
                raise PatchError(f"replaced by other code after tk-serving, not restored: {', '.join(left)}")

    def _apply(self, site: Site) -> None:
        self._check_sources(site)
        before = len(self._changes)
        try:
            for patch in site.patches:
                change = _replace(site, patch) if isinstance(patch, Function) else _override(site, patch)
                self._changes.append(change)
        except BaseException:
            while len(self._changes) > before:
                self._changes.pop().undo()
            raise

    def _check_sources(self, site: Site) -> None:
        for patch in site.patches:
            if isinstance(patch, Function):
                lives = _home(_plain(_locate(patch.target)[2])) or patch.target
                if lives.partition(".")[0] != patch.target.partition(".")[0]:
                    raise _UnsuitableError(f"{patch.target} was already replaced by {lives}")
        if site.sources and site.fingerprint() not in site.sources.values():
            tested = ", ".join(site.sources)
            raise _UnsuitableError(f"the source of {site.patches[0].target} differs from what was tested ({tested})")


def _home(function: Any) -> str:
    """The module that a function's code lives in: other code's, if that has wrapped it.

    functools.wraps copies only a wrapper's name, not its globals. Decorators of torch (no_grad, compile) replace
    nothing.
    """
    home = getattr(function, "__globals__", {}).get("__name__", "")
    while home.partition(".")[0] == "torch" and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        home = getattr(function, "__globals__", {}).get("__name__", "")
    return home


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Sixteen hexadecimal digits that change with the code of the functions, not with comments or indentation."""
    return fingerprint_of_source(*(inspect.getsource(inspect.unwrap(f)) for f in functions))


def fingerprint_of_source(*sources: str) -> str:
    """:func:`fingerprint` of source texts, decorators included."""
    digest = hashlib.sha256()
    for source in sources:
        for line in textwrap.dedent(source).splitlines():
            line = line.rstrip()
            if line and not line.lstrip().startswith("#"):
                digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


def _locate(target: str) -> tuple[Any, str, Any]:
    """Owner (module or class), attribute name, and raw attribute (descriptors included) of a target."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:
        raise _UnsuitableError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    *classes, name = path.split(".")
    for part in classes:
        owner = vars(owner).get(part)
        if owner is None:
            raise _UnsuitableError(f"{target} does not exist: no {part}")
    if name not in vars(owner):
        raise _UnsuitableError(f"{target} does not exist")
    return owner, name, vars(owner)[name]


def _plain(raw: Any) -> Callable[..., Any]:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _replace(site: Site, patch: Function) -> _Change:
    owner, name, raw = _locate(patch.target)
    original = _plain(raw)
    made = patch.make(original)
    if settings.compare and site.operators and patch.comparable:
        made = functools.wraps(made)(comparing.both(site.name, original, made, patch.in_order, patch.bound))
    replacement = functools.wraps(original)(made)
    new = type(raw)(replacement) if isinstance(raw, (staticmethod, classmethod)) else replacement
    shared = isinstance(owner, ModuleType)  # other modules may have imported the function by name
    places = _holders(original) if shared else [(owner, name)]

    def undo() -> None:
        for place, attribute in places:
            if vars(place).get(attribute) is new:
                setattr(place, attribute, raw)

    for place, attribute in places:
        setattr(place, attribute, new)
    left = _holders(original) if shared else []
    if left:
        undo()
        names = ", ".join(f"{module.__name__}.{alias}" for module, alias in left)
        raise PatchError(f"still bound to the original of {original.__qualname__}: {names}")
    return _Change(site, patch.target, lambda: vars(owner).get(name) is new, undo)


def _holders(function: Any) -> list[tuple[ModuleType, str]]:
    """Every module attribute that is the function: its own module, and those that imported it by name."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [(module, alias) for module in modules for alias, value in list(vars(module).items()) if value is function]


def _override(site: Site, patch: Override) -> _Change:
    import torch

    namespace, _, name = patch.operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise _UnsuitableError(f"{patch.target} is not registered")
    schema = _signature(packet.default._schema)
    if schema != patch.schema:
        raise _UnsuitableError(f"{patch.target} has another schema than tested: {schema}")
    try:
        kernel = torch.library.get_kernel(packet.default, patch.dispatch_key)
    except RuntimeError as error:
        raise _UnsuitableError(f"{patch.target} has no kernel: {error}") from error
    original = functools.partial(_call_boxed, packet.default, kernel, patch.dispatch_key)
    replacement = patch.make(original)
    if settings.compare:
        replacement = comparing.both(site.name, original, replacement)
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every override; this one is meant
        library.impl(name, replacement, patch.dispatch_key, allow_override=True)
    return _Change(site, patch.target, lambda: True, library._destroy)


def _signature(schema: Any) -> str:
    """A schema without its name, alias names and defaults, which differ between versions of torch."""
    text = re.sub(r"\([^()]*!(?: -> [^()]*)?\)", "!", str(schema))
    return re.sub(r"=[^,)]*", "", text[text.index("(") :])


def _call_boxed(operator: Any, kernel: Any, dispatch_key: str, *args: Any) -> Any:
    import torch

    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    return kernel.call_boxed(keys, *args)


def select(sites: Sequence[Site], names: Collection[str]) -> list[Site]:
    """The sites with these names, in order."""
    return [site for site in sites if site.name in names]
