"""FP4 experts in FP8: numbers of the chain, what it costs in accuracy, the choice, the shared workspace, refusals."""

import functools
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from tk_serving.gemm import tiles
from tk_serving.modeling.fp8_experts import Fp4Weights, Layers, Policy, alignment, routed_experts, w4a8
from tk_serving.modeling.fp8_experts.chain import OPERATORS, Shape, calls
from tk_serving.modeling.fp8_experts.policy import PAIRS_PER_EXPERT
from tk_serving.quant import marlin
from tk_serving.quant.formats import decode_e2m1
from tk_serving.quant.scales import of_exponents

RECORDS = Path(__file__).parents[2] / "docs/records"
EXPERTS, HIDDEN, INTERMEDIATE, TOPK, LIMIT = 4, 128, 256, 3, 2.0


class Checkpoint:
    """FP4 weights [N, K] with scales of 1 x 32, some rows and groups far from the others, as in trained models."""

    def __init__(self, seed=0, spread=3):
        self.generator = torch.Generator().manual_seed(seed)
        self.codes, self.exponents = {}, {}
        for name, n, k in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
            self.codes[name] = self.integers(-128, 128, EXPERTS, n, k // 2).to(torch.int8)
            rows = self.integers(-spread, spread + 1, EXPERTS, n, 1)
            self.exponents[name] = (119 + rows + self.integers(-1, 2, EXPERTS, n, k // 32)).to(torch.uint8)

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def repacked(self):
        parts = []
        for name in ("w13", "w2"):
            parts += [marlin.pack_codes(self.codes[name]), marlin.pack_exponents(self.exponents[name])]
        return Fp4Weights(*parts)

    @functools.cache  # noqa: B019
    def values(self, name, expert):
        scale = of_exponents(self.exponents[name][expert].int()).repeat_interleave(32, dim=1)
        return decode_e2m1(self.codes[name][expert]) * scale


def blocks(weight, sf, expert):
    return weight[expert].float() * sf[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)


def product(x, weight, out, pos_to_expert):
    """What DeepGEMM computes, in float32 with one rounding; rows of no expert become NaN."""
    data, sf = x
    assert sf.stride(0) == 1
    rows = data.float() * sf.repeat_interleave(128, dim=1)
    out.fill_(torch.nan)
    for expert in range(len(weight[0])):
        at = pos_to_expert == expert
        out[at] = (rows[at] @ blocks(*weight, expert).T).to(out.dtype)


def inputs(tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator) * torch.rand(tokens, 1, generator=generator) * 4
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOPK, dim=1)
    return x.bfloat16(), ids, weights


def run(checkpoint, x, ids, weights, **options):
    layer = Layers().add(checkpoint.repacked())
    return routed_experts(x, layer.acquire(), ids, weights, product, alignment=8, swiglu_limit=LIMIT, **options)


def run_w4a8(checkpoint, x, ids, weights, **options):
    marlins = checkpoint.repacked()
    assert w4a8.refusal(marlins) is None
    parts = (*w4a8.laid_out(marlins.w13, marlins.w13_sf), *w4a8.laid_out(marlins.w2, marlins.w2_sf))
    return w4a8.routed_experts(x, w4a8.Fp4Tiles(*parts), ids, weights, swiglu_limit=LIMIT, **options)


RUNS = pytest.mark.parametrize("run", [run, run_w4a8], ids=["fp8-weights", "w4a8"])


def experts(checkpoint, x, ids, weights, cast=lambda rows: rows, rounded=torch.Tensor.float):
    """The definition, pair by pair. ``cast``: of activations before a product; ``rounded``: of a product's results."""
    out = torch.zeros(len(x), HIDDEN)
    for expert in range(EXPERTS):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = rounded(cast(x[token].float()) @ checkpoint.values("w13", expert).T).float().chunk(2, dim=1)
        y = cast(silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT))
        y = rounded(y @ checkpoint.values("w2", expert).T).float()
        out.index_add_(0, token, weights[token, choice, None] * y)
    return out


def e4m3(rows):
    """Rows cast to FP8 with power-of-two scales of 128 columns, and back."""
    groups = rows.unflatten(1, (-1, 128))
    scale = torch.exp2((groups.abs().amax(dim=-1, keepdim=True) / 448).log2().ceil())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@RUNS
def test_chain_is_the_definition_with_fp8_activations(run):
    checkpoint = Checkpoint()
    x, ids, weights = inputs(40)
    wanted = experts(checkpoint, x, ids, weights, e4m3, torch.Tensor.bfloat16).bfloat16()
    # Sums of products in another order move a few bfloat16 results by one step, and with them FP8 codes.
    assert distance(run(checkpoint, x, ids, weights), wanted) < 4e-3


@RUNS
@pytest.mark.parametrize(("spread", "bound"), [(0, 0.05), (2, 0.06), (6, 0.15)])
def test_accuracy(spread, bound, run):
    """Casting activations to FP8 twice costs about 4 % of the norm.

    It is more where rows of the weights differ by orders of magnitude: a few then decide the result, and the limits cut
    off large values, but not their errors.
    """
    checkpoint = Checkpoint(seed=spread, spread=spread)
    x, ids, weights = inputs(64)
    found = run(checkpoint, x, ids, weights)
    exact = experts(checkpoint, x, ids, weights)
    sixteen_bits = experts(checkpoint, x, ids, weights, rounded=torch.Tensor.bfloat16)
    assert 0.01 < distance(found, exact) < bound
    assert 0.01 < distance(found, sixteen_bits) < bound
    assert torch.nn.functional.cosine_similarity(found.float(), exact, dim=1).median() > 1 - bound**2


@RUNS
def test_experts_of_other_ranks_have_no_part(run):
    checkpoint = Checkpoint()
    x, ids, weights = inputs(12)
    ids[::2, 1] = -1
    ids[3] = -1
    found = run(checkpoint, x, ids, weights)
    wanted = experts(checkpoint, x, ids, weights, e4m3, torch.Tensor.bfloat16)
    assert distance(found, wanted) < 5e-3
    assert found[3].eq(0).all()


@RUNS
def test_no_tokens_and_preallocated_result(run):
    checkpoint = Checkpoint()
    x, ids, weights = inputs(4)
    assert run(checkpoint, x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    out = torch.empty_like(x)
    assert run(checkpoint, x, ids, weights, out=out) is out
    assert torch.equal(out, run(checkpoint, x, ids, weights))


def test_weights_are_released_behind_the_second_product():
    seen = []
    x, ids, weights = inputs(4)
    layer = Layers().add(Checkpoint().repacked())

    def noted(*args):
        seen.append("product")
        product(*args)

    routed_experts(x, layer.acquire(), ids, weights, noted, alignment=8, after_products=lambda: seen.append("after"))
    assert seen == ["product", "product", "after"]


@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_w4a8_with_few_and_many_tokens_for_each_expert(tokens):
    checkpoint = Checkpoint()
    x, ids, weights = inputs(tokens)
    wanted = experts(checkpoint, x, ids, weights, e4m3, torch.Tensor.bfloat16).bfloat16()
    assert distance(run_w4a8(checkpoint, x, ids, weights), wanted) < 4e-3
    same = run_w4a8(checkpoint, x, ids, weights, total=4 * EXPERTS)  # the hint of expert parallelism
    assert torch.equal(same, run_w4a8(checkpoint, x, ids, weights))


def test_w4a8_is_the_chain_with_upcast_weights():
    """Neither form of the weights changes a value, so that only the order of sums is left."""
    checkpoint = Checkpoint()
    x, ids, weights = inputs(40)
    assert distance(run_w4a8(checkpoint, x, ids, weights), run(checkpoint, x, ids, weights).float()) < 4e-3


def test_w4a8_weights_take_as_many_bytes_as_marlins_and_a_scale_for_each_row():
    marlins = Checkpoint().repacked()
    for codes, sf in ((marlins.w13, marlins.w13_sf), (marlins.w2, marlins.w2_sf)):
        laid_out, rows = w4a8.laid_out(codes, sf)
        assert laid_out.numel() == codes.numel() * 4 + sf.numel()
        assert rows.numel() == EXPERTS * codes.shape[2] // 2
        words = w4a8.words(laid_out)
        assert (words.shape[:2], words.dtype) == (codes.shape[:2], codes.dtype)
        assert words.data_ptr() == laid_out.data_ptr()
        assert torch.equal(w4a8.from_words(words, rows.shape[1]), laid_out)


def test_w4a8_uses_a_given_buffer():
    checkpoint = Checkpoint()
    x, ids, weights = inputs(12)
    size = Shape(EXPERTS, 2 * INTERMEDIATE, HIDDEN).buffer(ids.numel(), w4a8.ALIGNMENT)
    buffer = torch.full((size,), torch.nan, dtype=x.dtype)
    assert torch.equal(run_w4a8(checkpoint, x, ids, weights, buffer=buffer), run_w4a8(checkpoint, x, ids, weights))
    assert not buffer.isnan().all()


def test_w4a8_holds_scales_that_fp8_blocks_cannot_and_refuses_wider_ones():
    checkpoint = Checkpoint(spread=0)
    checkpoint.exponents["w2"][1, 7, 2] = int(checkpoint.exponents["w2"][1, 7].max()) - tiles.REACH
    wide = checkpoint.repacked()
    assert wide.refusal() == "block scales span more than FP8 holds exactly"
    x, ids, weights = inputs(9)
    wanted = experts(checkpoint, x, ids, weights, e4m3, torch.Tensor.bfloat16).bfloat16()
    assert distance(run_w4a8(checkpoint, x, ids, weights), wanted) < 4e-3
    checkpoint.exponents["w2"][1, 7, 2] -= 1
    assert w4a8.refusal(checkpoint.repacked()) == "scales of a row span more than 26 powers of two"


def test_w4a8_calls_name_every_operator_of_the_chain_and_have_plans():
    shape = Shape(256, 4096, 4096)
    for tokens in (1, 3, 64, 5000):
        found = list(w4a8.calls(tokens, 6, shape, 1024, torch.bfloat16, 10.0, 1e-10))
        assert {function.operator.name for function, _, _ in found} == set(w4a8.OPERATORS)
        for function, args, kwargs in found:
            plan = function.operator.plan(*function.operator.bind(*args, **kwargs))
            assert plan.launches
            assert plan.refusal is None


def test_layers_share_one_workspace_and_each_gets_its_own_weights():
    checkpoints = [Checkpoint(seed) for seed in range(3)]
    group = Layers()
    layers = [group.add(checkpoint.repacked()) for checkpoint in checkpoints]
    one = group.extra_bytes
    assert one == EXPERTS * 3 * HIDDEN * INTERMEDIATE
    for place in (0, 1, 1, 2, 0):
        held = layers[place].acquire()
        for expert in range(EXPERTS):
            assert torch.equal(blocks(held.w13, held.w13_sf, expert), checkpoints[place].values("w13", expert))
            assert torch.equal(blocks(held.w2, held.w2_sf, expert), checkpoints[place].values("w2", expert))
        layers[place].release()
    assert len({layer.acquire().w13.data_ptr() for layer in layers}) == 1


def test_resident_layers_have_weights_of_their_own():
    checkpoints = [Checkpoint(seed) for seed in range(2)]
    group = Layers("resident")
    layers = [group.add(checkpoint.repacked()) for checkpoint in checkpoints]
    assert group.extra_bytes == 2 * EXPERTS * 3 * HIDDEN * INTERMEDIATE
    held = [layer.acquire() for layer in layers]
    for weights, checkpoint in zip(held, checkpoints, strict=True):
        assert torch.equal(blocks(weights.w13, weights.w13_sf, 2), checkpoint.values("w13", 2))


def test_layers_that_fp8_cannot_hold_are_refused_and_counted():
    checkpoint = Checkpoint()
    checkpoint.exponents["w2"][1, 7, 2] = 90
    group = Layers()
    assert group.add(checkpoint.repacked()) == "block scales span more than FP8 holds exactly"
    assert group.add(checkpoint.repacked()) == "block scales span more than FP8 holds exactly"
    assert not isinstance(group.add(Checkpoint().repacked()), str)
    assert group.refused == {"block scales span more than FP8 holds exactly": 2}


def test_other_weights_are_refused():
    good = Checkpoint().repacked()
    w13, w13_sf, w2, w2_sf = good.w13, good.w13_sf, good.w2, good.w2_sf
    assert good.refusal() is None
    assert Fp4Weights(w13.float(), w13_sf, w2, w2_sf).refusal() == "w13 is not FP4 in Marlin's layout"
    assert Fp4Weights(w13, w13_sf, w2, w2_sf[:, 1:]).refusal() == "w2 has scales of shape [4, 7, 128]"
    narrow = Fp4Weights(w13, w13_sf, w2[:, :8], w2_sf[:, :4])
    assert narrow.refusal() == "the intermediate size of this rank is 128"
    cut = Fp4Weights(w13[..., :640], w13_sf[..., :320], w2, w2_sf)
    assert cut.refusal() == "w13 of 320 x 128 is not made of blocks of 128 x 128"


@pytest.mark.parametrize(("topk", "experts"), [(6, 256), (6, 384), (8, 256), (2, 8)])
@pytest.mark.parametrize("mode", ["upcast", "resident"])
def test_threshold_is_the_measured_number_of_pairs_for_each_expert(mode, topk, experts):
    policy = Policy(mode)
    threshold = policy.threshold(topk, experts)
    assert threshold * topk >= PAIRS_PER_EXPERT[mode] * experts > (threshold - 1) * topk
    assert policy.takes(threshold, topk, experts)
    assert not policy.takes(threshold - 1, topk, experts)


def test_no_step_that_was_slower_in_the_engine_is_taken():
    record = json.loads((RECORDS / "e2e-hopper-fp8-experts.json").read_text())
    found = {}
    for row in record["rows"]:
        step, _, mode = row["phase"].partition(", experts ")
        kind, number = step.split()[:2]
        # Of the early launches of w4a8 the sums of kernels contain the waits: see the layer's record for it.
        if mode in PAIRS_PER_EXPERT and kind == "prefill" and Policy(mode).takes(int(number), 6, 256):
            found.setdefault(mode, {})[step] = row["kernels_ratio"]
    assert {"upcast", "resident"} <= set(found)
    assert all(len(ratios) >= 3 for ratios in found.values())
    assert not {(mode, step) for mode, ratios in found.items() for step, ratio in ratios.items() if ratio < 1 / 1.02}


def test_w4a8_is_faster_than_marlin_at_every_number_of_tokens():
    record = json.loads((RECORDS / "fp4-experts-layer-h200.json").read_text())
    ratios = {row["tokens"]: row["ms"]["marlin"] / row["ms"]["w4a8"] for row in record["rows"]}
    assert {1, 64, 4096} <= set(ratios)
    assert min(ratios.values()) > 1.02


def test_threshold_may_be_set_and_stock_never_runs():
    assert Policy("upcast", 100).takes(100, 6, 256)
    assert not Policy("upcast", 100).takes(99, 6, 256)
    assert not Policy("stock", 1).takes(100_000, 6, 256)
    assert not Policy("upcast", 0).takes(0, 6, 256)


def test_calls_name_every_operator_of_the_chain():
    found = [function.operator.name for function, _, _ in calls(300, 6, 256, 4096, 4096, torch.bfloat16)]
    assert set(found) == set(OPERATORS)
    for function, args, kwargs in calls(300, 6, 256, 4096, 4096, torch.bfloat16, 128, 10.0, 1e-10):
        plan = function.operator.plan(*function.operator.bind(*args, **kwargs))
        assert plan.launches
        assert plan.refusal is None


def test_steps_to_warm_up_are_those_that_run_in_fp8_on_both_sides_of_the_change_of_alignment():
    steps = Policy("upcast").steps(16384, 6, 256)
    assert steps[0] == Policy("upcast").threshold(6, 256) == 3072
    assert {alignment(n, 6, 256) for n in steps} == {64, 128}
    assert {5461, 5462} <= set(steps)
    assert max(steps) < 16384
    assert Policy("upcast").steps(3072, 6, 256) == []
    assert Policy("stock").steps(16384, 6, 256) == []


def test_alignment_is_that_of_small_tiles_for_few_pairs():
    assert alignment(5461, 6, 256) == 64
    assert alignment(5462, 6, 256) == 128
