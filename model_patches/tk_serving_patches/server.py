"""What the integrations with serving engines share: refusing, reporting, and the folder of the call counters."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import tk_serving
from tk_serving import metrics
from tk_serving.compile import cache
from tk_serving.config import settings
from tk_serving_patches.engine import Ledger, Row, Site

SHARED_LOGGERS = ("tk_serving", "tk_serving_patches")
"""Loggers of the packages below an integration; integrations add their own."""


def refuse(reasons: Sequence[str]) -> None:
    """Stop the start of a server if there is any reason to.

    Raises:
        RuntimeError: the flag cannot be honoured; the message has every reason.
    """
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise RuntimeError(f"--kernel-backend tilekernels cannot be honoured:{lines}")


def check_model(architecture: str, models: Mapping[str, Collection[str]]) -> None:
    """Refuse a model that has no call sites.

    Raises:
        RuntimeError: no table for the model's class.
    """
    if architecture not in models:
        refuse([f"no call sites are known for {architecture}; known models: {', '.join(models)}"])


def unknown_names(sites: Iterable[Site]) -> list[str]:
    """The reason to refuse ``TK_SERVING_DISABLE``, if it names what is neither an operator nor a site."""
    from tk_serving import operator

    known = {op.name for op in operator.operators()} | {site.name for site in sites}
    unknown = sorted(settings.disable - known)
    return [f"TK_SERVING_DISABLE names {', '.join(unknown)}; known: {', '.join(sorted(known))}"] if unknown else []


@functools.cache
def kernel_uuid() -> str:
    """Twelve hexadecimal digits that change with any code that computes results."""
    root = Path(tk_serving.__file__).parent
    return cache.source_digest(root, [root])[:12]


def apply_all(
    ledger: Ledger,
    sites: Iterable[Site],
    architecture: str,
    wanted: Collection[str],
    verdict: Callable[[str], tuple[bool, str]] = lambda site: (False, ""),
) -> list[Row]:
    """Apply the sites that a model uses; the rows of the report for all sites.

    Args:
        ledger: where they are applied.
        sites: all sites of the integration.
        architecture: the model's class.
        wanted: the names of the sites that it uses.
        verdict: by the name of a site, whether measurements speak against it altogether, and what the report says.

    Raises:
        RuntimeError: no call site of the model could be patched.
    """
    for site in sites:
        stock, why = verdict(site.name)
        if site.name not in wanted:
            ledger.apply(site, skip=f"no call in {architecture}", status="not used")
        elif stock:
            ledger.apply(site, skip=why, status="stock")
        else:
            ledger.apply(site, disabled=settings.disable)
    rows = [dataclasses.replace(row, reason=row.reason or verdict(row.site)[1]) for row in ledger.rows()]
    if not any(row.status in ("patched", "switched off") for row in rows):
        refuse(sorted({f"{row.site}: {row.reason}" for row in rows}))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as an aligned text table."""
    cells = [("site", "operator", "status", "reason"), *(dataclasses.astuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def as_dicts(ledger: Ledger) -> list[dict[str, str]]:
    """The rows of the report, for ``metrics.publish`` and other JSON."""
    return [dataclasses.asdict(row) for row in ledger.rows()]


def share_state() -> str:
    """Give the processes of this server a folder for their counters, in ``TK_SERVING_STATE_DIR``; return it."""
    if not settings.state_dir:
        settings.state_dir = tempfile.mkdtemp(prefix="tk-serving-")
        os.environ["TK_SERVING_STATE_DIR"] = settings.state_dir
        atexit.register(_remove, settings.state_dir, os.getpid())
    metrics.clear(settings.state_dir)
    return settings.state_dir


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def share_log_handlers(theirs: logging.Logger, *ours: str) -> None:
    """Show what tk-serving logs where the engine logs."""
    for name in (*SHARED_LOGGERS, *ours):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(theirs.handlers)
            logger.setLevel(theirs.level)
            logger.propagate = False
