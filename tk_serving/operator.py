"""What an operator is: one declaration from which everything else derives.

A contract file holds one function decorated with :func:`operator`. The body of that function *is* the torch
reference; its annotated signature is the public interface; the arguments of the decorator add what torch cannot
say: the checks and output layouts (``plan``), the inputs and workloads that tests and benchmarks share, and how
closely a kernel must agree with the reference. From these the decorator derives the checked public function, the
``torch.library`` registration with its fake implementation, the dispatch entry, the shape classes to build ahead
of time, and the byte counts of the roofline.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tk_serving import dispatch, kept
from tk_serving.compare import Equality
from tk_serving.config import settings
from tk_serving.plan import Existing, Launch, Out, Plan, early_below
from tk_serving.workloads import Maker, Workload

__all__ = [
    "Existing",
    "Launch",
    "Operator",
    "Out",
    "Plan",
    "Quantized",
    "early_below",
    "find",
    "load_family",
    "operator",
    "operators",
]

FAMILIES = tuple(sorted(kernels.parent.name for kernels in pathlib.Path(__file__).parent.glob("*/kernels")))
"""The folders with kernels."""

Quantized = tuple[Tensor, Tensor]
"""``(data, sf)``: quantised values and their dequantisation multipliers."""

_LIBRARY = torch.library.Library("tk_serving", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_OPERATORS: dict[str, Operator] = {}


@dataclass(frozen=True, eq=False)
class Operator:
    """One declared operator; see :func:`operator` for the meaning of the fields."""

    name: str
    family: str
    module: str
    spec: str
    phase: str
    signature: inspect.Signature
    reference: Callable[..., Any]
    plan: Callable[..., Plan]
    inputs: Callable[..., tuple]
    cases: tuple[dict[str, Any], ...]
    workloads: tuple[Workload, ...]
    equality: tuple[Equality, ...]
    mutates: tuple[str, ...]
    traffic: Callable[..., int] | None
    finish: Callable[..., Any] | None
    verify: Callable[..., None] | None
    unspecified: Callable[..., None] | None = None
    moves_data: bool = False
    aliases: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    variants: tuple[Workload, ...] = ()
    parameters: tuple[_Parameter, ...] = field(default=(), repr=False)
    public: Callable[..., Any] = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def qualified_name(self) -> str:
        return f"{self.family}.{self.name}"

    @property
    def summary(self) -> str:
        """First sentence of the documentation; names of other operators without their role."""
        first = inspect.cleandoc(self.reference.__doc__ or "").split("\n\n")[0]
        return first.replace("\n", " ").replace(":func:", "")

    @functools.cached_property
    def schema(self) -> str:
        """The ``torch.library`` schema derived from the annotated signature."""
        alias = iter("abcdefghijklmnopqrstuvwxyz")
        arguments = [text for p in self.parameters for text in p.schema(p.name in self.mutates, alias)]
        count = self.num_results
        returns = "()" if count == 0 else "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        return f"{self.name}({', '.join(arguments)}) -> {returns}"

    @functools.cached_property
    def num_results(self) -> int:
        return _count_tensors(self._return_type)

    @functools.cached_property
    def _return_type(self) -> Any:
        return typing.get_type_hints(self.reference)["return"]

    def bind(self, *args: Any, **kwargs: Any) -> tuple:
        """The complete positional arguments of a call, defaults included; keyword-only ones may be positional too."""
        names, defaults = self._defaults
        rest = names[len(args) :]
        if len(args) <= len(names) and kwargs.keys() <= set(rest):
            values = [kwargs.get(name, default) for name, default in zip(rest, defaults[len(args) :], strict=True)]
            if not any(value is inspect.Parameter.empty for value in values):
                return (*args, *values)
        return self._bind_slowly(args, kwargs)

    @functools.cached_property
    def _defaults(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        parameters = self.signature.parameters.values()
        return tuple(p.name for p in parameters), tuple(p.default for p in parameters)

    def _bind_slowly(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """What Python says about arguments that do not fit; ``Signature.bind`` takes as long as a small kernel."""
        positional = sum(not p.keyword_only for p in self.parameters)
        by_position = dict(zip((p.name for p in self.parameters[positional:]), args[positional:], strict=False))
        bound = self.signature.bind(*args[:positional], *args[len(self.parameters) :], **by_position, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def leaves(self, result: Any) -> list[Tensor | None]:
        """The tensors of a public result, in the order of the declared return type (``None`` where absent)."""
        return list(_leaves(self._return_type, result))

    def compulsory_bytes(self, *args: Any) -> int:
        """Bytes that any implementation must move for this call: inputs read once plus outputs written once."""
        if self.traffic is not None:
            return self.traffic(*args)
        read = sum(t.numel() * t.element_size() for t in tensors_of(args))
        return read + sum(out.num_bytes for out in self.plan(*args).outputs if isinstance(out, Out))

    @property
    def built(self) -> tuple[Workload, ...]:
        """Everything whose kernels are built ahead of time."""
        return (*self.workloads, *self.variants)

    def shape_classes(self, workloads: Sequence[Workload] | None = None) -> dict[Launch, str]:
        """Kernels to build ahead of time, each with the label of the first workload that needs it.

        Plans look at shapes only, so the inputs are made on the meta device.
        """
        needed: dict[Launch, str] = {}
        for workload in self.workloads if workloads is None else workloads:
            for tokens in workload.tokens:
                args = self.bind(*self.inputs(Maker("meta"), tokens=tokens, **workload.params))
                for launch in self.plan(*args).launches:
                    needed.setdefault(launch, workload.label)
        return needed

    def refusal(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call with these arguments would not run a kernel, or None if it would. For adapters in engines."""
        bound = self.bind(*args, **kwargs)
        decision = dispatch.decide(self, self.plan(*bound), _device(bound))
        return None if decision.implementation in (dispatch.KERNEL, dispatch.SIMULATOR) else decision.reason

    def call(self, implementation: str, *args: Any, **kwargs: Any) -> Any:
        """The public result by a named implementation, whatever the settings say."""
        bound = self.bind(*args, **kwargs)
        return self.planned(self.plan(*bound), bound, implementation)

    def planned(self, plan: Plan, bound: tuple, implementation: str = "") -> Any:
        """The public result of a call that is bound and planned already, by the implementation that settings choose.

        Unlike the public function it does not go through torch's dispatcher: not traceable by ``torch.compile``.
        """
        if settings.check and self.verify is not None and not implementation:
            self.verify(*bound)
        flat = self._returned(plan, dispatch.run(self, plan, bound, _device(bound), implementation))
        return self.finish(flat, *bound) if self.finish else self._structured(flat)

    @functools.cached_property
    def _structured(self) -> Callable[[Any], Any]:
        return _structure(self._return_type)

    def into(self, outputs: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> None:
        """Run a call that writes its results into the caller's tensors, in the order of the declared return type.

        For adapters whose engine has allocated the outputs already; the tensors must have the exact shape, dtype and
        strides that the call would allocate (``ValueError`` otherwise). Not traceable by ``torch.compile``.
        """
        bound = self.bind(*args, **kwargs)
        dispatch.run(self, self.plan(*bound).into(outputs), bound, _device(bound))

    # -- torch.library implementations; they receive the flat arguments of the schema --------------------------

    def _impl(self, *flat: Any) -> Any:
        args = self._unflatten(flat)
        plan = kept.plan(self, args)
        if settings.check and self.verify is not None:
            self.verify(*args)
        return self._returned(plan, dispatch.run(self, plan, args, _device(args)))

    def _fake(self, *flat: Any) -> Any:
        args = self._unflatten(flat)
        plan = self.plan(*args)
        device = _device(args)
        return self._returned(plan, [out.empty(device) if isinstance(out, Out) else None for out in plan.outputs])

    def _returned(self, plan: Plan, results: Sequence[Tensor | None]) -> Any:
        """Schema form of the results: an absent or caller-owned result becomes an empty placeholder."""
        if self.num_results == 0:
            return None
        fresh = tuple(
            result if isinstance(out, Out) else torch.empty(0, dtype=torch.uint8)
            for out, result in zip(plan.outputs, results, strict=True)
        )
        return fresh[0] if self.num_results == 1 else fresh

    def _unflatten(self, flat: Sequence[Any]) -> tuple:
        values = iter(flat)
        return tuple(p.unflatten(values) for p in self.parameters)


@dataclass(frozen=True)
class _Parameter:
    """One public parameter and how it maps to the flat ``torch.library`` schema."""

    name: str
    kind: str  # the schema type: Tensor, SymInt, float, bool, str, ScalarType, SymInt[], bool[], Tensor[]
    optional: bool = False
    tensor: bool = False  # a plain tensor is accepted
    pair: bool = False  # a (tensor, tensor) pair is accepted
    keyword_only: bool = False

    def schema(self, mutated: bool, alias: Iterator[str]) -> list[str]:
        def tensor(optional: bool) -> str:
            mark = f"({next(alias)}!)" if mutated else ""
            return f"Tensor{mark}{'?' if optional else ''}"

        if self.pair:
            return [f"{tensor(self.optional)} {self.name}", f"{tensor(self.optional or self.tensor)} {self.name}_1"]
        if self.kind == "Tensor":
            return [f"{tensor(self.optional)} {self.name}"]
        kind = f"Tensor({next(alias)}!)[]" if self.kind == "Tensor[]" and mutated else self.kind
        return [f"{kind}{'?' if self.optional else ''} {self.name}"]

    def unflatten(self, values: Iterator[Any]) -> Any:
        value = next(values)
        if not self.pair:
            return value
        second = next(values)
        return value if second is None else (value, second)

    def code(self, operator: str) -> tuple[list[str], list[str]]:
        """Source lines that check the kind of the argument, and the flat expressions passed to the schema."""
        name = self.name
        expected = {"SymInt": "int", "SymInt[]": "ints", "Tensor[]": "tensors", "ScalarType": "torch.dtype"}.get(
            self.kind, self.kind
        )
        if self.pair:
            lines = [f"{name}_0, {name}_1 = __pair__({operator!r}, {name!r}, {name}, {self.tensor}, {self.optional})"]
            return lines, [f"{name}_0", f"{name}_1"]
        test = {
            "Tensor": f"not isinstance({name}, __Tensor__)",
            "SymInt": f"type({name}) is not int",
            "bool": f"type({name}) is not bool",
            "str": f"type({name}) is not str",
            "float": f"type({name}) is not float",
            "ScalarType": f"type({name}) is not __dtype__",
        }.get(self.kind, "True")
        guard = f"{name} is not None and " if self.optional else ""
        return [f"if {guard}{test}: {name} = __kind__({operator!r}, {name!r}, {name}, {expected!r})"], [name]


def operator(
    *,
    spec: str,
    phase: str,
    plan: Callable[..., Plan],
    inputs: Callable[..., tuple],
    cases: Sequence[dict[str, Any]],
    workloads: Sequence[Workload],
    equality: Equality | Sequence[Equality],
    mutates: Sequence[str] = (),
    traffic: Callable[..., int] | None = None,
    finish: Callable[..., Any] | None = None,
    verify: Callable[..., None] | None = None,
    unspecified: Callable[..., None] | None = None,
    moves_data: bool = False,
    aliases: Sequence[str] = (),
    peers: Sequence[str] = (),
    variants: Sequence[Workload] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Declare the operator whose torch reference is the decorated function.

    Args:
        spec: section or row of the specification, or the paper, that defines the operator.
        phase: ``inference``, ``fine-tuning`` or ``both``.
        plan: ``plan(*public arguments) -> Plan``: checks the arguments (raising before anything is allocated) and
            says which outputs to allocate and which kernels to launch. Looks at metadata only, never at data.
        inputs: ``inputs(maker, *, tokens, **parameters) -> public arguments`` for one workload or test case.
        cases: small parameter sets, each with ``tokens``, that the tests run through the simulator.
        workloads: parameter sets of real models, for benchmarks and ahead-of-time builds.
        equality: how closely a kernel must agree with the reference: one rule for all results, or one for each.
            Mutated arguments follow the results, in the order of ``mutates``.
        mutates: names of arguments that are written in place.
        traffic: ``traffic(*public arguments) -> bytes`` where inputs read once plus outputs written once is wrong.
        finish: ``finish(results, *public arguments)``: public result from the tensors of the schema, where the
            declared return type does not say it (preallocated outputs, optional results, host lists).
        verify: ``verify(*public arguments)`` raises ValueError for invalid tensor contents (indices out of range,
            scales that are no powers of two). Called with ``TK_SERVING_CHECK=1`` only, as it synchronises; without
            it such contents have a defined, memory-safe result.
        unspecified: ``unspecified(results, *public arguments)`` overwrites, for tests and benchmarks, whatever the
            contract leaves open in the results of one call, so that only the rest of them is compared.
        moves_data: the operator does little but move data: benchmarks hold it to the bandwidth of a copy.
        aliases: further names of the public function, in the family and among the references.
        peers: implementations of others that benchmarks compare with: ``"<engine>"`` or ``"<engine>:<function>"``, a
            function of ``tk_serving.bench.peers.<engine>``; by default the one of the operator's name.
        variants: further parameter sets of real models, as engines call the operator: built ahead of time with the
            workloads, and not measured.
    """

    def declare(reference: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(reference)
        hints = typing.get_type_hints(reference)
        parameters = tuple(_parameter(p, hints[p.name], reference.__name__) for p in signature.parameters.values())
        declared = Operator(
            name=reference.__name__,
            family=reference.__module__.split(".")[1],
            module=reference.__module__,
            spec=spec,
            phase=phase,
            signature=signature,
            reference=reference,
            plan=plan,
            inputs=inputs,
            cases=tuple(cases),
            workloads=tuple(workloads),
            equality=(equality,) if isinstance(equality, Equality) else tuple(equality),
            mutates=tuple(mutates),
            traffic=traffic,
            finish=finish,
            verify=verify,
            unspecified=unspecified,
            moves_data=moves_data,
            aliases=tuple(aliases),
            peers=tuple(peers),
            variants=tuple(variants),
            parameters=parameters,
        )
        if declared.name in _OPERATORS:
            raise RuntimeError(
                f"operator {declared.name} is declared twice: {_OPERATORS[declared.name].module}, {declared.module}"
            )
        _register(declared)
        object.__setattr__(declared, "public", _public_function(declared))
        _OPERATORS[declared.name] = declared
        return declared.public

    return declare


def load_family(package: str) -> dict[str, Callable[..., Any]]:
    """Import every contract file of a family package and return its public functions by name.

    The functions replace the equally named modules as attributes of the package: ``tk_serving.moe.topk_gate`` is
    the operator.
    """
    namespace = sys.modules[package]
    for info in pkgutil.iter_modules(namespace.__path__):
        if not info.ispkg:
            importlib.import_module(f"{package}.{info.name}")
    family = package.rsplit(".", 1)[-1]
    return {name: op.public for op in _OPERATORS.values() if op.family == family for name in (op.name, *op.aliases)}


def operators(family: str | None = None) -> list[Operator]:
    """All declared operators, or those of one family, in order of declaration."""
    for name in FAMILIES:
        importlib.import_module(f"tk_serving.{name}")
    return [op for op in _OPERATORS.values() if family in (None, op.family)]


def find(name: str) -> Operator:
    """The operator of that name, with or without its family.

    Raises:
        ValueError: no such operator; the message names close ones, if there are any.
    """
    by_name = {known: op for op in operators() for known in (op.name, *op.aliases)}
    family, _, plain = name.rpartition(".")
    found = by_name.get(plain)
    if found is None or family not in ("", found.family):
        import difflib

        close = difflib.get_close_matches(name, by_name, n=3)
        which = f"such as {', '.join(close)}" if close else "(`tk-serving ops` lists them)"
        raise ValueError(f"operator: name: expected a declared operator {which}, got {name!r}")
    return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def _device(args: tuple) -> torch.device:
    return next(tensors_of(args)).device


def _register(op: Operator) -> None:
    _LIBRARY.define(op.schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(op.name, op._impl, key)
    torch.library.register_fake(f"tk_serving::{op.name}", op._fake, lib=_LIBRARY)


def _public_function(op: Operator) -> Callable[..., Any]:
    """The checked public function, generated like a dataclass method so that a call costs no argument binding."""
    names = [f"*, {p.name}" if starts else p.name for p, starts in zip(op.parameters, _keyword_starts(op), strict=True)]
    body, flat = [], []
    for parameter in op.parameters:
        lines, expressions = parameter.code(op.name)
        body += lines
        flat += expressions
    call = f"__op__({', '.join(flat)})"
    arguments = ", ".join(p.name for p in op.parameters)
    body.append(f"return __finish__({call}, {arguments})" if op.finish else f"return __structure__({call})")
    source = f"def {op.name}({', '.join(names)}):\n    " + "\n    ".join(body)
    namespace = {
        "__op__": getattr(torch.ops.tk_serving, op.name).default,
        "__Tensor__": Tensor,
        "__dtype__": torch.dtype,
        "__kind__": _kind,
        "__pair__": _pair,
        "__finish__": op.finish,
        "__structure__": _structure(op._return_type),
    }
    exec(compile(source, f"<tk_serving.{op.qualified_name}>", "exec"), namespace)
    function: Any = functools.update_wrapper(namespace[op.name], op.reference)
    defaults = {p.name: p.default for p in op.signature.parameters.values() if p.default is not p.empty}
    keyword_only = {p.name for p in op.parameters if p.keyword_only}
    function.__defaults__ = tuple(v for k, v in defaults.items() if k not in keyword_only) or None
    function.__kwdefaults__ = {k: v for k, v in defaults.items() if k in keyword_only} or None
    function.operator = op
    return function


def _keyword_starts(op: Operator) -> list[bool]:
    first = next((p.name for p in op.parameters if p.keyword_only), None)
    return [p.name == first for p in op.parameters]


def _parameter(parameter: inspect.Parameter, hint: Any, operator: str) -> _Parameter:
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = list(typing.get_args(hint)) if union else [hint]
    optional = type(None) in options
    options = [o for o in options if o is not type(None)]
    kinds = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", list[Tensor]: "Tensor[]"}
    kinds |= {torch.dtype: "ScalarType", tuple[int, int]: "SymInt[]", list[int]: "SymInt[]", list[bool]: "bool[]"}
    pair = Quantized in options
    plain = [o for o in options if o != Quantized]
    if len(plain) > 1 or (plain and plain[0] not in kinds) or (pair and plain not in ([], [Tensor])):
        raise TypeError(f"operator {operator}: no schema type for {parameter.name}: {hint}")
    return _Parameter(
        parameter.name,
        kinds[plain[0]] if plain else "Tensor",
        optional=optional,
        tensor=bool(plain) and plain[0] is Tensor,
        pair=pair,
        keyword_only=parameter.kind is parameter.KEYWORD_ONLY,
    )


def _kind(operator: str, name: str, value: Any, expected: str) -> Any:
    """Slow path of the kind checks: accept what converts without loss, refuse the rest."""
    if expected == "int" and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    if expected == "float" and isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool):
        return value
    if expected == "ints" and isinstance(value, (tuple, list, torch.Size)):
        return [_kind(operator, name, v, "int") for v in value]
    if expected == "tensors" and isinstance(value, (tuple, list)) and all(isinstance(v, Tensor) for v in value):
        return list(value)
    if expected in ("bool[]",) and isinstance(value, (tuple, list)) and all(type(v) is bool for v in value):
        return list(value)
    words = {"Tensor": "a torch.Tensor", "ints": "integers", "tensors": "a list of torch.Tensor", "bool[]": "booleans"}
    raise TypeError(f"{operator}: {name}: expected {words.get(expected, expected)}, got {type(value).__name__}")


def _pair(operator: str, name: str, value: Any, tensor: bool, optional: bool) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(value, Tensor) and tensor:
        return value, None
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, Tensor) for v in value):
        return value[0], value[1]
    if value is None and optional:
        return None, None
    expected = "a torch.Tensor or a (data, sf) pair of tensors" if tensor else "a (data, sf) pair of tensors"
    got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
    raise TypeError(f"{operator}: {name}: expected {expected}, got {got}")


def _count_tensors(hint: Any) -> int:
    if hint is None or hint is type(None):
        return 0
    if isinstance(hint, types.UnionType):
        return max(_count_tensors(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return sum(_count_tensors(part) for part in typing.get_args(hint))
    return int(hint is Tensor)


def _leaves(hint: Any, value: Any) -> Iterator[Tensor | None]:
    if value is None:
        yield from itertools.repeat(None, _count_tensors(hint))
    elif isinstance(hint, types.UnionType):
        yield from _leaves(next(o for o in typing.get_args(hint) if o is not type(None)), value)
    elif typing.get_origin(hint) is tuple:
        # Results at the end that a call does not ask for may be missing.
        for part, item in itertools.zip_longest(typing.get_args(hint), value):
            yield from _leaves(part, item)
    elif hint is Tensor:
        yield value


def _structure(hint: Any) -> Callable[[Any], Any]:
    """Turns the flat results of the schema into the nested tuples of the declared return type."""
    if typing.get_origin(hint) is not tuple or all(part is Tensor for part in typing.get_args(hint)):
        return lambda flat: flat

    def build(part: Any, values: Iterator[Tensor]) -> Any:
        if typing.get_origin(part) is tuple:
            return tuple(build(item, values) for item in typing.get_args(part))
        return next(values)

    return lambda flat: build(hint, iter(flat))
