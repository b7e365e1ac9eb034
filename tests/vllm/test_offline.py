"""The plugin in a real engine, offline: several engines one after the other in one process."""

import json
import textwrap

import pytest
import vllm_process

from tk_serving.demo import LIMIT, checkpoint
from tk_serving.demo.engines.vllm import EXPECTED

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCRIPT = """
    import json, sys
    from vllm import LLM, SamplingParams

    def answers(model, switched_off, additional_config):
        from tk_serving import dispatch
        from tk_serving.config import settings

        settings.disable = frozenset(switched_off)
        dispatch.reset_counters()
        llm = LLM(model=model, enforce_eager=True, max_model_len=128, dtype="bfloat16", max_num_seqs=4,
                  max_num_batched_tokens=128, additional_config=additional_config)
        sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=20, ignore_eos=True)
        outputs = [o.outputs[0] for o in llm.generate(["the quick brown fox", "a"], sampling)]
        positions = [{t: p.logprob for t, p in position.items()} for o in outputs for position in o.logprobs]
        activate = sys.modules.get("tk_serving_vllm.activate")
        return {
            "tokens": [o.token_ids for o in outputs],
            "positions": positions,
            "counters": dispatch.counters(),
            "rows": [[r.site, r.operator, r.status, r.reason] for r in activate.ledger.rows()] if activate else [],
        }

    model, runs = sys.argv[1], json.loads(sys.argv[2])
    print("RESULT " + json.dumps([answers(model, *run) for run in runs]))
"""

ON = {"kernel_backend": "tilekernels"}


def engines(model, runs, **environment):
    script = textwrap.dedent(SCRIPT)
    return vllm_process.result("-c", script, str(model), json.dumps(runs), timeout=500, **environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint.write("v3", tmp_path_factory.mktemp("model"))


def test_flag_on_and_off_in_one_process(model):
    (stock,) = engines(model, [[[], {}]], VLLM_PLUGINS="none")
    sites = ["routing", "routed-experts", "swiglu"]
    absent, on, auto, off, partly, again = engines(
        model,
        [[[], {}], [[], ON], [[], {"kernel_backend": "auto"}], [sites, ON], [["reduce_fused"], ON], [[], ON]],
    )

    # Without the flag, and with every site switched off: vLLM bit for bit.
    for other in (absent, auto, off):
        assert other["tokens"] == stock["tokens"]
        assert other["positions"] == stock["positions"]
        assert other["counters"] == []
    assert absent["rows"] == auto["rows"] == []
    assert {row[2] for row in off["rows"] if row[0] in sites} == {"switched off"}

    # With the flag: the same tokens and nearly the same log-probabilities, from our operators.
    assert on["tokens"] == stock["tokens"]
    assert on["positions"] != stock["positions"]
    for mine, theirs in zip(on["positions"], stock["positions"], strict=True):
        shared = mine.keys() & theirs.keys()
        assert len(shared) >= 15
        assert max(abs(mine[token] - theirs[token]) for token in shared) < LIMIT
    assert {row["operator"] for row in on["counters"]} == set(EXPECTED["cpu"])
    assert all(row["implementation"] == "reference" and row["calls"] > 0 for row in on["counters"])
    assert {row[0] for row in on["rows"] if row[2] == "patched"} == set(sites)
    assert again["positions"] == on["positions"]

    # One operator switched off takes its whole site with it, and no other.
    status = {(row[0], row[1]): (row[2], row[3]) for row in partly["rows"]}
    assert status["routed-experts", "swiglu_forward"] == ("switched off", "reduce_fused is in TK_SERVING_DISABLE")
    assert status["swiglu", "swiglu_forward"] == ("patched", "")
    assert {row["operator"] for row in partly["counters"]} == {"top2_sum_gate", "swiglu_forward"}


def test_a_failing_plugin_stops_the_engine(model):
    with pytest.raises(AssertionError) as stopped:
        engines(model, [[["no-such-site"], ON]])
    assert "--kernel-backend tilekernels cannot be honoured" in str(stopped.value)
    assert "TK_SERVING_DISABLE names no-such-site; known: " in str(stopped.value)
