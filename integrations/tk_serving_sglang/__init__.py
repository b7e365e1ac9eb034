"""The SGLang plugin: ``--kernel-backend tilekernels``."""


def register() -> None:
    """Entry point of ``sglang.srt.plugins``; SGLang calls it once in every process it starts itself.

    Adds the flag and nothing else. The call sites are patched in the schedulers, once their configuration says so.

    SGLang logs what a plugin raises and goes on with its own kernels. Without the flag's field that cannot pass
    unnoticed: the option is then unknown, and the arguments that carry it cannot be made.
    """
    from tk_serving_sglang import flag

    flag.install()
