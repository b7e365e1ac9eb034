"""Run by test_two_ranks: vLLM's CPU engine serves a tiny DeepSeek-V4 with two worker processes, stock and ours.

Arguments: folder of the configuration. Prints one line ``RESULT {json}``.
"""

import json
import os
import sys

import v4_on_cpu

from tk_serving.bench.e2e import worker

v4_on_cpu.install()  # here, as workers import this file before they register kernels

TEXTS = {"sequences": 3, "prompt": 20, "tokens": 6}
DAMPING = 5
WRONG = ["mhc_pre_fused", "moe_topk_gate", "reduce_fused"]


class Extension(worker.Extension):
    """Without the device's events."""

    def tk_time_steps(self):
        pass

    def tk_steps(self):
        return []


def build(folder, backend):
    from tk_serving.bench.e2e.vllm import Parallel

    arguments = {
        "tensor_parallel_size": 2,
        "worker_extension_cls": "v4_two_ranks.Extension",
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": 64 << 20,
    }
    given = {"folder": folder, "backend": backend, "sizes": [4], "prefill": 32, "steps": 16, "eager": True}
    return Parallel({**given, "arguments": arguments})


def main():
    folder = sys.argv[1]
    engine = build(folder, "auto")
    result = {
        "stock": engine.outputs_damped(DAMPING, **TEXTS),
        "moved": engine.outputs_moved(0.01, DAMPING, **TEXTS),
        "stock state": engine.state(),
    }
    engine.llm.llm_engine.engine_core.shutdown()
    os.environ["TK_SERVING_COMPARE"] = "1"  # for the workers
    engine = build(folder, "tilekernels")
    engine.forget_compared()
    result["ours"] = engine.outputs_damped(DAMPING, **TEXTS)
    result |= {"compared": engine.compared(), "state": engine.state()}
    result["wrong"] = engine.wrong(WRONG, 1.1, [DAMPING], **TEXTS)[str(DAMPING)]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
