"""Which rows are picked from the declarations."""

import pytest

from tk_serving.bench.selection import select
from tk_serving.operator import find, operators


def test_everything_by_default():
    assert {task.op.name for task in select()} == {op.name for op in operators() if op.workloads}


def test_one_operator_with_the_tokens_of_its_workloads():
    tasks = select(["topk_gate"], ["v3"])
    assert [(task.workload.label, task.tokens) for task in tasks] == [
        *(("deepseek-v3-decode", count) for count in (1, 8, 64)),
        *(("deepseek-v3-prefill", count) for count in (512, 4096, 8192)),
    ]


def test_family_and_operator_do_not_repeat():
    family = select(["moe"], ["v3"], [8])
    assert [(t.op.name, t.params) for t in select(["moe", "moe.topk_gate"], ["v3"], [8])] == [
        (t.op.name, t.params) for t in family
    ]
    assert sum(task.op.name == "topk_gate" for task in family) == 1


def test_given_tokens_belong_to_the_closest_phase():
    tasks = select(["moe.topk_gate"], ["v4-flash"], [1, 128, 256, 4096])
    assert [(task.workload.label, task.tokens) for task in tasks] == [
        ("v4-flash-decode", 1),
        ("v4-flash-decode", 128),
        ("v4-flash-prefill", 256),
        ("v4-flash-prefill", 4096),
    ]


def test_sizes_that_are_no_phase_stay_their_own():
    """Rows of a weight, experts, parts of a sum: the given counts among them, else the smallest."""
    counts = [1, 64, 4096]
    assert [task.tokens for task in select(["per_block_cast"], ["v3"], counts)] == [4096]
    assert [task.tokens for task in select(["per_block_cast"], ["v4-pro"], counts)] == [6144]
    assert [task.tokens for task in select(["norm_backward"], ["v3"], counts)] == [4096]
    assert [task.tokens for task in select(["norm_forward"], ["v3"], counts)] == counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["topk_gat"],), "expected a declared operator such as topk_gate"),
        (((), ["v5"]), "bench: model: expected one of v3, v4-flash, v4-pro, v4.1, got 'v5'"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        select(*arguments)


def test_peers_are_declared_beside_the_workloads():
    assert "torch_ops" in find("topk_gate").peers
