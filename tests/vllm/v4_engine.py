"""Run by test_deepseek_v4: vLLM's CPU engine serves a tiny DeepSeek-V4, stock, ours, and ours with wrong operators.

Arguments: folder of the configuration. Prints one line ``RESULT {json}``.
"""

import contextlib
import dataclasses
import json
import sys

import torch
import v4_on_cpu
from torch import Tensor

from tk_serving import dispatch
from tk_serving.bench.e2e import engine
from tk_serving.bench.e2e.weights import register_vllm_loader
from tk_serving.config import settings
from tk_serving_patches import comparing

PROMPTS = [[7 * i % 509 + 2 for i in range(n)] for n in (11, 3, 30)]
DAMPING = 5
ON, OFF = {"kernel_backend": "tilekernels"}, {}


def build(folder, additional_config):
    from vllm import LLM

    return LLM(
        model=folder,
        load_format=register_vllm_loader(),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        additional_config=additional_config,
    )


def answers(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    firsts = [o.outputs[0] for o in outputs]
    return {
        "tokens": [list(o.token_ids) for o in firsts],
        "positions": [{str(t): p.logprob for t, p in at.items()} for o in firsts for at in o.logprobs],
    }


@contextlib.contextmanager
def wrong(operator):
    """One operator computes results that are off by five percent."""
    original = dispatch._run_reference

    def run_reference(op, plan, args, device):
        outputs = original(op, plan, args, device)
        if op.name != operator:
            return outputs
        return [o * 1.05 if isinstance(o, Tensor) and o.is_floating_point() else o for o in outputs]

    dispatch._run_reference = run_reference
    try:
        yield
    finally:
        dispatch._run_reference = original


class OnCpu(engine.Engine):
    """The end-to-end benchmark's view of an engine."""

    def __init__(self, llm):
        super().__init__()
        self.llm = llm

    @property
    def model(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.get_model()

    def generate(self, *_, **__):
        raise NotImplementedError

    def outputs(self):
        found = answers(self.llm)
        texts, at = found["tokens"], iter(found["positions"])
        return {"tokens": texts, "logprobs": [[next(at) for _ in text] for text in texts]}


def main():
    import vllm.models.deepseek_v4.cpu.model as model

    folder = sys.argv[1]
    v4_on_cpu.install()
    llm = build(folder, OFF)
    result = {"stock": answers(llm)}
    stock = OnCpu(llm)  # before the sites are applied to this process
    result["damped"] = {"stock": stock.outputs_damped(DAMPING), "moved": stock.outputs_moved(0.01, DAMPING)}
    for fused in (False, True):
        model.HAS_TILELANG_MHC = fused  # the CPU's model has the fused form of CUDA's, which this flag chooses
        dispatch.reset_counters()
        on = answers(build(folder, ON))
        from tk_serving_vllm import activate

        on["counters"] = dispatch.counters()
        on["rows"] = [dataclasses.astuple(row) for row in activate.ledger.rows()]
        result["fused" if fused else "plain"] = on
    settings.compare = True
    llm = build(folder, ON)
    comparing.reset()
    answers(llm)
    result["right"] = comparing.rows()
    operators = {row["operator"] for form in ("fused", "plain") for row in result[form]["counters"]}
    for operator in sorted(operators):
        comparing.reset()
        with wrong(operator):
            changed = answers(llm)
        result.setdefault("wrong", {})[operator] = {"first": comparing.first(), "answers": changed}
    result["damped"]["ours"] = OnCpu(llm).wrong(sorted(operators), 1.1, [DAMPING])[str(DAMPING)]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    with torch.no_grad():
        main()
