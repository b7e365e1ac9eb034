"""What the host does for a call is measured on the way that an engine's adapter takes, without a GPU."""

import pytest
import torch

from tk_serving import dispatch, kept, operator
from tk_serving.bench import calls
from tk_serving.compile import kernels
from tk_serving.plan import Out
from tk_serving.workloads import Maker


@pytest.mark.parametrize(
    ("model", "some"),
    [
        ("v3", {"per_token_cast", "top2_sum_gate", "reduce_fused"}),
        ("v4-flash", {"per_token_cast", "mhc_pre_fused", "mhc_post_pre_fused", "reduce_fused"}),
    ],
)
def test_every_operator_of_engines_is_timed(monkeypatch, model, some):
    monkeypatch.setattr(calls, "REPEAT", 2)
    monkeypatch.setattr(calls, "ROUNDS", 1)
    dispatch.reset_counters()
    found = {name: (decide, run) for name, decide, run in calls.rows(model, 8)}
    assert some <= found.keys()
    assert all(decide > 0 and run > 0 for decide, run in found.values())
    assert {row["implementation"] for row in dispatch.counters()} == {dispatch.KERNEL}
    dispatch.reset_counters()


def test_nothing_of_it_stays():
    before = dispatch._capability, kernels.load, operator._device, Out.empty, torch.cuda.device
    with calls.launches_left_out() as device:
        assert dispatch._capability(0) == (9, 0)
        assert torch.cuda.current_device() == device.index
        op = operator.find("per_token_cast")
        args = op.bind(*op.inputs(Maker("cpu"), tokens=3, hidden=256, fmt="e4m3", npc=128))
        plan = kept.plan(op, args)
        assert kept.plan(op, args) is plan
    assert before == (dispatch._capability, kernels.load, operator._device, Out.empty, torch.cuda.device)
    assert kept.plan(op, args) is not plan
