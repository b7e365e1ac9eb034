"""mhc_multilayer_recompute: equal to the chain, list lengths, ownership."""

import pytest
import torch
from mhc_inputs import bf16, f32

from tk_serving.mhc import mhc_multilayer_recompute, mhc_post, mhc_pre_apply_mix
from tk_serving.operator import find


def lists(layers, updates, *lead, hidden=64):
    pre = [f32(*lead, 4, 1, seed=i) for i in range(layers)]
    outputs = [bf16(*lead, hidden, seed=10 + i) for i in range(updates)]
    post = [f32(*lead, 4, 1, seed=20 + i) for i in range(updates)]
    comb = [f32(*lead, 4, 4, seed=30 + i) / 2 for i in range(updates)]
    inputs = [torch.full((*lead, hidden), float("nan")).bfloat16() for _ in range(layers)]
    residual = [torch.full((*lead, 4, hidden), float("nan")).bfloat16() for _ in range(updates)]
    return pre, outputs, post, comb, inputs, residual


@pytest.mark.parametrize("layers", [1, 4, 12, 13])
@pytest.mark.parametrize("last", [0, 1])
def test_equals_the_chain(layers, last, implementation):
    start, given = bf16(2, 3, 4, 64, seed=99), lists(layers, layers - 1 + last, 2, 3)
    assert find("mhc_multilayer_recompute").call(implementation, start, *given) is None
    pre, outputs, post, comb, inputs, residual = given
    streams = start
    for layer in range(layers):
        assert torch.equal(inputs[layer], mhc_pre_apply_mix(streams, pre[layer]))
        if layer < len(residual):
            streams = mhc_post(outputs[layer], streams, post[layer], comb[layer])
            assert torch.equal(residual[layer], streams)


def test_public_call_writes_the_lists():
    given = lists(2, 1, 3)
    assert mhc_multilayer_recompute(bf16(3, 4, 64), *given) is None
    assert all(t.isfinite().all() for t in (*given[4], *given[5]))


def test_no_tokens():
    mhc_multilayer_recompute(bf16(0, 4, 64), *lists(2, 1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g[0].clear(), "pre_mix_list: expected at least 1 tensor, got 0"),
        (lambda g: g[5].pop(), "residual_list: expected 3 or 2 tensors, got 1"),
        (lambda g: g[4].pop(), "layer_input_list: expected 3 tensors, got 2"),
        (lambda g: g[1].pop(), "layer_output_list: expected 2 tensors, got 1"),
        (lambda g: g[3].append(g[3][0]), "comb_mix_list: expected 2 tensors, got 3"),
        (
            lambda g: g[2].__setitem__(1, f32(4, 4, 1)),
            r"post_mix_list\[1\]: expected shape \[3, 4, 1\], got \[4, 4, 1\]",
        ),
    ],
)
def test_refused(change, message):
    given = lists(3, 2, 3)
    change(given)
    with pytest.raises(ValueError, match=f"mhc_multilayer_recompute: {message}"):
        mhc_multilayer_recompute(bf16(3, 4, 64), *given)
