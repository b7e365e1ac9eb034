"""The short form of the training comparison: kernels' autograd layers against plain torch, step by step."""

import importlib.util
import pathlib
import sys

import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_mhc_engram_moe.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_losses_agree_in_every_step(example):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, plain = example.compare(20, example.Sizes(batch=2, length=24), 0.01, "cpu")
    finally:
        torch.set_num_threads(threads)
    assert len(ours.losses) == 20
    assert max(example.differences(ours, plain)) < 0.01
    assert ours.losses[-1] < 0.9 * ours.losses[0], "nothing was learnt"


def test_a_missing_gradient_is_noticed(example):
    """What the comparison is worth: with sublayers that get no gradient the curves part."""

    class Wrong(example.Ours):
        @staticmethod
        def post(x, *rest):
            return example.Ours.post(x.detach(), *rest)

    sizes, threads = example.Sizes(batch=2, length=24), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        right, wrong = (example.Trainer(side, sizes, 0.01, "cpu") for side in (example.Plain, Wrong))
        for tokens in example.batches(12, sizes, "cpu"):
            right.step(tokens)
            wrong.step(tokens)
    finally:
        torch.set_num_threads(threads)
    assert max(example.differences(wrong, right)) > 0.01
