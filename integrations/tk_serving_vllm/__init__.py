"""The vLLM plugin: ``--kernel-backend tilekernels``."""


def register() -> None:
    """Entry point of ``vllm.general_plugins``; vLLM calls it once in every process.

    Adds the flag and nothing else. The call sites are patched in the workers, once their configuration says so. vLLM
    swallows exceptions while it imports a plugin, but not those of this function, so everything is imported here.
    """
    from tk_serving_vllm import flag

    flag.install()
