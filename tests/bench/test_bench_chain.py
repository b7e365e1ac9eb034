"""A decoder layer: what both sides can run is timed, the rest is named."""

import dataclasses

import pytest
import torch

from tk_serving.bench import peers
from tk_serving.bench.chain import CHAINS, Chain, Layer, Part, Step, _task
from tk_serving.bench.implementations import Bench, Subject
from tk_serving.bench.routing import experts, routing
from tk_serving.operator import find, operators
from tk_serving.workloads import MODELS


@pytest.fixture
def chain(monkeypatch, fake_timer):
    """Two operators; torch_ops covers the first, and runs nothing jointly."""

    def make(*steps, times=(2.0, 3.0), tokens=8):
        monkeypatch.setitem(CHAINS, "v3", steps)
        return Chain("v3", "torch_ops", tokens, Bench(fake_timer(*times), "cpu")).measure(4)

    return make


def test_both_sides_and_what_is_left_out(chain):
    row = chain(
        Step("router", (Part("topk_gate"),)),
        Step("weights", (Part("normalize_weight"),)),
        Step("future", (Part("no_such_operator"),)),
    )
    assert (row.us, row.peer_us, row.ratio, row.peer) == (2.0, 3.0, 1.5, "torch_ops")
    assert [step["place"] for step in row.steps] == ["router"]
    assert row.steps[0] == {"place": "router", "operators": ["topk_gate"], "ours": "equal", "engine": "equal"}
    assert row.left_out["weights"] == "normalize_weight declares no kernel of torch_ops"
    assert "expected a declared operator" in row.left_out["future"]
    assert row.equal is True


def test_a_chain_that_misses_its_target_is_timed_step_by_step(chain):
    steps = (Step("router", (Part("topk_gate"),)), Step("again", (Part("topk_gate"),)))
    slow = chain(*steps, times=(2.0, 2.2))
    assert [(step["us"], step["engine_us"]) for step in slow.steps] == [(2.0, 2.2), (2.0, 2.2)]
    assert "us" not in chain(*steps, times=(2.0, 2.6)).steps[0]


def test_several_operators_as_one_step_of_the_engine(chain, monkeypatch):
    seen = []

    def joint(gate, weights):
        seen.append((gate["num_topk"], tuple(weights["topk_weights"].shape)))
        return peers.PeerCall(lambda: torch.zeros(1))

    monkeypatch.setattr(peers.engine_module("torch_ops"), "layer_router", joint, raising=False)
    row = chain(Step("router", (Part("topk_gate"), Part("normalize_weight")), {"torch_ops": "layer_router"}))
    assert row.left_out == {}
    assert row.steps[0]["ours"] == "equal"
    assert row.steps[0]["engine"] is None
    assert seen[0] == (8, (8, 8))


@pytest.mark.parametrize(("error", "kind"), [(0, "equal"), (1e-4, "close"), (1, "different")])
def test_operators_that_feed_each_other(chain, monkeypatch, error, kind):
    """Both sides take their own results on, and are compared with each other."""

    def ours(gate, weights):
        chosen = find("topk_gate").public(**gate)
        return peers.PeerCall(lambda: chosen, lambda ids: (ids, gate["scores"].gather(1, ids)))

    def joint(gate, weights):
        both = ours(gate, weights).result(ours(gate, weights).run())
        return peers.PeerCall(lambda: both, lambda found: (found[0], found[1] * (1 + error)))

    monkeypatch.setattr(peers.engine_module("torch_ops"), "layer_router", joint, raising=False)
    parts = (Part("topk_gate"), Part("normalize_weight"))
    row = chain(Step("router", parts, {"torch_ops": "layer_router"}, ours))
    assert row.left_out == {}
    assert (row.steps[0]["ours"], row.steps[0]["engine"]) == ("equal", kind)
    assert row.equal is (kind != "different")


