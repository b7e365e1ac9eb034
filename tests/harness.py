"""One case of one operator against its reference, by any implementation on any device.

Rings 2 and 3 share it: ``check(op, "simulator", params)`` on CPU tensors and, on a GPU,
``check(op, "kernel", params, device="cuda")``. Everything comes from the declaration of the operator, so a new operator
needs no test of its own here.
"""

import contextlib

import torch
from torch import Tensor

from tk_serving import dispatch
from tk_serving.compare import BITWISE, Equality, Steps
from tk_serving.operator import Operator, tensors_of
from tk_serving.plan import Existing, Out, Plan
from tk_serving.workloads import Maker

_LARGE = 1 << 28


class UncoveredError(Exception):
    """The contract allows the call, but no kernel covers it; the message is the plan's reason."""


def check(
    op: Operator, implementation: str, params: dict, *, device: str = "cpu", misalign: bool = False, seed: int = 0
) -> None:
    """Compare the named implementation with the reference on the inputs of one parameter set; see :func:`compare`."""
    args = op.bind(*op.inputs(Maker(device, seed, misalign), **params))
    compare(op, implementation, args, device, f"{op.qualified_name} {params}")


def compare(op: Operator, implementation: str, original: tuple, device: str = "cpu", label: str = "") -> None:
    """Run one call by the named implementation and by the reference, and compare everything they leave behind.

    Compared are the results, the mutated arguments, the padding that belongs to the results, and every other byte of
    the arguments' storage, which neither side may change. Outputs start as NaN or rare integers, so that an element
    which nobody writes is seen.

    Raises:
        AssertionError: a difference, in one line that starts with ``label``.
        UncoveredError: no kernel covers the call.
    """
    label = label or op.qualified_name
    plan = op.plan(*original)
    if plan.refusal is not None:
        raise UncoveredError(plan.refusal)
    fresh = _output_only(op, plan, original, torch.device(device))
    sides = {}
    for name in (implementation, "reference"):
        args = clone(op, plan, original)
        own = op.plan(*args)
        for tensor, output_only in zip(_existing(op, own, args), fresh, strict=True):
            if output_only:
                poison(tensor)
        with poisoned_outputs():
            results = dispatch.run(op, own, args, torch.device(device), name)
        if device == "cuda":
            torch.cuda.synchronize()
        if op.unspecified is not None:
            op.unspecified(results, *args)
        sides[name] = (args, results)
    (args, results), (expected_args, expected) = sides[implementation], sides["reference"]
    for what, got, want, rule in _pairs(op, plan, args, results, expected_args, expected):
        if isinstance(rule, Steps) and device == "cuda":
            rule = BITWISE  # both sides use the same exp there
        difference = _difference(rule, got, want)
        assert difference is None, f"{label}: {what}: {difference}"
    for name, (side_args, _) in sides.items():
        changed = _changed_elsewhere(op, plan, side_args, original)
        assert changed is None, f"{label}: the {name} changed {changed}, which it must not"


def _pairs(op, plan, args, results, expected_args, expected):
    """(what, actual, expected, rule) for everything that a call defines."""
    compared = [(f"result {i}", got, want) for i, (got, want) in enumerate(zip(results, expected, strict=True))]
    results_in = {got.data_ptr() for got in results if got is not None}
    for name in op.mutates:
        index = [p.name for p in op.parameters].index(name)
        pairs = zip(tensors_of(args[index]), tensors_of(expected_args[index]), strict=True)
        compared += [(f"argument {name}", got, want) for got, want in pairs if got.data_ptr() not in results_in]
    rules = op.equality * len(compared) if len(op.equality) == 1 else op.equality
    assert len(rules) >= len(compared), (
        f"{op.qualified_name}: {len(rules)} equality rules for {[what for what, *_ in compared]}"
    )
    for i, ((what, got, want), rule) in enumerate(zip(compared, rules, strict=False)):
        yield what, got, want, rule
        slot = plan.outputs[i] if i < len(plan.outputs) else None
        if isinstance(slot, Out) and slot.storage is not None:
            flat = ((slot.storage,), (1,))
            yield f"storage of {what}, padding included", got.as_strided(*flat), want.as_strided(*flat), rule


