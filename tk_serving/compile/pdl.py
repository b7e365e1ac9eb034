"""Programmatic dependent launch: a kernel is launched before the one before it has ended, and waits for that itself.

Every thread of every block waits before all else, so whatever a kernel reads was written and whatever it overwrites was
read; launches of other libraries may stand before and behind it, whether they use this or not. Only then it lets the
next launch begin: a kernel that has begun to work is behind all launches before it, so a chain of early ones stays in
order; a launch that says ``trigger_last`` does so at its end. One pass puts this into all kernels but those whose
launch says ``pdl=False``, and those that wait themselves.

TileLang then declares pointers without ``__restrict__``, as the compiler could read before the wait otherwise. Kernels
whose loads have to overtake their stores lose more by that than they gain.
"""

from __future__ import annotations

from typing import Any


def waiting(prim_func: Any, trigger_last: bool = False) -> Any:
    """The same function with the wait at its start, and the trigger there or at its end.

    TileLang then asks for the early launch.

    Raises:
        ValueError: it has no kernel, or several.
    """
    import tilelang.language as T  # noqa: N812  the custom of TileLang
    from tilelang import tvm

    found = []

    def visit(node: Any) -> Any:
        if node.name_hint != "tilelang_root":
            return None
        found.append(node)
        wait, trigger = (tvm.tirx.Evaluate(call) for call in (T.pdl_sync(), T.pdl_trigger()))
        body = tvm.tirx.SeqStmt([wait, node.body, trigger] if trigger_last else [wait, trigger, node.body])
        rest = (node.init, node.alloc_buffers, node.match_buffers, node.annotations)
        return type(node)(node.iter_vars, node.reads, node.writes, node.name_hint, body, *rest)

    body = tvm.tirx.stmt_functor.ir_transform(prim_func.body, None, visit, ["tirx.SBlock"])
    if len(found) != 1:
        raise ValueError(f"{prim_func.attrs['global_symbol']}: expected one kernel, got {len(found)}")
    return prim_func.with_body(body)
