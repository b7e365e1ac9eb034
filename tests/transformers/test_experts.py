"""Routed experts through the registries of transformers, in other models, and with FP8 weights."""

import pytest
import torch
from test_outputs import off

from tk_serving import dispatch
from tk_serving_patches import apply, register_experts, unregister_experts

NAME = "tilekernels"


@pytest.fixture
def registered():
    register_experts()
    yield
    unregister_experts()


def ran():
    return {row["operator"] for row in dispatch.counters() if row["implementation"] == "reference"}


class TestRegistry:
    def test_from_pretrained(self, registered, make, tokens, tmp_path):
        stock = make("v4").eval()
        stock.save_pretrained(tmp_path)
        model = type(stock).from_pretrained(tmp_path, experts_implementation=NAME).eval()
        assert (
            model.get_experts_implementation() == {"": NAME} if hasattr(model, "get_experts_implementation") else True
        )
        with torch.no_grad():
            dispatch.reset_counters()
            patched = model(tokens).logits
            assert {"get_fused_mapping", "expand_to_fused", "swiglu_forward", "reduce_fused"} <= ran()
            torch.testing.assert_close(patched, stock(tokens).logits, rtol=1e-4, atol=1e-4)

    def test_set_on_a_loaded_model(self, registered, make, step):
        model = make("v3")
        stock = step(model)
        model.set_experts_implementation(NAME)
        patched = step(model)
        assert off(patched.logits, stock.logits) < 1e-5
        for parameter, grad in stock.grads.items():
            assert off(patched.grads[parameter], grad) < 1e-4, parameter

    def test_is_unknown_unless_registered(self, make):
        register_experts()
        register_experts()
        unregister_experts()
        with pytest.raises(ValueError, match="is not supported"):
            make("v3").set_experts_implementation(NAME)

    def test_another_choice_is_respected(self, make, tokens):
        model = make("v3").eval()
        model.config._experts_implementation_internal = "deepgemm"
        with apply(model) as handle:
            row = next(row for row in handle.report() if row.site == "experts")
        assert (row.status, row.reason) == ("skipped", "experts_implementation='deepgemm' is chosen")

    @pytest.mark.parametrize("chosen", ["eager", "grouped_mm", "batched_mm"])
    def test_stock_choices_are_replaced(self, chosen, make, tokens):
        model = make("v3").eval()
        model.set_experts_implementation(chosen)
        with torch.no_grad():
            stock = model(tokens).logits
            with apply(model, ops=["experts"], strict=True):
                dispatch.reset_counters()
                patched = model(tokens).logits
                assert "reduce_fused" in ran()
        torch.testing.assert_close(patched, stock, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
    def test_models_of_others(self, registered, family, tokens):
        """Another gate, biases and transposed weights included."""
        import transformers

        options = {"num_local_experts": 8} if family != "Qwen3Moe" else {"num_experts": 8, "moe_intermediate_size": 128}
        config = getattr(transformers, f"{family}Config")(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts_per_tok=2,
            **options,
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        model.set_experts_implementation("grouped_mm")

        def step():
            out = model(input_ids=tokens, labels=tokens)
            out.loss.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            return out.logits.detach(), grads

        stock = step()
        model.set_experts_implementation(NAME)
        dispatch.reset_counters()
        patched = step()
        assert "reduce_fused" in ran()
        assert ("swiglu_forward" in ran()) == (family != "GptOss")
        assert off(patched[0], stock[0]) < 1e-5
        for parameter, grad in stock[1].items():
            assert off(patched[1][parameter], grad) < 1e-4, parameter


class TestCalls:
    """The experts module by itself."""

    @pytest.fixture
    def experts(self, make):
        return make("v3").eval().model.layers[1].mlp.experts

    def test_ids_of_other_ranks(self, experts):
        """Expert parallelism marks pairs of other ranks with the id after the last."""
        torch.manual_seed(0)
        x, weights = torch.randn(6, 64, requires_grad=True), torch.rand(6, 4, requires_grad=True)
        ids = torch.stack([torch.randperm(16)[:4] for _ in range(6)])
        ids[1, 2], ids[3] = 16, 16
        experts._is_expert_parallel = True
        results = []
        for patch in (False, True):
            handle = apply(experts, ops=["experts"]) if patch else None
            out = experts(x, ids, torch.where(ids < 16, weights, 0.0))
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), [x, weights])))
            if handle:
                handle.revert()
        for stock, patched in zip(*results, strict=True):
            torch.testing.assert_close(patched, stock, rtol=1e-4, atol=1e-4)
        assert not results[1][0][3].any()

    def test_no_tokens(self, experts):
        with apply(experts) as handle:
            out = experts(torch.empty(0, 64), torch.empty(0, 4, dtype=torch.long), torch.empty(0, 4))
        assert out.shape == (0, 64)
        assert handle.report()[1].left == {"no tokens": 1}


