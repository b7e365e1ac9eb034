"""Tensor parallelism: vLLM's CPU engine with two worker processes, and ranks that share one GPU."""

import os

import pytest
from vllm_process import v4_result

from tk_serving.bench.e2e import alternate

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

OPERATORS = {
    "mhc_pre_fused",
    "mhc_post",
    "mhc_head_fused",
    "moe_topk_gate",
    "get_fused_mapping",
    "expand_to_fused",
    "swiglu_forward",
    "reduce_fused",
}
SITES = {"mhc-pre", "mhc-post", "mhc-head", "routing", "swiglu-clamp"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return v4_result(
        "v4_two_ranks.py",
        tmp_path_factory.mktemp("v4"),
        timeout=800,
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_HOST_IP="127.0.0.1",
    )


def test_the_output_is_the_engines(result):
    found = alternate.judged(result["ours"], result["stock"], {"embedding moved": result["moved"]})
    assert found["bounds_apply"], found
    assert found["agree"], found
    assert found["max_logprob_diff"] > 0


def test_every_call_of_every_rank_ran_our_operator(result):
    assert [rank["counters"] for rank in result["stock state"]["ranks"]] == [[], []]
    ranks = result["state"]["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert {row["implementation"] for row in rank["counters"]} == {"reference"}
        assert {row["operator"]: row["calls"] > 0 for row in rank["counters"]} == dict.fromkeys(OPERATORS, True)
    assert ranks[0]["counters"] == ranks[1]["counters"]


def test_every_site_of_every_rank_agrees_with_vllm(result):
    assert result["compared"]["first"] is None
    for rank in result["compared"]["ranks"]:
        assert {row["site"] for row in rank["rows"]} == SITES
        assert [row for row in rank["rows"] if row["beyond"] or not row["calls"]] == []


def test_a_wrong_operator_is_caught_in_the_output(result):
    right = result["wrong"].pop("")
    assert alternate.differences(right, result["ours"])["max_logprob_diff"] == 0
    caught = {op: not alternate.differences(out, result["stock"])["agree"] for op, out in result["wrong"].items()}
    assert caught == {"mhc_pre_fused": True, "moe_topk_gate": True, "reduce_fused": True}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_on_one_gpu_take_the_first_device_and_are_hosts_of_their_own(monkeypatch, rank):
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(os, "environ", {"NCCL_NET": "IB"})
    seen = []
    monkeypatch.setattr(gpu_worker.Worker, "init_device", lambda self: seen.append((self.local_rank, dict(os.environ))))
    worker = object.__new__(resolve_obj_by_qualname(alternate.ONE_GPU["worker_cls"]))
    worker.rank = worker.local_rank = rank
    worker.init_device()
    ((device, environment),) = seen
    assert device == 0
    assert environment["NCCL_HOSTID"] == f"rank-{rank}"
    assert environment["NCCL_NET"] == "Socket"
