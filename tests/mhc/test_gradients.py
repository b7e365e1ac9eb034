"""Gradients: backward references against numerical derivatives in float64, and the functions as autograd sees them."""

import pytest
import torch
from mhc_inputs import bf16, f32

from tk_serving import mhc
from tk_serving.config import settings
from tk_serving.modeling import mhc as modeling
from tk_serving.modeling.mhc import ops


def reference(name):
    return getattr(mhc, name).operator.reference


def checked(forward, backward, *inputs):
    """gradcheck of a function made of two references; ``backward(grads, *inputs)`` gives one gradient per input."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*args)
            return forward(*args)

        @staticmethod
        def backward(ctx, *grads):
            return backward(grads, *ctx.saved_tensors)

    leaves = [t.double().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(Function.apply, leaves, eps=1e-6, atol=1e-6, rtol=1e-5)


def test_expand_to_mhc():
    checked(
        lambda x: reference("expand_to_mhc")(x, 4),
        lambda grads, x: reference("expand_to_mhc_bwd")(*grads),
        f32(2, 3),
    )


def test_mhc_pre_apply_mix():
    checked(
        lambda x, mix: reference("mhc_pre_apply_mix")(x, mix),
        lambda grads, x, mix: reference("mhc_pre_apply_mix_bwd")(*grads, x, mix),
        f32(2, 4, 3),
        f32(2, 4, 1, seed=2),
    )


def test_mhc_post():
    checked(
        lambda *args: reference("mhc_post")(*args),
        lambda grads, *args: reference("mhc_post_bwd")(*args, *grads),
        f32(2, 3),
        f32(2, 4, 3, seed=2),
        f32(2, 4, 1, seed=3),
        f32(2, 4, 4, seed=4),
    )


@pytest.mark.parametrize("repeat", [1, 2, 7])
def test_sinkhorn_normalize(repeat):
    checked(
        lambda x: reference("sinkhorn_normalize")(x, repeat, 1e-3),
        lambda grads, x: reference("mhc_sinkhorn_bwd")(*grads, x, repeat, 1e-3),
        f32(2, 4, 4),
    )


def test_mhc_pre_split_mixes():
    checked(
        lambda *args: reference("mhc_pre_split_mixes")(*args, 4, 2.0, 1e-3),
        lambda grads, *args: reference("mhc_pre_split_mixes_bwd")(*grads, *args, 2.0),
        f32(3, 24),
        f32(3, seed=2),
        f32(24, seed=3),
    )


def test_mhc_head_compute_mix():
    checked(
        lambda *args: reference("mhc_head_compute_mix")(*args, 1e-3),
        lambda grads, *args: reference("mhc_head_compute_mix_bwd")(*grads, *args),
        f32(3, 4),
        f32(1, seed=2),
        f32(4, seed=3),
    )


def test_mhc_pre_norm_fn():
    def forward(residual, fn, weight):
        mul, sqr = reference("mhc_pre_norm_gemm")(residual, fn, weight, 2)
        out_mul, sqrsum, out = mul.new_empty(2, 1, 3), mul.new_empty(2, 1), mul.new_empty(2, 3)
        fold = reference("mhc_reduce_partials_and_rmsnorm_fwd")
        fold(mul.unsqueeze(2), sqr.unsqueeze(2), out_mul, sqrsum, out, 256, 1e-3, mul.shape[0])
        forward.sums = out_mul, sqrsum
        return out

    def backward(grads, residual, fn, weight):
        out_mul, sqrsum = forward.sums
        mul_grad, sqr_grad = torch.empty_like(out_mul), torch.empty_like(sqrsum)
        reference("mhc_reduce_partials_and_rmsnorm_bwd")(*grads, out_mul, sqrsum, mul_grad, sqr_grad, 256, 1e-3)
        residual_grad, folded = reference("mhc_pre_norm_gemm_bwd")(
            residual, fn, weight, mul_grad.squeeze(1), sqr_grad.squeeze(1)
        )
        return residual_grad, *reference("mhc_fn_normw_merge_bwd")(folded, fn, weight)

    checked(forward, backward, f32(2, 4, 64), f32(3, 256, seed=2) / 16, f32(256, seed=3))


def leaves(hidden=64, tokens=5):
    """residual, fn, norm weight, scale, base, sublayer output."""
    made = (
        bf16(tokens, 4, hidden),
        f32(24, 4 * hidden) / (4 * hidden) ** 0.5,
        f32(4 * hidden, seed=2).abs(),
        f32(3, seed=3),
        f32(24, seed=4),
        bf16(tokens, hidden, seed=5),
    )
    return [t.requires_grad_() for t in made]


OPTIONS = {"post_mult_value": 2.0, "sinkhorn_repeat": 20}


def plain(residual, fn, weight, scale, base, output):
    """One sublayer in ordinary torch: (input, updated streams)."""
    x = residual.flatten(1)
    mixes = (x @ (fn * weight).T) * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    z = mixes * torch.cat([scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)]) + base
    pre, post = z[:, :4].sigmoid() + 1e-6, z[:, 4:8].sigmoid() * 2
    comb = z[:, 8:].view(-1, 4, 4).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    updated = post.unsqueeze(-1) * output.unsqueeze(1) + torch.einsum("tio,tih->toh", comb, residual)
    return (pre.unsqueeze(-1) * residual).sum(1), updated


@pytest.fixture(params=["reference", "simulator"])
def cpu(request):
    saved, settings.cpu = settings.cpu, request.param
    yield
    settings.cpu = saved


@pytest.mark.usefixtures("cpu")
def test_a_sublayer_against_plain_torch_in_float64():
    given = leaves()
    residual, fn, weight, scale, base, output = given
    layer_input, mixes = modeling.mhc_pre(residual, fn, scale, base, norm_weight=weight, **OPTIONS)
    updated = ops.mhc_post(output, residual, *mixes)
    grads = bf16(5, 64, seed=6), bf16(5, 4, 64, seed=7)
    found = torch.autograd.grad([layer_input, updated], given, grads)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = torch.autograd.grad(plain(*wide), wide, [g.double() for g in grads])
    for leaf, got, want in zip(given, found, expected, strict=True):
        assert got.dtype == leaf.dtype
        assert float((got.double() - want).abs().max()) < 8e-3 * float(want.abs().max())


@pytest.mark.usefixtures("cpu")
def test_both_paths_give_the_same_bits():
    residual, fn, weight, scale, base, _ = leaves()
    recorded = modeling.mhc_pre(residual, fn, scale, base, norm_weight=weight, **OPTIONS)
    with torch.no_grad():
        fused = modeling.mhc_pre(residual, fn, scale, base, norm_weight=weight, **OPTIONS)
    assert torch.equal(recorded[0], fused[0])
    assert all(torch.equal(a, b) for a, b in zip(recorded[1], fused[1], strict=True))
    unweighted = modeling.mhc_pre(residual.detach(), fn.detach(), scale.detach(), base.detach(), **OPTIONS)
    assert not torch.equal(unweighted[0], fused[0])


@pytest.mark.usefixtures("cpu")
def test_both_paths_of_the_head_give_the_same_bits():
    residual, fn, weight = bf16(5, 4, 64).requires_grad_(), f32(4, 256) / 16, f32(256, seed=2).abs()
    scale, base = f32(1, seed=3), f32(4, seed=4)
    recorded = modeling.mhc_head(residual, fn, scale, base, norm_weight=weight)
    with torch.no_grad():
        assert torch.equal(recorded, modeling.mhc_head(residual, fn, scale, base, norm_weight=weight))
        rows = torch.cat([fn, f32(20, 256, seed=5)]), scale[0], torch.cat([base, f32(20, seed=6)])
        assert torch.equal(recorded, modeling.mhc_head(residual, *rows, norm_weight=weight))
    recorded.sum().backward()
    assert residual.grad.isfinite().all()


def test_gradient_of_24_rows_reaches_the_first_four():
    fn, base = f32(24, 256).requires_grad_(), f32(24, seed=4).requires_grad_()
    modeling.mhc_head(bf16(5, 4, 64), fn, f32(1, seed=3), base).float().sum().backward()
    assert fn.grad[:4].abs().sum() > 0
    assert fn.grad[4:].eq(0).all()
    assert base.grad[4:].eq(0).all()


def test_main_grad_is_added_to():
    given = leaves()
    residual, fn, weight, scale, base, output = given

    def backward():
        layer_input, mixes = modeling.mhc_pre(residual, fn, scale, base, norm_weight=weight, **OPTIONS)
        (layer_input.float().sum() + ops.mhc_post(output, residual, *mixes).float().sum()).backward()

    backward()
    parameters = (fn, weight, scale, base)
    expected = [p.grad for p in parameters]
    for p in parameters:
        p.grad, p.main_grad = None, torch.ones_like(p)
    backward()
    for p, want in zip(parameters, expected, strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, want + 1.0)


def test_a_part_of_the_chain_alone():
    """The residual's gradient is an ordinary tensor, so any function can be differentiated by itself."""
    residual = bf16(3, 4, 64).requires_grad_()
    mixes = ops.mhc_pre_norm_fn(residual, f32(24, 256), None, 1e-6)
    (grad,) = torch.autograd.grad(mixes.sum(), residual)
    assert grad.shape == residual.shape
    assert grad.dtype == torch.bfloat16


