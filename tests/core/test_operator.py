"""One declaration gives the schema, the checks, the fake implementation, dispatch and the registry entry."""

import pytest
import torch

from tk_serving import dispatch, moe, reference
from tk_serving.compare import BITWISE
from tk_serving.config import settings
from tk_serving.operator import find, operator, operators
from tk_serving.plan import Existing, Launch, Out, Plan
from tk_serving.workloads import Maker

OPERATORS = operators()


@pytest.fixture(autouse=True)
def _clean_counters():
    dispatch.reset_counters()
    yield
    dispatch.reset_counters()


@pytest.fixture
def change_settings():
    saved = dict(settings)
    yield lambda **values: [setattr(settings, key, value) for key, value in values.items()]
    for key, value in saved.items():
        setattr(settings, key, value)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_declaration_is_complete(op):
    assert op.summary.endswith("."), "the documentation starts with one sentence"
    assert op.phase in ("inference", "fine-tuning", "both")
    assert op.cases, "no test cases"
    assert op.workloads, "no workloads"
    assert len(op.equality) in (1, op.num_results + len(op.mutates)), (
        "one rule, or one for each result and mutated argument"
    )
    assert set(op.mutates) <= set(op.signature.parameters)
    assert op.shape_classes(), "no kernel is built for any workload"
    assert getattr(torch.ops.tk_serving, op.name).default is not None


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_plan_of_workloads_counts_bytes(op):
    workload = op.workloads[0]
    args = op.bind(*op.inputs(Maker("meta"), tokens=workload.tokens[0], **workload.params))
    assert op.compulsory_bytes(*args) > 0


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_fake_implementation_agrees_with_the_real_one(op):
    """Shapes, dtypes and strides under fake tensors are those of a real call."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    case = next((c for c in op.cases if c.get("tokens", 1) > 0), op.cases[0])
    args = op.bind(*op.inputs(Maker("cpu"), **case))
    positional, keywords = dispatch.args_by_kind(op, args)
    with FakeTensorMode() as mode:
        fake_args = tree_map(
            lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, (positional, keywords)
        )
        try:
            fake = op.leaves(op.public(*fake_args[0], **fake_args[1]))
        except RuntimeError as error:
            if "data-dependent" in str(error) or "fake tensor" in str(error).lower():
                pytest.skip(f"host result depends on data: {error}")
            raise
    real = op.leaves(op.public(*positional, **keywords))
    for a, b in zip(fake, real, strict=True):
        if b is None:
            assert a is None
        else:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_schema_comes_from_the_annotations():
    assert find("topk_gate").schema == "topk_gate(Tensor scores, SymInt num_topk) -> Tensor"


def test_find_suggests_close_names():
    assert find("moe.topk_gate") is find("topk_gate")
    with pytest.raises(ValueError, match="topk_gate"):
        find("topk_gat")


def test_wrong_kinds_are_named():
    scores = torch.zeros(2, 3)
    for bad, message in [
        (lambda: moe.topk_gate([1.0], 2), "topk_gate: scores: expected a torch.Tensor, got list"),
        (lambda: moe.topk_gate(scores, 2.5), "topk_gate: num_topk: expected int, got float"),
        (lambda: moe.topk_gate(scores, True), "topk_gate: num_topk: expected int, got bool"),
        (lambda: moe.topk_gate(scores.half(), 2), "topk_gate: scores: expected dtype float32, got float16"),
    ]:
        with pytest.raises(TypeError) as caught:
            bad()
        assert str(caught.value) == message


def test_wrong_values_are_named():
    with pytest.raises(ValueError, match=r"topk_gate: num_topk: expected 1 to 3, got 4"):
        moe.topk_gate(torch.zeros(2, 3), 4)
    with pytest.raises(ValueError, match=r"topk_gate: scores: expected shape \[T, E\], got \[3\]"):
        moe.topk_gate(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"topk_gate: scores: expected a contiguous tensor, got strides \[1, 2\]"):
        moe.topk_gate(torch.zeros(3, 2).t(), 1)


def test_direct_torch_call_is_checked_as_well():
    with pytest.raises(ValueError, match="expected 1 to 3, got 9"):
        torch.ops.tk_serving.topk_gate(torch.zeros(2, 3), 9)


def test_torch_compile_traces_the_operator_as_one_node():
    traced = torch.compile(lambda s: moe.topk_gate(s * 2, 2) + 1, backend="aot_eager", fullgraph=True)
    scores = torch.randn(3, 8)
    assert torch.equal(traced(scores), moe.topk_gate(scores * 2, 2) + 1)


def test_calls_are_counted_with_their_reason():
    moe.topk_gate(torch.zeros(2, 3), 1)
    moe.topk_gate(torch.zeros(2, 3), 1)
    moe.topk_gate(torch.zeros(0, 3), 1)
    assert dispatch.counters() == [
        {"operator": "topk_gate", "implementation": "nothing", "reason": "no tokens", "calls": 1},
        {"operator": "topk_gate", "implementation": "reference", "reason": "CPU tensors", "calls": 2},
    ]


def test_switched_off_operator_runs_its_reference(change_settings):
    change_settings(disable=frozenset({"topk_gate"}))
    moe.topk_gate(torch.zeros(2, 3), 1)
    assert dispatch.counters()[0]["reason"] == "switched off by TK_SERVING_DISABLE"
    assert find("topk_gate").refusal(torch.zeros(2, 3), 1) == "switched off by TK_SERVING_DISABLE"


def test_refusal_tells_why_no_kernel_would_run():
    assert find("topk_gate").refusal(torch.zeros(2, 3), 1) == "CPU tensors"


def test_reference_module_has_the_same_interface():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert reference.topk_gate(scores, num_topk=2).tolist() == [[1, 2]]
    assert dispatch.counters() == [], "a comparison call is not counted"
    with pytest.raises(ValueError, match="expected 1 to 3"):
        reference.topk_gate(scores, 4)
    with pytest.raises(AttributeError, match="no_such_operator"):
        reference.no_such_operator  # noqa: B018


def test_launches_are_equal_by_kernel_and_configuration():
    one = Launch("moe.topk_gate", {"num_experts": 8, "num_topk": 2}, lambda *_: ())
    two = Launch("moe.topk_gate", {"num_topk": 2, "num_experts": 8}, lambda *_: ())
    assert one == two
    assert hash(one) == hash(two)
    assert one != Launch("moe.topk_gate", {"num_experts": 8, "num_topk": 3}, lambda *_: ())


def _declare(function, plan, **more):
    return operator(
        spec="test", phase="inference", plan=plan, inputs=lambda make, *, tokens: (), cases=[], workloads=[],
        equality=BITWISE, **more,
    )(function)  # fmt: skip


def _as_family(function):
    function.__module__ = "tk_serving.moe.test"
    return function


@pytest.fixture
def undeclare():
    from tk_serving import operator as module

    before = set(module._OPERATORS)
    yield
    for name in set(module._OPERATORS) - before:
        del module._OPERATORS[name]


@pytest.mark.usefixtures("undeclare")
def test_preallocated_output_is_written_and_returned():
    def test_double(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Twice x."""
        return x * 2

    double = _declare(
        _as_family(test_double),
        lambda x, out: Plan(
            (Existing("out") if out is not None else Out(tuple(x.shape), x.dtype),), refusal="no kernel"
        ),
        mutates=("out",),
        finish=lambda result, x, out: result if out is None else out,
    )
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert double(x).tolist() == [2.0, 4.0]
    assert double(x, out) is out
    assert out.tolist() == [2.0, 4.0]
    assert double.operator.schema == "test_double(Tensor x, Tensor(a!)? out) -> Tensor"


