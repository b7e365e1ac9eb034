"""The demo's checkpoint: complete, readable, and such that no layer can be wrong unnoticed."""

import json

import pytest
import torch

from tk_serving.demo import checkpoint, compare

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint.write("v3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probabilities(model):
    """Of every token after every position of the demo's prompts, one after the other."""
    ids = torch.tensor([[3 + ord(c) for c in "".join(compare.PROMPTS)]])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads only wait for each other
    with torch.no_grad():
        logits = model(ids).logits[0]
    torch.set_num_threads(threads)
    return logits.log_softmax(-1)


def test_the_configuration_is_that_of_deepseek_v3(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["topk_method"], config["scoring_func"], config["n_group"]) == ("noaux_tc", "sigmoid", 4)
    assert config["torch_dtype"] == "bfloat16"


def test_every_tensor_of_every_layer_changes_the_output_beyond_the_limit(model):
    from tk_serving.demo import LIMIT

    before = log_probabilities(model)
    for name, parameter in model.named_parameters():
        original = parameter.data.clone()
        # A matrix is negated; a norm weight, which must stay positive, halved.
        parameter.data.mul_(-1 if parameter.dim() > 1 else 0.5)
        difference = (log_probabilities(model) - before).abs().max().item()
        parameter.data.copy_(original)
        assert difference > 2 * LIMIT, f"{name}: {difference}"


def test_every_expert_is_used_and_matters(model):
    before = log_probabilities(model)
    for layer in model.model.layers[1:]:
        for expert in layer.mlp.experts.down_proj.data:
            expert.mul_(-1)
            assert (log_probabilities(model) - before).abs().max() > 0.02
            expert.mul_(-1)


def test_no_routing_decision_is_close(model):
    config = checkpoint.config("v3")
    margins = []

    def look(gate, inputs, _):
        x = inputs[0].reshape(-1, config["hidden_size"])
        keys = (x @ gate.weight.t()).sigmoid() + gate.e_score_correction_bias
        shape = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
        margins.extend(checkpoint._margin(row, *shape) for row in keys)

    hooks = [layer.mlp.gate.register_forward_hook(look) for layer in model.model.layers[1:]]
    log_probabilities(model)
    for hook in hooks:
        hook.remove()
    assert len(margins) > 90
    assert min(margins) > 0.03


def test_the_tokenizer_reads_any_text_and_marks_printable_tokens(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("grüße, 世界")["input_ids"]) == "grüße, 世界"
    allowed = checkpoint.printable(folder)
    assert len(allowed) == 29
    assert set(tokenizer.decode(allowed)) == set("abcdefghijklmnopqrstuvwxyz,. ")


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    again = checkpoint.write("v3", tmp_path / "again")
    other = checkpoint.write("v3", tmp_path / "other", seed=2)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert (other / name).read_bytes() != (folder / name).read_bytes()
