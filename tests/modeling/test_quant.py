"""Gradients of SwiGLU and RMSNorm against autograd through plain torch."""

import pytest
import torch

from tk_serving.modeling.quant import rms_norm, swiglu


def backward(result, inputs):
    torch.manual_seed(1)
    grad = torch.randn(result.shape)
    return torch.autograd.grad((result.float() * grad).sum(), inputs)


class TestSwiGLU:
    @staticmethod
    def expected(x, limit, weights):
        gate, up = x.chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = torch.nn.functional.silu(gate) * up
        return out if weights is None else out * weights[:, None]

    @pytest.mark.parametrize("limit", [None, 0.5])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_gradient(self, limit, weighted):
        torch.manual_seed(0)
        x = torch.randn(5, 256, requires_grad=True)
        weights = torch.rand(5, requires_grad=True) if weighted else None
        inputs = [x, weights] if weighted else [x]
        ours = swiglu(x, clamp_value=limit, row_weights=weights)
        expected = self.expected(x, limit, weights)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(backward(ours, inputs), backward(expected, inputs), rtol=1e-4, atol=1e-5)

    def test_bfloat16(self):
        torch.manual_seed(0)
        x = torch.randn(5, 256).bfloat16().requires_grad_()
        wide = x.detach().float().requires_grad_()
        (ours,), (expected,) = backward(swiglu(x), [x]), backward(self.expected(wide, None, None), [wide])
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), expected, rtol=1e-2, atol=1e-2)

    def test_gradient_at_the_limit(self):
        x = torch.zeros(1, 256)
        x[0, :3], x[0, 128:131] = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, -1.0, 3.0])
        x.requires_grad_()
        torch.testing.assert_close(
            backward(swiglu(x, clamp_value=1.0), [x]), backward(self.expected(x, 1.0, None), [x])
        )


class TestRMSNorm:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("shape", [(6, 32), (2, 3, 4, 32)])
    def test_gradient(self, weighted, shape):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        weight = torch.randn(32, requires_grad=True) if weighted else None
        inputs = [x, weight] if weighted else [x]
        expected = torch.nn.functional.rms_norm(x, (32,), weight, 1e-6)
        ours = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backward(ours, inputs), backward(expected, inputs), rtol=1e-4, atol=1e-5)

    def test_rows_with_gaps(self):
        x = torch.randn(4, 48)[:, :32]
        torch.testing.assert_close(rms_norm(x, None, 1e-6), torch.nn.functional.rms_norm(x, (32,), None, 1e-6))