@pytest.mark.usefixtures("undeclare")
def test_keyword_only_and_pair_arguments():
    from tk_serving.operator import Quantized

    def test_pair(x: torch.Tensor | Quantized, *, factor: float = 2.0) -> Quantized:
        """A pair."""
        data, sf = x if isinstance(x, tuple) else (x, torch.ones(1))
        return data.clone(), sf * factor

    def plan(x, factor):
        data, sf = x if isinstance(x, tuple) else (x, torch.ones(1))
        return Plan((Out(tuple(data.shape), data.dtype), Out(tuple(sf.shape), sf.dtype)), refusal="no kernel")

    pair = _declare(_as_family(test_pair), plan)
    assert pair.operator.schema == "test_pair(Tensor x, Tensor? x_1, float factor) -> (Tensor, Tensor)"
    assert pair((torch.zeros(2), torch.ones(3)), factor=3)[1].tolist() == [3.0, 3.0, 3.0]
    assert pair(torch.zeros(2))[1].tolist() == [2.0]
    with pytest.raises(
        TypeError, match=r"x: expected a torch.Tensor or a \(data, sf\) pair of tensors, got a tuple of 3"
    ):
        pair((torch.zeros(2),) * 3)


@pytest.mark.usefixtures("undeclare")
def test_one_name_is_declared_once():
    def topk_gate(x: torch.Tensor) -> torch.Tensor:
        """Again."""
        return x

    with pytest.raises(RuntimeError, match="declared twice"):
        _declare(_as_family(topk_gate), lambda x: Plan(()))


