"""What :func:`apply` returns: the changes, their report, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from tk_serving_patches.engine import PATCHED, Ledger, PatchError
from tk_serving_patches.transformers import _calls


@dataclass(frozen=True)
class SiteReport:
    """One line of the report.

    Attributes:
        family: ``deepseek_v4``, ...
        site: name of the site.
        operators: the operators that take over.
        status: ``patched``, ``skipped``, ``switched off`` or ``not used by this model``.
        modules: number of modules changed; 0 for a change to a class.
        reason: why the site was not applied; for a patched one, which modules were left alone, and why.
        left: calls that transformers' own code ran all the same, in this process since :func:`apply`, by reason.
    """

    family: str
    site: str
    operators: tuple[str, ...]
    status: str
    modules: int
    reason: str
    left: dict[str, int]


class Report(tuple[SiteReport, ...]):
    """The lines of the report; ``str`` gives a table."""

    def __str__(self) -> str:
        head = ("family", "site", "status", "modules", "reason")
        lines = [head]
        for row in self:
            lines.append((row.family, row.site, row.status, str(row.modules or ""), row.reason))
            lines += [("", "", "", "", f"{calls} calls left to transformers: {why}") for why, calls in row.left.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    @property
    def patched(self) -> list[str]:
        """Names of the patched sites."""
        return [row.site for row in self if row.status == PATCHED]


class PatchHandle:
    """The changes of one call of :func:`apply`. As a context manager it reverts them at the end.

    Changes that were there before belong to the handle of the earlier call.
    """

    def __init__(self, ledgers: dict[str, Ledger], rows: Sequence[SiteReport]) -> None:
        self._ledgers = ledgers
        self._rows = rows
        self._left_before = _calls.left()

    def report(self) -> Report:
        """What became of every site, and the calls that stayed with transformers since."""
        left: dict[str, dict[str, int]] = {}
        for (site, reason), calls in _calls.left().items():
            since = calls - self._left_before.get((site, reason), 0)
            if since:
                left.setdefault(site, {})[reason] = since
        return Report(replace(row, left=left.get(row.site, {})) for row in self._rows)

    def foreign(self) -> list[str]:
        """Forwards that other code has replaced since; calls may no longer reach the operators."""
        return [target for ledger in self._ledgers.values() for target in ledger.foreign()]

    def revert(self) -> None:
        """Undo the changes, last first. A second call does nothing.

        Raises:
            PatchError: other code replaced some of the forwards since. They stay as they are; all others are restored.
        """
        errors = []
        for ledger in reversed(list(self._ledgers.values())):
            try:
                ledger.revert()
            except PatchError as error:
                errors.append(str(error))
        if errors:
            raise PatchError("; ".join(errors))

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def __repr__(self) -> str:
        patched = sum(row.status == PATCHED for row in self._rows)
        return f"<PatchHandle: {patched} of {len(self._rows)} sites patched>"