def _difference(rule: Equality, got: Tensor | None, want: Tensor | None) -> str | None:
    if got is None or want is None:
        return None if got is want else f"{got} instead of {want}"
    return rule.difference(got, want)


def _existing(op: Operator, plan, args: tuple) -> list[Tensor | None]:
    """For each result the caller-owned tensor that holds it, if it is one."""
    names = [p.name for p in op.parameters]
    found = []
    for slot in plan.outputs:
        value = args[names.index(slot.argument)] if isinstance(slot, Existing) else None
        found.append(value[slot.index] if value is not None and slot.index is not None else value)
    return found


def _output_only(op: Operator, plan, original: tuple, device: torch.device) -> list[bool]:
    """For each result whether the caller owns it and its content before the call does not matter to the reference."""
    owned = [tensor is not None for tensor in _existing(op, plan, original)]
    if not any(owned):
        return owned
    without, with_poison = clone(op, plan, original), clone(op, plan, original)
    for tensor in _existing(op, plan, with_poison):
        if tensor is not None:
            poison(tensor)
    results = [dispatch.run(op, op.plan(*args), args, device, "reference") for args in (without, with_poison)]
    return [
        mine and BITWISE.difference(*pair) is None for mine, pair in zip(owned, zip(*results, strict=True), strict=True)
    ]


def _changed_elsewhere(op: Operator, plan, args: tuple, original: tuple) -> str | None:
    """The first argument whose storage changed outside the tensors that the call may write."""
    names = [p.name for p in op.parameters]
    masks: dict[int, Tensor] = {}
    for tensor in _writable(op, plan, args):
        whole = _bytes(tensor)
        mask = masks.setdefault(whole.data_ptr(), torch.zeros_like(whole, dtype=torch.bool))
        size = tensor.element_size()
        elements = mask.as_strided(
            (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1), tensor.storage_offset() * size
        )
        elements.fill_(True)
    for name, value, before in zip(names, args, original, strict=True):
        for tensor, old in zip(tensors_of(value), tensors_of(before), strict=True):
            whole = _bytes(tensor)
            if whole.data_ptr() == _bytes(old).data_ptr():
                continue
            same = whole == _bytes(old)
            if whole.data_ptr() in masks:
                same |= masks[whole.data_ptr()]
            if not bool(same.all()):
                return f"argument {name}"
    return None


def clone(op: Operator, plan: Plan, args: tuple) -> tuple:
    """The arguments with every storage copied whole: views keep their strides, offsets and common storage.

    Read-only storages beyond 256 MiB, of views with huge strides, are not copied but shared.
    """
    written = {_bytes(tensor).data_ptr() for tensor in _writable(op, plan, args)}
    copies: dict[int, Tensor] = {}

    def copy(value):
        if isinstance(value, Tensor):
            whole = _bytes(value)
            if whole.data_ptr() not in copies:
                shared = whole.numel() > _LARGE and whole.data_ptr() not in written
                copies[whole.data_ptr()] = whole if shared else whole.clone()
            storage = copies[whole.data_ptr()].untyped_storage()
            return torch.empty(0, dtype=value.dtype, device=value.device).set_(
                storage, value.storage_offset(), value.shape, value.stride()
            )
        if isinstance(value, (tuple, list)):
            return type(value)(copy(item) for item in value)
        return value

    return copy(args)


def _writable(op: Operator, plan: Plan, args: tuple) -> list[Tensor]:
    """The arguments that the call may write."""
    names = [p.name for p in op.parameters]
    found = [tensor for tensor in _existing(op, plan, args) if tensor is not None]
    for name in op.mutates:
        found += tensors_of(args[names.index(name)])
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor, strided or not, with NaN; with 0xa5 bytes where the type has none."""
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return tensor.fill_(float("nan"))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    byte = 0xFF if tensor.is_floating_point() else 0xA5
    value = int.from_bytes([byte] * tensor.dtype.itemsize, "little", signed=integer is not torch.uint8)
    tensor.view(integer).fill_(value)
    return tensor


@contextlib.contextmanager
def poisoned_outputs():
    """Plans allocate outputs and scratch tensors that start as poison, padding included."""
    empty = Out.empty

    def filled(self, device):
        out = empty(self, device)
        poison(out if self.storage is None else out.as_strided((self.storage,), (1,)))
        return out

    Out.empty = filled
    try:
        yield
    finally:
        Out.empty = empty
