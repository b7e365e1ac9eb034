"""What vLLM's CPU build lacks for a tiny DeepSeek-V4, in plain torch.

The CPU build has the model, but the operators of its layers only for AVX-512, and there for full sizes.
:func:`install` has others on every machine: those of hyper-connections, routing and sliding-window attention, three
metadata kernels that are written in Triton, and the keys that the metadata builder of the CPU leaves out. For models
without compressed attention, and not for speed.
"""

import collections

import torch
from torch import Tensor

NOPE, ROTARY, GROUP = 448, 64, 64
ROW = NOPE + 2 * ROTARY  # bytes of a cached token: FP8 channels, then rotary channels in bfloat16
SCALES = 8  # bytes of scales for each cached token, of which seven are used

_libraries: list[torch.library.Library] = []


# -- hyper-connections: vLLM's own torch forms, under the names of its AVX-512 operators ---------------------------


def hc_pre(x, fn, scale, base, mult: int, iterations: int, rms_eps: float, eps: float):
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, layer_input = mhc_pre_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iterations)
    return layer_input, post.reshape(-1, mult), comb.reshape(-1, mult, mult)


def hc_post(x, residual, post, comb):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post.unsqueeze(-1), comb)


def hc_head(x, fn, scale, base, eps: float, norm_eps: float):
    streams = x.float()
    flat = streams.flatten(-2)
    mixes = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    gates = torch.sigmoid(mixes * scale + base) + eps
    return (gates.unsqueeze(-1) * streams).sum(-2).to(x.dtype)


# -- routing -------------------------------------------------------------------------------------------------------


def _scores(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits.float()).sqrt()


def _chosen(scores: Tensor, ids: Tensor, factor: float | None):
    weights = scores.gather(1, ids.long())
    return weights / weights.sum(-1, keepdim=True) * (factor or 1.0), ids.int()


def biased_topk(hidden, gating, bias, topk: int, renormalize, scoring, shared, factor, on_output):
    scores = _scores(gating)
    return _chosen(scores, (scores + bias.float()).topk(topk, -1).indices, factor)


def hash_topk(gating, ids, topk, scoring, shared, experts, factor):
    return _chosen(_scores(gating), ids, factor)


