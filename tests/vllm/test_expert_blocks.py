"""vLLM's moe_align_block_size by our operator, beside a plain model of vLLM's kernel, and what stays with vLLM."""

import dataclasses
import inspect

import pytest
import torch

from tk_serving import dispatch
from tk_serving.bench import peers
from tk_serving.config import settings
from tk_serving.moe import get_block_mapping

pytest.importorskip("vllm")

from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.experts import marlin_moe, triton_moe

from tk_serving_patches import Ledger, comparing, warm
from tk_serving_patches.vllm import MODELS
from tk_serving_vllm.sites import expert_blocks

SITE = expert_blocks.SITES[0]
EXPERTS = 16


@pytest.fixture
def theirs(monkeypatch):
    """A model of vLLM's kernel, the pairs of an expert in descending order; the calls that reach it."""
    calls = []

    def kernel(topk_ids, num_experts, block_size, rows, experts, used, expert_map=None, scatter_idx=None):
        calls.append((topk_ids.clone(), num_experts, block_size, expert_map, scatter_idx))
        pairs: dict[int, list[int]] = {}
        for pair, id in enumerate(topk_ids.flatten().tolist()):
            local = id if expert_map is None else int(expert_map[id])
            if local >= 0:
                pairs.setdefault(local, []).insert(0, pair)
        rows.fill_(topk_ids.numel())
        experts.fill_(0)
        block = 0
        for local in sorted(pairs):
            count = len(pairs[local])
            rows[block * block_size : block * block_size + count] = torch.tensor(pairs[local])
            experts[block : block - (-count // block_size)] = local
            block += -(-count // block_size)
        used.fill_(block * block_size)

    monkeypatch.setattr(ops, "moe_align_block_size", kernel)
    return calls


@pytest.fixture
def applied():
    ledger = Ledger()

    def apply():
        rows = ledger.apply(dataclasses.replace(SITE, unsuitable=lambda: None, sources={}))
        assert [row.status for row in rows] == ["patched"], rows

    yield apply
    ledger.revert()


def ids_of(tokens, topk, dtype=torch.int32):
    return torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :topk].to(dtype).contiguous()


def local_numbers(rank):
    """Of two ranks."""
    number = torch.arange(EXPERTS)
    return torch.where(number // 8 == rank, number % 8, -1).int()


def reasons():
    return [row["reason"] for row in dispatch.counters() if row["implementation"] == "engine"]


def agree(ours, stock, block_size):
    """Equal but for the order of an expert's pairs."""
    assert [(one.dtype, one.shape) for one in ours] == [(one.dtype, one.shape) for one in stock]
    (rows, experts, used), (their_rows, their_experts, their_used) = (
        [part.tolist() for part in one] for one in (ours, stock)
    )
    assert (experts, used) == (their_experts, their_used)
    pairs, their_pairs = {}, {}
    for row, (mine, other) in enumerate(zip(rows, their_rows, strict=True)):
        region = experts[row // block_size] if row < used[0] else "unused"
        pairs.setdefault(region, []).append(mine)
        their_pairs.setdefault(region, []).append(other)
    assert pairs == {region: sorted(found) for region, found in their_pairs.items()}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (5, 8), (64, 8)])
def test_every_expert_class_calls_ours(theirs, applied, tokens, topk, block_size, dtype):
    ids = ids_of(tokens, topk, dtype)
    stock = marlin_moe.moe_align_block_size(ids, block_size, EXPERTS, ignore_invalid_experts=True)
    assert len(theirs) == 1
    applied()
    for module in (marlin_moe, triton_moe, fused_moe):
        agree(module.moe_align_block_size(ids, block_size, EXPERTS, ignore_invalid_experts=True), stock, block_size)
    assert len(theirs) == 1, "vLLM's kernel is not called"
    assert reasons() == []
    assert [(row["operator"], row["calls"]) for row in dispatch.counters()] == [("get_block_mapping", 3)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tokens", [2, 40])
def test_pairs_of_other_ranks_have_no_row(theirs, applied, tokens, rank):
    ids, local = ids_of(tokens, 6), local_numbers(rank)
    stock = marlin_moe.moe_align_block_size(ids, 8, EXPERTS, local, ignore_invalid_experts=True)
    applied()
    agree(marlin_moe.moe_align_block_size(ids, 8, EXPERTS, local, ignore_invalid_experts=True), stock, 8)
    assert len(theirs) == 1
    assert reasons() == []


def test_tritons_assignment(theirs, applied):
    """As Triton's experts prepare it: few pairs need no order at all, and never reach us."""
    applied()
    config = {"BLOCK_SIZE_M": 16}
    ids = ids_of(20, 8)
    rows, _, used = fused_moe._prepare_expert_assignment(ids, config, 20, 8, EXPERTS, None)
    count = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert used.item() == ((count + 15) // 16 * 16).sum()
    assert sorted(rows[rows < 160].tolist()) == list(range(160))
    few = fused_moe._prepare_expert_assignment(ids_of(1, 4), config, 1, 4, EXPERTS, None)
    assert few[0] is None
    assert theirs == []
    assert [(row["operator"], row["calls"]) for row in dispatch.counters()] == [("get_block_mapping", 1)]


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        (65, {}, "more than 512 pairs"),
        (2, {"pad_sorted_ids": True}, "rows padded to whole blocks"),
        (2, {"return_scatter_idx": True}, "an index of the routed rows"),
        (2, {"expert_map": local_numbers(0)}, "rows for experts of other ranks"),
    ],
)
def test_what_stays_with_vllm(theirs, applied, tokens, options, reason):
    ids = ids_of(tokens, 8)
    local = options.get("expert_map")
    if local is not None:  # the model above marks experts of other ranks behind the kernel, as vLLM does
        options = {"expert_map": local, "ignore_invalid_experts": False}
    stock = marlin_moe.moe_align_block_size(ids, 8, EXPERTS, **options)
    applied()
    kept_by_vllm = marlin_moe.moe_align_block_size(ids, 8, EXPERTS, **options)
    assert len(theirs) == 2
    for one, other in zip(kept_by_vllm[:3], stock[:3], strict=True):
        assert torch.equal(one, other)
    assert len(kept_by_vllm) == len(stock)
    assert reasons() == [reason]


def test_what_the_contract_refuses(theirs, applied):
    applied()
    marlin_moe.moe_align_block_size(ids_of(2, 8).T.contiguous().T, 8, EXPERTS)
    marlin_moe.moe_align_block_size(ids_of(2, 8).short(), 8, EXPERTS)
    assert len(theirs) == 2
    assert sorted("contiguous" in reason for reason in reasons()) == [False, True]
    assert any("int16" in reason for reason in reasons())


def test_beside_vllms_own_in_any_order(theirs, applied, monkeypatch):
    monkeypatch.setattr(settings, "compare", True)
    applied()
    for tokens in (1, 9, 60):
        marlin_moe.moe_align_block_size(ids_of(tokens, 8), 16, EXPERTS, local_numbers(1), ignore_invalid_experts=True)
        marlin_moe.moe_align_block_size(ids_of(tokens, 8), 8, EXPERTS)
    assert len(theirs) == 6
    assert [(row["site"], row["calls"], row["beyond"]) for row in comparing.rows()] == [("expert-blocks", 6, 0)]
    assert comparing.first() is None


def test_a_wrong_order_is_found(theirs, applied, monkeypatch):
    monkeypatch.setattr(settings, "compare", True)
    right = ops.moe_align_block_size

    def wrong(topk_ids, *rest):
        right(topk_ids, *rest)
        rows = rest[2]
        rows[:2] = rows[:2].flip(0) if rows[1] == topk_ids.numel() else rows[0]

    monkeypatch.setattr(ops, "moe_align_block_size", wrong)
    applied()
    marlin_moe.moe_align_block_size(torch.tensor([[3, 5]]), 1, EXPERTS)
    assert comparing.first() == "expert-blocks"


def test_the_benchmark_compares_with_vllms_kernel(theirs):
    ids = ids_of(30, 8)
    given = {"topk_idx": ids, "num_experts": EXPERTS, "block_size": 4, "expert_map": local_numbers(1)}
    call = peers.prepare("vllm", "get_block_mapping", given)
    result = call.result(call.run())
    assert len(theirs) == 1
    for ours, other in zip(get_block_mapping(**given), result, strict=True):
        assert torch.equal(ours, other)


def test_kernels_for_few_tokens_are_known_from_the_profiling_run(theirs, applied, monkeypatch):
    monkeypatch.setattr(warm, "_open", False)
    warm.start()
    applied()
    marlin_moe.moe_align_block_size(ids_of(200, 6), 64, EXPERTS, local_numbers(0), ignore_invalid_experts=True)
    found = {launch for count in (1, 5, 6, 85, 86, 200) for launch in warm._launches(count)}
    assert {launch.kernel for launch in found} == {"moe.get_block_mapping", "moe.get_block_mapping:few"}
    config = {"num_experts": EXPERTS, "ids_dtype": "int32", "mapped": True}
    assert all(launch.config == config for launch in found)


def test_signature_is_vllms():
    made = SITE.patches[0].make(marlin_moe.moe_align_block_size)
    stock = inspect.signature(marlin_moe.moe_align_block_size).parameters
    assert [(p.name, p.default) for p in inspect.signature(made).parameters.values()] == [
        (p.name, p.default) for p in stock.values()
    ]


def test_every_model_with_routed_experts_has_the_site():
    assert all("expert-blocks" in sites for sites in MODELS.values())
