"""Plans are kept for calls of the same form, and for no others."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_serving import config, dispatch, kept, moe, quant
from tk_serving.config import settings
from tk_serving.operator import operators, tensors_of
from tk_serving.plan import Launch, Out, Plan
from tk_serving.workloads import Maker
from tk_serving_patches.calls import Call, ask

CAST = quant.per_token_cast.operator
ENGINES = {"vllm", "sglang"}
SERVED = [op for op in operators() if ENGINES & {peer.partition(":")[0] for peer in op.peers}]


@pytest.fixture(autouse=True)
def _nothing_kept():
    kept.forget()
    yield
    kept.forget()


def form(x, *, fmt="e4m3", npc=128, column_major=False, out=None):
    return CAST.bind(x, fmt, npc, use_tma_aligned_col_major_sf=column_major, out=out)


def rows(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def same(first, second, op=CAST):
    return kept.plan(op, first) is kept.plan(op, second)


def test_a_call_of_the_same_form_is_planned_once():
    assert same(form(rows(3, 256)), form(rows(3, 256)))
    assert not same(form(rows(3, 256)), form(rows(4, 256)))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: form(rows(3, 512)[:, :256]), id="strides"),
        pytest.param(lambda: form(rows(3 * 256 + 1)[1:].view(3, 256)), id="alignment"),
        pytest.param(lambda: form(rows(3, 256, dtype=torch.float32)), id="dtype"),
        pytest.param(lambda: form(rows(3, 256), npc=64), id="number"),
        pytest.param(lambda: form(rows(3, 256), column_major=True), id="flag"),
        pytest.param(lambda: form(rows(3, 256).to("meta")), id="device"),
        pytest.param(
            lambda: form(rows(3, 256), out=(rows(3, 256, dtype=torch.float8_e4m3fn), rows(3, 2, dtype=torch.float32))),
            id="a tensor for None",
        ),
    ],
)
def test_what_a_plan_depends_on(other):
    first, second = form(rows(3, 256)), other()
    assert kept.form(CAST, first) != kept.form(CAST, second)
    assert not same(first, second)


def test_a_number_is_no_flag():
    """1 == True in Python; they are other arguments all the same."""
    args = form(rows(3, 256))
    flag = next(i for i, value in enumerate(args) if value is False)
    assert kept.form(CAST, args) != kept.form(CAST, (*args[:flag], 0, *args[flag + 1 :]))


def test_settings_of_the_process():
    x = form(rows(3, 256))
    before = kept.form(CAST, x)
    alignment = config.get_token_alignment()
    try:
        config.set_token_alignment(alignment + 8)
        assert kept.form(CAST, x) != before
    finally:
        config.set_token_alignment(alignment)
    assert kept.form(CAST, x) == before
    with torch.no_grad():
        assert kept.form(CAST, x) != before


def test_padding_behind_a_given_result_is_looked_for_every_time():
    """The same shape and strides, but the storage ends before the padding rows."""
    data = rows(5, 256, dtype=torch.float8_e4m3fn)
    roomy = torch.zeros(16).as_strided((5, 2), (1, 8))
    tight = torch.zeros(13).as_strided((5, 2), (1, 8))
    kept.plan(CAST, form(rows(5, 256), column_major=True, out=(data, roomy)))
    with pytest.raises(ValueError, match="storage of 16 elements"):
        kept.plan(CAST, form(rows(5, 256), column_major=True, out=(data, tight)))


def test_traced_arguments_are_planned_every_time():
    with FakeTensorMode():
        args = form(torch.empty(3, 256, dtype=torch.bfloat16))
        assert kept.form(CAST, args) is None
        assert not same(args, args)


def test_wrong_arguments_fail_every_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="num_per_channels"):
            kept.plan(CAST, form(rows(3, 256), npc=7))


def test_an_operator_can_be_switched_off_later(monkeypatch):
    x = rows(3, 256)
    assert isinstance(ask(quant.per_token_cast, x.device, x, "e4m3", 128), Call)
    monkeypatch.setattr(settings, "disable", frozenset({"per_token_cast"}))
    assert "TK_SERVING_DISABLE" in ask(quant.per_token_cast, x.device, x, "e4m3", 128)


def test_not_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(kept, "LIMIT", 2)
    plans = [kept.plan(CAST, form(rows(n, 256))) for n in (1, 2, 3)]
    assert len(kept._plans) == 1
    assert kept.plan(CAST, form(rows(3, 256))) is plans[2]
    assert kept.plan(CAST, form(rows(1, 256))) is not plans[0]


def _closure(tensor):
    return lambda outs: (tensor,)


class _Holder:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor

    def arguments(self, outs):
        return (self.tensor,)


@pytest.mark.parametrize(
    "arguments",
    [
        _closure,
        lambda tensor: functools.partial(max, tensor),
        lambda tensor: _Holder(tensor).arguments,
        lambda tensor: lambda outs, given=tensor: (given,),
    ],
    ids=["closure", "partial", "method", "default"],
)
def test_a_plan_that_holds_a_tensor_is_not_kept(arguments):
    def plan_of(arguments):
        return Plan((Out((3,), torch.float32),), (Launch("quant.cast", {}, arguments),))

    assert [t.shape for t in kept._tensors(plan_of(arguments(torch.zeros(7))))] == [(7,)]
    assert not list(kept._tensors(plan_of(arguments(7))))


@pytest.mark.parametrize("op", SERVED, ids=lambda op: op.name)
def test_what_engines_call_is_kept(op):
    for workload in op.built:
        args = op.bind(*op.inputs(Maker("meta"), tokens=workload.tokens[0], **workload.params))
        assert same(args, args, op), workload


@pytest.mark.parametrize("op", SERVED, ids=lambda op: op.name)
def test_launches_take_the_tensors_of_their_own_call(op):
    """In every form that the tests have."""
    for case in op.cases:
        first, second = (op.bind(*op.inputs(Maker("cpu"), **case)) for _ in range(2))
        kept.plan(op, first)
        plan, device = kept.plan(op, second), torch.device("cpu")
        buffers = [*dispatch._outputs(op, plan, second, device, zero=False), *(s.empty(device) for s in plan.scratch)]
        foreign = {t.untyped_storage().data_ptr() for t in tensors_of(first)} - {0}
        foreign -= {t.untyped_storage().data_ptr() for t in tensors_of(second)}
        for launch in plan.launches:
            given = [x for x in launch.arguments(buffers, *second) if isinstance(x, torch.Tensor)]
            assert given
            assert not foreign & {t.untyped_storage().data_ptr() for t in given}, (case, launch)


def test_the_second_call_has_its_own_results(monkeypatch):
    monkeypatch.setattr(settings, "cpu", "simulator")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rows_, weights = torch.randn(6, 128, generator=generator), torch.rand(3, 2, generator=generator)
        positions = torch.randperm(6, generator=generator).int().view(3, 2)
        out = moe.reduce_fused(rows_.bfloat16(), weights, positions)
        expected = moe.reduce_fused.operator.call("reference", rows_.bfloat16(), weights, positions)
        assert torch.equal(out, expected)
    assert len(kept._plans) == 1