class TestFP8:
    """On a CPU a loop stands for DeepGEMM's grouped products; the rest is the operators."""

    @pytest.fixture
    def experts(self, make):
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
        from transformers.integrations.moe import use_experts_implementation

        config = make("v4", hidden_size=128, moe_intermediate_size=256).config
        config._experts_implementation_internal = "eager"
        torch.manual_seed(0)
        forward, init = FP8Experts.forward, FP8Experts.__init__
        experts = use_experts_implementation(FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)(
            config, block_size=(128, 128)
        )
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
                blocks = torch.randn(16, weight.shape[1] // 128, 128, weight.shape[2] // 128, 128) * 0.05
                scale.copy_(blocks.abs().amax(dim=(2, 4)) / 448)
                weight.copy_((blocks / scale[:, :, None, :, None]).view(weight.shape))
        yield experts.requires_grad_(False)
        FP8Experts.forward, FP8Experts.__init__ = forward, init

    @staticmethod
    def expected(experts, x, ids, weights):
        """From the dequantised weights, without casting activations."""

        def values(name, e):
            scale = getattr(experts, f"{name}_scale_inv")[e].float()
            weight = getattr(experts, name)[e].float()
            return weight * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

        out = torch.zeros(len(x), x.shape[1])
        for t in range(len(x)):
            for k, e in enumerate(ids[t].tolist()):
                gate, up = (values("gate_up_proj", e) @ x[t].float()).chunk(2)
                gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
                out[t] += weights[t, k] * (values("down_proj", e) @ (torch.nn.functional.silu(gate) * up))
        return out

    @pytest.mark.parametrize("through", ["patch", "registry"])
    def test_outputs(self, through, experts, registered):
        torch.manual_seed(1)
        x = torch.randn(5, 128, dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(16)[:4] for _ in range(5)])
        weights = torch.rand(5, 4)
        dispatch.reset_counters()
        with torch.no_grad():
            if through == "patch":
                with apply(experts, strict=True) as handle:
                    out = experts(x, ids, weights)
                assert not handle.report()[0].left
            else:
                experts.config._experts_implementation_internal = NAME
                out = experts(x, ids, weights)
        assert {"expand_to_fused_and_cast", "swiglu_forward_and_per_token_cast", "reduce_fused"} <= ran()
        assert out.dtype == torch.bfloat16
        assert off(out, self.expected(experts, x, ids, weights)) < 0.05

    def test_training_stays_with_transformers(self, experts):
        x = torch.randn(2, 128, dtype=torch.bfloat16, requires_grad=True)
        with apply(experts) as handle:
            with pytest.raises(ImportError, match="kernel"):  # transformers' own products need a GPU
                experts(x, torch.zeros(2, 4, dtype=torch.long), torch.rand(2, 4))
            assert handle.report()[0].left == {"no backward through FP8 weights": 1}

    @pytest.mark.parametrize(
        ("attribute", "value", "reason"),
        [
            ("block_size", None, "weight blocks of None"),
            ("activation_scheme", "static", "static scales of the activations"),
            ("swiglu_alpha", 1.7, "a gate that is not SwiGLU"),
        ],
    )
    def test_refused(self, attribute, value, reason, experts):
        setattr(experts, attribute, value)
        with apply(experts) as handle:
            (row,) = handle.report()
        assert (row.status, row.reason) == ("skipped", reason)
