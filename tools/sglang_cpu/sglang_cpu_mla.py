"""MLA attention on SGLang's ``torch_native`` backend.

For a prefill without a prefix the backend chooses the form of attention with keys and values of each head, but its
cache holds latents only: the first prompt fails on their shapes. The absorbed form works.
"""


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
