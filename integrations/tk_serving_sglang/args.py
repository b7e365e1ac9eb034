"""SGLang's arguments with one more field. Imported only where SGLang's own are."""

# No postponed annotations: SGLang reads the field's at class creation.

from typing import Any, Literal

from sglang.srt import server_args as engine
from sglang.srt.arg_groups.arg_utils import NS, A, Arg

from tk_serving.config import settings

_Base: Any = engine.ServerArgs


class ServerArgs(_Base):
    """Takes the place of SGLang's class, so that parsing, pickling, publication and ``/server_info`` know the field."""

    kernel_backend: A[
        Literal["auto", "tilekernels"],
        Arg(
            help="'tilekernels' replaces the operators around the matrix products by those of tk-serving; "
            "'auto' leaves SGLang as it is (default: TK_SERVING_KERNEL_BACKEND, else auto)"
        ),
        NS("exec.kernel"),
    ] = settings.kernel_backend

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_backend not in ("auto", "tilekernels"):  # Engine(kernel_backend=...) passes no parser
            raise ValueError(f"kernel_backend: expected one of auto, tilekernels, got {self.kernel_backend!r}")

    def resolve_once(self) -> None:
        first = not getattr(self, "_resolution_finished", False)
        super().resolve_once()
        if first and self.kernel_backend == "tilekernels":
            from tk_serving_sglang import activate

            activate.prepare(self)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return _restore, (rebuild, *arguments)


def _restore(rebuild: Any, *arguments: Any) -> Any:
    """Unpickle, after adding the flag to this process: Ray actors and tokenizer workers load no plugins."""
    from tk_serving_sglang import flag

    flag.watch_publication()
    return rebuild(*arguments)
