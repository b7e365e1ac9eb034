"""DeepSeek-V4 in vLLM's real CPU engine: with the flag as without, and no wrong operator goes unnoticed.

The model is tiny; operators that vLLM's CPU build has for AVX-512 only come from v4_on_cpu.py.
"""

import pytest
from vllm_process import v4_result

from tk_serving.bench.e2e import alternate

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

LIMIT = 5e-2  # of log-probabilities; bf16 rounds in other places
SITES = {
    "mhc_pre_fused": "mhc-pre",
    "mhc_post_pre_fused": "mhc-post-pre",
    "mhc_post": "mhc-post",
    "mhc_head_fused": "mhc-head",
    "moe_topk_gate": "routing",
    "swiglu_forward": "swiglu-clamp",
}
EXPERTS = {"get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return v4_result("v4_engine.py", tmp_path_factory.mktemp("v4"), timeout=1400)


def apart(ours, theirs):
    pairs = zip(ours["positions"], theirs["positions"], strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


@pytest.mark.parametrize("form", ["plain", "fused"])
def test_the_flag_changes_no_token_and_log_probabilities_hardly(result, form):
    assert result[form]["tokens"] == result["stock"]["tokens"]
    assert 0 < apart(result[form], result["stock"]) < LIMIT


@pytest.mark.parametrize(
    ("form", "operators"),
    [
        ("plain", {"mhc_pre_fused", "mhc_post", "mhc_head_fused", "moe_topk_gate"} | EXPERTS),
        ("fused", {"mhc_pre_fused", "mhc_post_pre_fused", "mhc_post", "mhc_head_fused", "moe_topk_gate"} | EXPERTS),
    ],
)
def test_every_call_ran_our_operator(result, form, operators):
    counters = result[form]["counters"]
    assert {row["implementation"] for row in counters} == {"reference"}
    assert {row["operator"] for row in counters} == operators


def test_every_site_agrees_with_vllm(result):
    seen = {row["site"]: row for row in result["right"]}
    assert seen.keys() == set(SITES.values())
    assert [row for row in seen.values() if row["beyond"] or not row["calls"]] == []


def test_a_wrong_operator_is_caught_and_its_site_is_named(result):
    named = {op: run["first"] for op, run in result["wrong"].items() if op in SITES}
    assert named == SITES


def test_wrong_experts_are_caught_in_the_output(result):
    for operator in ("expand_to_fused", "reduce_fused"):
        assert apart(result["wrong"][operator]["answers"], result["fused"]) > 1e-3, operator


def test_where_the_engine_agrees_with_itself_the_bounds_tell_right_from_wrong(result):
    """With sublayers that add less, what one rounding does to stock is within the bounds; so are ours, and no operator
    that is off by a tenth, except where the last norm takes a factor out again."""
    damped = result["damped"]
    right = alternate.judged(damped["ours"].pop(""), damped["stock"], {"embedding moved": damped["moved"]})
    assert right["bounds_apply"], right
    assert right["agree"], right
    caught = {op: not alternate.differences(out, damped["stock"])["agree"] for op, out in damped["ours"].items()}
    unseen = {"mhc_post", "mhc_head_fused", "get_fused_mapping"}  # the last has no floating-point results
    assert caught == {op: op not in unseen for op in caught}
    assert len(caught) > len(unseen) + 4
