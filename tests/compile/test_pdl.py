"""Programmatic dependent launch: what the pass adds, what it asks of the launch, and who may switch it off."""

import dataclasses

import pytest
import tilelang
import tilelang.language as T  # noqa: N812  the custom of TileLang
import torch
from tilelang import tvm

from tk_serving import config, kept, simulator
from tk_serving.compile import cache, kernels, pdl
from tk_serving.compile.targets import PASS_CONFIGS, target
from tk_serving.operator import find


@pytest.fixture(autouse=True)
def _restore():
    yield
    config.reload()


def launch():
    op = find("per_token_cast")
    return op.plan(*op.bind(torch.ones(2, 128, dtype=torch.bfloat16), "e4m3", 128)).launches[0]


def test_the_launch_is_asked_to_be_early():
    """By an attribute that TileLang's runtime reads: without it the wait has nothing to wait for."""
    goal = tvm.target.Target(target("sm_90a"))
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        lowered = [tilelang.lower(f, target=goal) for f in (kernels.built(launch()), launch().prim_func())]
    early = [[f.attrs.get("has_cuda_pdl_sync") for f in one.device_mod.functions.values()] for one in lowered]
    assert early == [[1], [None]]


def test_a_launch_may_let_the_next_one_begin_at_its_end():
    first, last = launch(), dataclasses.replace(launch(), trigger_last=True)
    assert first.key != last.key
    at_start, at_end = (kernels.cuda_source(one, "sm_90a").partition("__global__")[2] for one in (first, last))
    trigger = "cudaTriggerProgrammaticLaunchCompletion"
    assert at_start.index(trigger) < at_start.index("blockIdx")
    assert at_end.index("cudaGridDependencySynchronize") < at_end.index("blockIdx")
    assert at_end.index(trigger) > at_end.rindex("blockIdx")
    config.set_pdl(False)
    assert dataclasses.replace(launch(), trigger_last=True) == launch()


def test_off_means_without():
    config.set_pdl(False)
    assert "cudaGridDependency" not in kernels.cuda_source(launch(), "sm_90a")


def test_on_and_off_are_two_kernels_and_two_plans():
    op, x = find("per_token_cast"), torch.ones(2, 128, dtype=torch.bfloat16)
    found = []
    for enabled in (True, False):
        config.set_pdl(enabled)
        found.append((cache.digest(launch(), "sm_90a"), launch(), kept.form(op, op.bind(x, "e4m3", 128))))
    assert all(a != b for a, b in zip(*found, strict=True))


def test_the_simulator_runs_what_is_built():
    x = torch.randn(9, 128).bfloat16()
    op = find("per_token_cast")
    args = op.bind(x, "e4m3", 128)
    plan = op.plan(*args)
    kernel = simulator.Kernel("waiting", kernels.built(plan.launches[0]))
    results = [slot.empty(x.device) for slot in plan.outputs]
    kernel(*plan.launches[0].arguments(results, *args))
    for got, want in zip(results, op.call("reference", *args), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_function_without_a_kernel_is_refused():
    @T.prim_func
    def nothing(x: T.Tensor((1,), "float32")):
        x[0] = 0.0

    with pytest.raises(ValueError, match="nothing: expected one kernel, got 0"):
        pdl.waiting(nothing)