@pytest.mark.usefixtures("undeclare")
def test_contents_are_verified_on_request(change_settings):
    def test_verified(x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x.clone()

    def verify(x):
        if bool((x < 0).any()):
            raise ValueError("test_verified: x: expected no negative value, got one")

    verified = _declare(
        _as_family(test_verified), lambda x: Plan((Out(tuple(x.shape), x.dtype),), refusal="no kernel"), verify=verify
    )
    verified(torch.tensor([-1.0]))
    change_settings(check=True)
    with pytest.raises(ValueError, match="no negative value"):
        verified(torch.tensor([-1.0]))


@pytest.mark.parametrize("implementation", ["reference", "simulator"])
def test_results_go_into_tensors_with_their_padding_rows(change_settings, implementation):
    change_settings(cpu=implementation)
    cast = find("per_token_cast")
    call = (torch.randn(5, 256).bfloat16(), "e4m3", 128, None, True)
    expected = cast.public(*call)
    data, buffer = torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.full((20,), -1.0)
    scales = buffer[2:].as_strided((5, 2), (1, 8))
    cast.into((data, scales), *call)
    assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])
    assert buffer[2:18].view(2, 8)[:, 5:].abs().sum() == 0
    assert buffer[[0, 1, 18, 19]].tolist() == [-1.0] * 4


def test_a_tensor_that_ends_before_its_padding_rows_is_refused():
    call = (torch.randn(5, 256).bfloat16(), "e4m3", 128, None, True)
    data, scales = torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.empty_strided((5, 2), (1, 8))
    with pytest.raises(ValueError, match="expected storage of 16 elements, padding rows included, got 13"):
        find("per_token_cast").into((data, scales), *call)


def test_arguments_are_bound_as_python_binds_them():
    """``bind`` has a fast way for calls that fit; what it returns and refuses is what ``Signature.bind`` does."""

    def outcome(bind, *args):
        try:
            return bind(*args)
        except TypeError as error:
            return str(error)

    for op in operators():
        names = [p.name for p in op.parameters]
        for count in range(len(names) + 2):
            for keywords in ({}, {names[-1]: 7}, dict.fromkeys(names[count:], 1), {"unknown": 1}):
                args = tuple(range(count))
                fast = outcome(lambda a=args, k=keywords, op=op: op.bind(*a, **k))
                assert fast == outcome(lambda a=args, k=keywords, op=op: op._bind_slowly(a, k)), (
                    op.name,
                    count,
                    keywords,
                )
