"""A decoder layer: what both sides can run is timed, the rest is named."""

import pytest
import torch

from tk_serving.bench import peers
from tk_serving.bench.chain import CHAINS, Chain, Layer, Part, Step
from tk_serving.bench.implementations import Bench
from tk_serving.operator import operators
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
        def prepare(self, calls, mode):
            raise RuntimeError("no graph")

    monkeypatch.setitem(CHAINS, "v3", (Step("router", (Part("topk_gate"),)),))
    row = Chain("v3", "torch_ops", 8, Bench(Broken(), "cpu")).measure(4)
    assert row.error == "RuntimeError: no graph"


def test_chains_name_models_and_engine_functions_that_exist():
    keys = [model.key for model in MODELS]
    for name, steps in CHAINS.items():
        assert name in keys
        for step in steps:
            for engine, function in step.joint.items():
                assert callable(getattr(peers.engine_module(engine), function))


def test_chains_use_declared_operators():
    parts = {part.operator for steps in CHAINS.values() for step in steps for part in step.parts}
    # Left out of a run, and named there, until it is declared.
    assert parts - {op.name for op in operators()} <= {"norm_forward_and_per_token_cast"}