@pytest.mark.parametrize("name", ["v3:routing", "v4-flash:routing"])
def test_routing_takes_its_own_results_on(monkeypatch, fake_timer, name):
    """Compared, pair by pair of token and expert, with a shuffled copy of itself."""

    def shuffled(gate, mapping, expand):
        call = routing(gate, mapping, expand)

        def run():
            ids, weights, positions, (data, sf) = call.run()
            order = torch.randperm(len(data))
            at = torch.where(positions >= 0, order.argsort()[positions.long()], -1)
            rows = data.view(torch.uint8)[order].view(data.dtype), sf[order]
            return ids.flip(1), weights.flip(1), at.flip(1), rows

        return peers.PeerCall(run, call.result)

    monkeypatch.setattr(peers.engine_module("torch_ops"), "routing", shuffled, raising=False)
    steps = tuple(dataclasses.replace(step, joint={"torch_ops": "routing"}) for step in CHAINS[name])
    monkeypatch.setitem(CHAINS, name, steps)
    row = Chain(name, "torch_ops", 2, Bench(fake_timer(2.0, 3.0), "cpu")).measure(2)
    assert row.left_out == {}
    assert (row.chain, row.ratio) == (name, 1.5)
    assert row.steps[0]["operators"][1:] == ["get_fused_mapping", "expand_to_fused_and_cast"]
    assert (row.steps[0]["ours"], row.steps[0]["engine"]) == ("equal", "equal")


def test_experts_go_by_their_own_mapping():
    """Arguments that the mapping replaces change nothing."""
    step = next(step for step in CHAINS["v4-flash"] if step.ours is experts)
    subjects = [Subject(_task(part, "v4-flash", 2), "cpu") for part in step.parts]
    given = [subject.inputs.by_name(subject.inputs[0]) for subject in subjects]
    call = experts(*given)
    found, expected = call.run(), call.result(call.run())
    mapped = {"token_topk_to_pos", "pos_to_expert", "pos_to_token_topk"}
    without = [{k: torch.full_like(v, -1) if k in mapped else v for k, v in part.items()} for part in given]
    assert sum(map(len, (mapped & part.keys() for part in without))) == 5
    call = experts(*without)
    again = call.run()
    live = again[0].long().flatten()
    assert torch.equal(found[2][0][live].view(torch.uint8), again[2][0][live].view(torch.uint8))
    assert torch.equal(found[3], again[3])
    assert all(torch.equal(*pair) for pair in zip(expected, call.result(again), strict=True))


def test_parameters_can_be_changed(chain):
    assert chain(Step("router", (Part("topk_gate", {"experts": 16, "topk": 2}),))).us == 2.0
    row = chain(Step("router", (Part("topk_gate", {"colour": 1}),)))
    assert row.left_out == {"router": "the workloads of topk_gate have no colour"}
    assert row.error == "no step that both sides can run"
    assert row.ratio is None


def test_arguments_and_rows_can_be_changed(chain, monkeypatch):
    seen = {}

    def joint(gate):
        seen.update(gate)
        return peers.PeerCall(lambda: None)

    monkeypatch.setattr(peers.engine_module("torch_ops"), "layer_router", joint, raising=False)
    part = Part("topk_gate", rows=lambda layer: layer.rows, arguments=lambda layer, make: {"num_topk": 3})
    chain(Step("router", (part,), {"torch_ops": "layer_router"}))
    assert (seen["num_topk"], seen["scores"].shape[0]) == (3, 64 * 128)  # 8 tokens x 8 choices, each region aligned


def test_expert_steps_share_one_routing():
    layer = Layer(MODELS[0], 4)
    mapping = layer.mapping(torch.device("cpu"))
    assert layer.rows == 32 * 128
    assert mapping["pos_to_expert"].shape == (layer.rows,)
    positions = mapping["token_topk_to_pos"].long()
    assert torch.equal(mapping["pos_to_expert"][positions].long(), layer.ids(torch.device("cpu")))


def test_a_failing_side_is_an_error_of_the_row(chain, monkeypatch):
    class Broken:
        def prepare(self, calls, mode, footprint):
            raise RuntimeError("no graph")

    monkeypatch.setitem(CHAINS, "v3", (Step("router", (Part("topk_gate"),)),))
    row = Chain("v3", "torch_ops", 8, Bench(Broken(), "cpu")).measure(4)
    assert row.error == "RuntimeError: no graph"


def test_chains_name_models_and_engine_functions_that_exist():
    keys = [model.key for model in MODELS]
    for name, steps in CHAINS.items():
        assert name.partition(":")[0] in keys
        for step in steps:
            for engine, function in step.joint.items():
                assert callable(getattr(peers.engine_module(engine), function))


def test_chains_use_declared_operators():
    parts = {part.operator for steps in CHAINS.values() for step in steps for part in step.parts}
    assert parts <= {op.name for op in operators()}