# -- attention over a paged cache of sliding windows ----------------------------------------------------------------


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate even and odd neighbours among the last channels."""
    cos, sin = cos_sin[positions].float().chunk(2, -1)
    sin = -sin if inverse else sin
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., -ROTARY:][..., 0::2], x[..., -ROTARY:][..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-ROTARY], turned], -1)


def qnorm_rope_insert(q, kv, positions, cache, slots, cos_sin, heads: int, eps: float, block: int):
    normed = q.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    tokens = slots.numel()
    kept = slots >= 0
    keys, place = _rotate(kv[:tokens].float(), positions[:tokens], cos_sin)[kept], slots[kept]
    groups = keys[:, :NOPE].view(-1, NOPE // GROUP, GROUP)
    exponent = (groups.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil()
    codes = (groups / torch.exp2(exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).view(-1, NOPE)
    rotary = keys[:, NOPE:].bfloat16().contiguous()
    page, row = (place // block).unsqueeze(1), (place % block).unsqueeze(1)
    cache[page, row * ROW + torch.arange(ROW)] = torch.cat([codes.view(torch.uint8), rotary.view(torch.uint8)], 1)
    cache[page, block * ROW + row * SCALES + torch.arange(7)] = (exponent + 127).to(torch.uint8)
    return _rotate(normed, positions, cos_sin).to(q.dtype)


def sparse_attention(out, q, cache, slots, block: int, compressed, compressed_slots, compressed_block, sink, scale):
    assert compressed_slots.numel() == 0, "compressed layers are not covered"
    valid, place = slots >= 0, slots.clamp(min=0)
    page, row = (place // block).unsqueeze(-1), (place % block).unsqueeze(-1)
    raw = cache[page, row * ROW + torch.arange(ROW)]
    exponent = cache[page, block * ROW + row * SCALES + torch.arange(7)].float() - 127
    codes = raw[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(*place.shape, 7, GROUP)
    rotary = raw[..., NOPE:].contiguous().view(torch.bfloat16).float()
    keys = torch.cat([(codes * torch.exp2(exponent).unsqueeze(-1)).flatten(-2), rotary], -1)
    logits = torch.einsum("nhd,nwd->nhw", q.float(), keys) * scale
    logits = logits.masked_fill(~valid.unsqueeze(1), float("-inf"))
    sinks = sink[: q.shape[1]].view(1, -1, 1).expand(q.shape[0], -1, 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    out.copy_(torch.einsum("nhw,nwd->nhd", weights, keys))


def bmm(out, a, b, packed, scale):
    out.copy_(torch.bmm(a.float(), b.float().transpose(1, 2)))


def inverse_rope(o, positions, cos_sin, width):
    return _rotate(o.float(), positions, cos_sin, inverse=True)


OPERATORS = {
    "hc_pre_fused_cpu(Tensor x, Tensor fn, Tensor scale, Tensor base, int mult, int iterations, float rms_eps, "
    "float eps) -> (Tensor, Tensor, Tensor)": hc_pre,
    "hc_post_fused_cpu(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor": hc_post,
    "hc_head_fused_cpu(Tensor x, Tensor fn, Tensor scale, Tensor base, float eps, float norm_eps) -> Tensor": hc_head,
    "biased_topk_cpu(Tensor hidden, Tensor gating, Tensor bias, int topk, bool renormalize, str scoring, int shared, "
    "float? factor, bool on_output) -> (Tensor, Tensor)": biased_topk,
    "hash_topk_cpu(Tensor gating, Tensor ids, int topk, str scoring, int shared, int experts, float factor) -> "
    "(Tensor, Tensor)": hash_topk,
    "bmm_cpu(Tensor(a!) out, Tensor a, Tensor b, bool packed, Tensor? scale) -> ()": bmm,
    "convert_weight_packed(Tensor weight) -> Tensor": torch.clone,
    "flash_mla_with_kvcache_cpu(Tensor(a!) out, Tensor q, Tensor cache, Tensor slots, int block, Tensor compressed, "
    "Tensor compressed_slots, int compressed_block, Tensor sink, float scale) -> ()": sparse_attention,
    "fused_qnorm_rope_kv_insert_cpu(Tensor q, Tensor kv, Tensor positions, Tensor(a!) cache, Tensor slots, "
    "Tensor cos_sin, int heads, float eps, int block) -> Tensor": qnorm_rope_insert,
    "inverse_gptj_rope_o_proj_cpu(Tensor o, Tensor positions, Tensor cos_sin, int width) -> Tensor": inverse_rope,
}


def install() -> None:
    """Complete the CPU build of this process; its own operators for AVX-512 take models of full size only."""
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    current_platform.import_kernels()
    if _libraries:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for schema, function in OPERATORS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
        library.impl(name, function, "CPU")
    original = CpuPlatform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls):
        original(cls)
        _replace_metadata_kernels()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def _replace_metadata_kernels() -> None:
    """In the worker, where the modules of the model can be imported."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.triton_utils.dispatcher import register_kernels

    def token_request(query_start_loc, output, num_reqs, num_mapped, num_tokens, **_):
        token = torch.arange(num_tokens)
        ends = query_start_loc[1 : num_reqs + 1].long().contiguous()
        request = torch.searchsorted(ends, token, right=True).clamp(max=num_reqs - 1)
        output[:num_tokens] = torch.where(token < num_mapped, request, 0).to(output.dtype)

    def unused(*_, **__):
        """The CPU's attention does not read what this kernel writes."""

    register_kernels(
        {
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": token_request,
            "vllm.v1.attention.backends.mla.sparse_swa.ComputePrefillMetadataKernel.kernel": unused,
            "vllm.v1.attention.backends.mla.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": unused,
        }
    )
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    original = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, n: collections.defaultdict(lambda: None, original(self, n))