def test_unused_results_and_constant_inputs():
    mixes = f32(3, 24).requires_grad_()
    pre, _, _ = ops.mhc_pre_split_mixes(mixes, f32(3), f32(24), 4, 2.0, 1e-6)
    pre.sum().backward()
    assert mixes.grad[:, 4:].eq(0).all()
    assert mixes.grad[:, :4].abs().min() > 0


def test_the_names_of_the_1_0_line():
    for name in ops.__all__:
        assert getattr(ops, name) is getattr(mhc, name)
        assert getattr(mhc, name).__doc__


def test_modules_start_as_an_ordinary_residual_connection():
    torch.manual_seed(0)
    connection, head = modeling.HyperConnection(64), modeling.HyperHead(64)
    x = bf16(2, 3, 64)
    streams = modeling.expand_from_embedding(x)
    streams = connection(streams, lambda row: row * 2)
    out = head(streams)
    torch.testing.assert_close(out.float(), 3 * x.float(), rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*connection.parameters(), *head.parameters()))


def test_training_lowers_the_loss():
    """Two sublayers trained for 30 steps, with the same losses as in plain torch."""

    def run(pre, post, head):
        torch.manual_seed(0)
        blocks = [modeling.HyperConnection(64, sinkhorn_iters=20) for _ in range(2)]
        final = modeling.HyperHead(64)
        linear = [torch.nn.Linear(64, 64).bfloat16() for _ in range(2)]
        parameters = [p for m in (*blocks, final, *linear) for p in m.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.02)
        x, target = bf16(16, 64), bf16(16, 64, seed=1).float()
        losses = []
        for _ in range(30):
            streams = modeling.expand_from_embedding(x)
            for block, layer in zip(blocks, linear, strict=True):
                row, mixes = pre(streams, block)
                streams = post(layer(row).tanh(), streams, mixes)
            loss = (head(streams, final).float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ours = run(
        lambda streams, block: block.pre(streams),
        lambda y, streams, mixes: ops.mhc_post(y, streams, *mixes),
        lambda streams, final: final(streams),
    )

    def pre(streams, block):
        layer_input, _ = plain(
            streams.float(), block.fn, torch.ones(256), block.scale, block.base, streams[:, 0].float()
        )
        return layer_input.bfloat16(), block

    def post(y, streams, block):
        return plain(streams.float(), block.fn, torch.ones(256), block.scale, block.base, y.float())[1].bfloat16()

    def head(streams, final):
        x = streams.float().flatten(1)
        mix = (x @ final.fn.T) * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * final.scale + final.base
        return ((mix.sigmoid() + 1e-6).unsqueeze(-1) * streams.float()).sum(1).bfloat16()

    theirs = run(pre, post, head)
    assert ours[-1] < 0.9 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-2)
