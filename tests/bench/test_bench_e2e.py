"""The end-to-end benchmark without an engine: configurations, weights, comparison, record."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tk_serving import dispatch
from tk_serving.bench.e2e import alternate, child, engine, experts, families, models, support, weights

CONFIG = SimpleNamespace(
    hidden_size=256,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=128,
    intermediate_size=512,
    num_attention_heads=4,
    v_head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
)


# -- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", models.MODELS)
def test_configurations_have_the_published_shapes(model):
    from tk_serving.workloads import MODELS

    (facts,) = [m for m in MODELS if m.key == model.removesuffix(".2")]  # V3.2 has the layers of V3
    config = models.MODELS[model](4)
    config = config.get("text_config", config)
    assert config["num_hidden_layers"] == 4
    assert config.get("hc_mult", 0) == facts.hc_mult
    for name in ("hidden_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "scoring_func"):
        assert config[name] == getattr(facts, name)
    assert config["routed_scaling_factor"] == facts.routed_scaling_factor


def test_a_model_with_engram_gets_a_tokenizer(tmp_path):
    """Of every token id, and with as many ids left as the configuration says once capitals are the same."""
    tokenizers = pytest.importorskip("tokenizers")
    models.write("v3", 3, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    models.write("v3", 3, tmp_path, tokenizer=True)  # as servers of text need one
    (tmp_path / "tokenizer.json").unlink()
    models.write("v4.1", 3, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == text["vocab_size"]
    words = [tokenizer.decode([token]) for token in range(text["vocab_size"])]
    assert len({word.lower() for word in words}) == text["engram_compressed_vocab_size"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    assert text["engram_num_embeddings"][0] > columns * text["engram_vocab_size"]


# -- weights -------------------------------------------------------------------------------------------------------


def parameter(name, *shape, dtype=torch.bfloat16):
    module = torch.nn.Module()
    *path, last = name.split(".")
    owner = module
    for part in path:
        owner.add_module(part, torch.nn.Module())
        owner = getattr(owner, part)
    owner.register_parameter(last, torch.nn.Parameter(torch.zeros(*shape).to(dtype), requires_grad=False))
    weights.fill(module, CONFIG)
    return dict(module.named_parameters())[name].data


def test_products_keep_the_size_of_their_input():
    x = torch.randn(8, 256)
    plain = x @ parameter("layers.0.q_a_proj.weight", 320, 256).float().t()
    assert 0.8 < plain.std() < 1.2
    codes = parameter("layers.0.q_a_proj.weight", 256, 256, dtype=torch.float8_e4m3fn).float()
    scale = parameter("layers.0.q_a_proj.weight_scale_inv", 2, 2, dtype=torch.float32)
    quantised = x @ (codes * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()
    assert 0.4 < quantised.std() < 2.5
    assert len(scale.unique()) == 4, "scales differ from block to block"


def test_fp4_experts_have_random_codes_and_scales_with_a_spread():
    codes = parameter("experts.w13_weight", 2, 256, 128, dtype=torch.uint8)
    exponents = parameter("experts.w13_weight_scale", 2, 256, 8, dtype=torch.uint8)
    assert len(codes.unique()) > 200
    assert 3 <= len(exponents.unique()) < 9
    assert 116 < exponents.float().mean() < 125


def test_no_sublayer_writes_to_the_topics_and_routers_read_nothing_else():
    for name, dtype in (("self_attn.o_proj.weight", torch.bfloat16), ("experts.w2_weight", torch.float8_e4m3fn)):
        shape = (2, 256, 128) if "w2" in name else (256, 128)
        values = parameter(name, *shape, dtype=dtype).float()
        assert (values[..., -weights.TOPICS :, :] == 0).all()
        assert (values[..., : -weights.TOPICS, :] != 0).float().mean() > 0.9
    gate = parameter("mlp.gate.weight", 16, 256)
    assert (gate[:, : -weights.TOPICS] == 0).all()
    embedding = parameter("embed_tokens.weight", 200, 256)[:, -weights.TOPICS :]
    assert ((embedding != 0).sum(1) == 1).all()


def test_engram_adds_values_of_the_size_of_the_stream_and_leaves_the_topics():
    table = parameter("engram.embed_tokens.weight", 500, 256, dtype=torch.float8_e4m3fn).float()
    exponents = parameter("engram.embed_tokens.weight_scale_inv", 500, 8, dtype=torch.uint8).float()
    assert 0.7 < (table * torch.exp2(exponents - 127).repeat_interleave(32, 1)).std() < 2
    value = parameter("engram.wkv.weight", 5 * 256, 512, dtype=torch.float8_e4m3fn).float()[-256:]
    assert (value[-weights.TOPICS :] == 0).all()
    assert (value[: -weights.TOPICS] != 0).float().mean() > 0.9
    assert parameter("engram.q_weight", 4, 256).float().mean() == pytest.approx(1, abs=0.02)


def test_parameters_without_memory_are_left_out():
    module = torch.nn.Module()
    module.register_parameter("image_start", torch.nn.Parameter(torch.empty(8, device="meta"), requires_grad=False))
    weights.fill(module, CONFIG)
    assert module.image_start.is_meta


def test_no_routing_decision_hangs_on_rounding():
    from tk_serving.moe import top2_sum_gate

    gate = parameter("mlp.gate.weight", 16, 256).float()
    bias = parameter("mlp.gate.e_score_correction_bias", 16, dtype=torch.float32)
    assert (bias != 0).any()
    x = parameter("embed_tokens.weight", 128, 256).float()
    chosen = [
        top2_sum_gate((x * size) @ gate.t(), bias, 4, 2, 4, False, 0, 2.5, 0, 1, 0, 1, "sigmoid")[0].sort(-1).values
        for size in (0.3, 0.301, 0.5, 1.0)
    ]
    assert all(torch.equal(chosen[0], other) for other in chosen)
    assert len(chosen[0].unique()) == int((bias == 0).sum()), "all experts that may be chosen are"


def test_the_table_of_token_ids_has_distinct_experts():
    table = parameter("ffn.gate.tid2eid", 300, 4, dtype=torch.int32)
    assert all(len(row.unique()) == 4 for row in table)
    assert table.max() == 15


def test_the_same_name_has_the_same_values_in_every_process():
    assert torch.equal(parameter("a.b.weight", 64, 64), parameter("a.b.weight", 64, 64))
    assert not torch.equal(parameter("a.b.weight", 64, 64), parameter("a.c.weight", 64, 64))


def test_parts_of_a_divided_parameter_differ():
    def part(ranks):
        module = torch.nn.Module()
        module.add_module("a", torch.nn.Linear(8, 8, bias=False))
        module.add_module("whole", torch.nn.Linear(8, 8, bias=False))
        weights.fill(module, CONFIG, ranks)
        return module.a.weight.data, module.whole.weight.data

    first, second = part({"a": 0}), part({"a": 1})
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], part(None)[0])


# -- comparison and record -----------------------------------------------------------------------------------------


def answers(*tokens, shift=0.0):
    at = [[{str(t): -1.0 + shift, "99": -2.0} for t in text] for text in tokens]
    return {"tokens": [list(text) for text in tokens], "logprobs": at}


def test_texts_count_up_to_the_first_other_token():
    same = alternate.differences(answers((1, 2)), answers((1, 2)))
    assert same == {"max_logprob_diff": 0.0, "mean_logprob_diff": 0.0, "equal_texts": "1/1", "agree": True}
    ours, theirs = answers((1, 2, 3), (5,), shift=0.5), answers((1, 4, 3), (5,))
    ours["logprobs"][0][2]["3"] = 9.0
    assert alternate.differences(ours, theirs) == {
        "max_logprob_diff": 0.5,
        "mean_logprob_diff": pytest.approx(1.0 / 5, abs=1e-6),
        "equal_texts": "1/2",
        "agree": False,
    }


def test_kernels_have_families():
    names = {
        "fused_moe_kernel": "routed experts",
        "void marlin_moe_wna16::Marlin<...>": "routed experts",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>": "FP8 linear layers",
        "skinny_gemm_fp8_kernel": "FP8 linear layers",
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT": "dense products",
        "void per_token_group_quant_8bit_register_kernel<c10::BFloat16>": "casts",
        "void vllm::act_and_mul_kernel<c10::BFloat16>": "swiglu",
        "reduce_fused_kernel": "reduce",
        "void vllm::moe::moe_sum_vec_kernel<c10::BFloat16>": "reduce",
        "mhc_post_kernel": "mhc",
        "void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl<...>": "mhc",
        "gate_kernel": "routing",
        "pre_kernel": "mhc",
        "lossless_from_marlin_kernel": "routed experts",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, (deep_gemm::GemmType)1>": "routed experts",
        "void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<...>": "attention",
        "something": "other",
    }
    assert {name: families.family(name) for name in names} == names
    assert families.by_family({"gate_kernel": 1.0, "reduce_fused_kernel": 2.0, "topk_kernel": 3.0}) == {
        "routing": 4.0,
        "reduce": 2.0,
    }


class FakeSide:
    def __init__(self, ms):
        self.ms, self.log = ms, []

    def do(self, what, **arguments):
        self.log.append((what, arguments.get("seed")))
        if what == "kernels":
            return {"ms": {"gate_kernel": self.ms}, "calls": {"gate_kernel": 2.0}}
        return {"ms": self.ms, "wall_ms": self.ms + 1}


def test_sides_alternate_and_the_first_measurement_is_thrown_away():
    sides = {"stock": FakeSide(3.0), "ours": FakeSide(2.0)}
    row = alternate._phase(sides, alternate.Options(rounds=2), "decode", 8)
    assert (row["phase"], row["stock"], row["ours"], row["ratio"]) == ("decode 8 sequences", 3.0, 2.0, 1.5)
    assert row["gpu_ms_by_family"] == {"stock": {"routing": 3.0}, "ours": {"routing": 2.0}}
    assert row["launches"] == {"stock": 2.0, "ours": 2.0}
    assert row["rounds_ms"] == {"stock": [3.0, 3.0], "ours": [2.0, 2.0]}
    assert [seed for _, seed in sides["ours"].log] == [10, 11, 12, None], "both sides get the same prompts"
    assert sides["ours"].log == sides["stock"].log


def test_graphs_have_a_ratio_if_every_side_has_their_times():
    def side(ms, **graph):
        return alternate.Measured([{"ms": 3.0, "wall_ms": 4.0, **graph}] * 2, {"ms": {"k": ms}, "calls": {"k": 1.0}})

    both = {"stock": side(3.0, graph_ms=1.2), "ours": side(2.0, graph_ms=1.0)}
    row = alternate.row(both, alternate.Options(), "decode", 1)
    assert (row["graph_ms"], row["graph_ratio"]) == ({"stock": 1.2, "ours": 1.0}, 1.2)
    one = {**both, "ours": side(2.0)}
    assert "graph_ratio" not in alternate.row(one, alternate.Options(), "decode", 1)


class At:
    """An event, which knows when it was recorded."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = At.now

    def elapsed_time(self, later):
        return later.at - self.at


@pytest.mark.parametrize(("replays", "found"), [(1, 2.0), (2, 4.0), (0, None)])
def test_a_step_of_captured_graphs_has_the_time_of_these_graphs(monkeypatch, replays, found):
    def replay(graph):
        At.now += 2.0

    monkeypatch.setattr(torch.cuda, "Event", At)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)

    class Steps(engine.Engine):
        model = outputs = None

        def generate(self, sequences, prompt, tokens, seed=0, logprobs=None):
            for _ in range(tokens):
                self.step()
            return [], 1.0

    side = Steps()
    engine.time_graphs(side.graph_ms)
    kept = torch.cuda.CUDAGraph.replay  # as vLLM keeps it, once a part of a step is captured

    def step():
        At.now += 1.0  # of the host
        for _ in range(replays):
            kept(None)

    side.step = engine.timed(engine.by_step(step, side.graph_ms), side.step_ms)
    decoded = side.decode(1, 6, 0)
    assert decoded["ms"] == 1.0 + 2.0 * replays
    assert decoded.get("graph_ms") == found


def test_engines_are_timed_on_the_same_core_with_the_same_texts():
    cores = os.sched_getaffinity(0)
    before, after = At(enable_timing=True), At(enable_timing=True)
    seen, texts = [], []

    class Steps(engine.Engine):
        model = outputs = None

        def generate(self, *args, **kwargs):
            seen.append(os.sched_getaffinity(0))
            texts.append(kwargs)
            for event in (before, after):
                event.record()
            self.step_ms += [(before, after)] * 4
            return [], 1.0

    side = Steps()
    side.same_texts = {"replay": True}
    side.prefill(10, 0)
    side.decode(1, 4, 0)
    assert texts == [{}, {"replay": True}]
    assert seen == [{max(cores)}] * 2
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(
    ("gpu", "refuses", "more", "replays"),
    [
        (True, False, {}, True),
        (True, True, {}, False),
        (False, False, {}, False),
        (True, False, {"speculative_config": {"method": "ngram"}}, False),
    ],
)
def test_texts_are_given_where_vllm_can_do_that(monkeypatch, gpu, refuses, more, replays):
    from tk_serving.bench.e2e import vllm

    def make(enable_trace_replay=False, **arguments):
        if enable_trace_replay and refuses:
            raise ValueError("1 validation error: Value error, trace replay requires Model Runner V2")
        return {**arguments, "replays": enable_trace_replay}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    llm, found = vllm._with_replay(make, {"model": "m", **more})
    assert (llm, found) == ({"model": "m", **more, "replays": replays}, replays)


def test_what_else_an_engine_refuses_is_not_hidden(monkeypatch):
    from tk_serving.bench.e2e import vllm

    def make(**arguments):
        raise ValueError("no memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="no memory"):
        vllm._with_replay(make, {})


class Texts:
    """A side whose answers depend on how it is asked."""

    def __init__(self, plain, moved=0.0, small=0.0):
        self.shifts = {"outputs_moved": moved, "outputs": plain, "small": small}

    def do(self, what, **arguments):
        what = what.replace("_damped", "")
        return answers((1, 2), shift=self.shifts["small" if arguments.get("at_once") else what])


@pytest.mark.parametrize(
    ("ours", "moved", "small", "within"),
    [
        (0.001, 0.0, 0.0, False),
        (0.1, 0.0, 0.0, False),
        (0.08, 0.07, 0.0, True),
        (0.08, 0.0, 0.07, True),
        (0.1, 0.07, 0.0, False),
        (0.2, 0.1, 0, False),
    ],
)
def test_noise_is_recorded_beside_the_bounds(ours, moved, small, within):
    sides = {"stock": Texts(0.0, moved, small), "ours": Texts(ours)}
    found = alternate._compare(sides, alternate.Options())
    assert found["within_noise"] is within
    assert found["agree"] is (ours < alternate.MEAN_DIFFERENCE), "the bounds stay what they are"
    assert found["stock_from_itself"]["embedding moved"]["max_logprob_diff"] == moved
    assert found["stock_from_itself"]["batches of 8"]["max_logprob_diff"] == small
    assert found["passes"] is (found["agree"] if max(moved, small) < alternate.MEAN_DIFFERENCE else within)


class Damped(Texts):
    """A side whose differences shrink by half with every octave; beyond ``last`` it cannot be damped."""

    def __init__(self, plain, moved, last=9):
        super().__init__(plain, moved)
        self.last = last

    def do(self, what, octaves=0, **arguments):
        if octaves > self.last:
            raise alternate.EngineError("no gates")
        shift = self.shifts["outputs_moved" if what == "outputs_moved" else "outputs"]
        return answers((1, 2), shift=shift / 2**octaves)


@pytest.mark.parametrize(
    ("ours", "moved", "last", "equal"),
    [
        (0.055, 0.05, 9, True),  # as far as the engine is from itself, and within the bounds once that is
        (0.0, 0.0, 0, True),
        (0.1, 0.05, 9, False),
        (0.055, 0.05, 3, False),  # the engine never agrees with itself: nothing shows that ours does
        (0.001, 0.05, 3, True),  # ours keeps the bounds where the engine itself does not
        (0.001, 0.0, 9, True),
        (0.004, 0.0, 9, False),
    ],
)
def test_sides_are_equal_if_they_pass_at_every_damping_and_at_one_by_the_bounds(ours, moved, last, equal):
    sides = {"stock": Damped(0.0, moved, last), "ours": Damped(ours, 0.0, last)}
    found = alternate._compare(sides, alternate.Options(engine="sglang"))
    assert found["equal"] is equal
    assert list(found["damped"]) == [str(n) for n in alternate.DAMPINGS if 0 < n <= last]
    assert [level["bounds_apply"] for level in found["damped"].values()] == [
        moved / 2 ** int(n) < alternate.MEAN_DIFFERENCE for n in found["damped"]
    ]


class Tiny(engine.Engine):
    """An engine whose only text is what its embedding holds."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Module()
        self.net.embed_tokens = torch.nn.Embedding(100, 64, dtype=torch.bfloat16)

    @property
    def model(self):
        return self.net

    def generate(self, *_, **__):
        return None, 0.0

    def outputs(self, factor):
        return self.net.embed_tokens.weight.detach().clone() * factor


def test_the_embedding_moves_by_a_step_of_bfloat16_and_back():
    tiny = Tiny()
    before = tiny.outputs(1)
    moved = tiny.outputs_moved(0.25, factor=1)
    changed = moved != before
    assert 0.2 < changed.float().mean() < 0.3
    assert torch.allclose(moved[changed], before[changed], rtol=2**-6)
    assert torch.equal(tiny.outputs(1), before)


def test_sublayers_add_less_and_then_as_much_as_before():
    tiny = Tiny()
    tiny.net.layer = torch.nn.Module()
    tiny.net.layer.hc_attn_base = torch.nn.Parameter(torch.zeros(24))
    seen = []
    tiny.outputs = lambda: seen.append(tiny.net.layer.hc_attn_base.detach().clone())
    tiny.outputs_damped(3)
    assert (2 * seen[0][4:8].sigmoid()).allclose(torch.tensor(2 / 9)), "the gate of what a sublayer adds, 1 before"
    assert not seen[0][:4].any()
    assert not seen[0][8:].any()
    assert not tiny.net.layer.hc_attn_base.any()


def test_where_there_are_no_hyper_connections_the_last_scales_shrink():
    tiny = Tiny()
    tiny.net.o_proj = torch.nn.Module()
    tiny.net.o_proj.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2))
    seen = []
    tiny.outputs = lambda: seen.append(tiny.net.o_proj.weight_scale_inv.detach().clone())
    tiny.outputs_damped(2)
    assert (seen[0] == 0.25).all()
    assert (tiny.net.o_proj.weight_scale_inv == 1).all()
    with pytest.raises(ValueError, match="no gates"):
        Tiny().outputs_damped(2)


def test_a_wrong_operator_is_off_by_a_factor_and_only_meanwhile():
    from tk_serving import quant

    x = torch.randn(4, 256, dtype=torch.bfloat16)
    swiglu = quant.swiglu_forward(x, "bf16")
    right = quant.per_token_cast(x, "e4m3", 128)
    with engine.off_by("per_token_cast", 1.5):
        wrong = quant.per_token_cast(x, "e4m3", 128)
        assert torch.equal(quant.swiglu_forward(x, "bf16"), swiglu), "another operator"
    assert torch.equal(wrong[1], right[1] * 1.5)
    assert torch.equal(wrong[0].view(torch.uint8), right[0].view(torch.uint8)), "codes belong to their scales"
    assert torch.equal(quant.per_token_cast(x, "e4m3", 128)[1], right[1])


def test_wrong_operators_are_tried_one_by_one_at_every_damping():
    tiny = Tiny()
    tiny.outputs = lambda: {"by": dispatch.run is not run}
    tiny.outputs_damped = lambda octaves: {"octaves": octaves, **tiny.outputs()}
    run = dispatch.run
    found = tiny.wrong(["a", "b"], 1.1, (0, 5))
    assert {octaves: list(at) for octaves, at in found.items()} == {"0": ["", "a", "b"], "5": ["", "a", "b"]}
    assert found["5"]["a"] == {"octaves": 5, "by": True}
    assert dispatch.run is run


class Whole(FakeSide):
    """In place of an engine's process."""

    started: list = []
    benches: list = []

    def __init__(self, name, settings, log, kind):
        super().__init__({"stock": 3.0}.get(name, 2.0))
        self.name, self.log_file = name, log
        Whole.started.append((name, settings, kind))

    def answer(self, limit=None):
        if self.name == "resident":
            raise alternate.EngineError("no memory")

    def do(self, what, **arguments):
        if what == "sites":
            row = {"site": "mhc-post", "calls": 3, "beyond": 0, "largest": 1e-3, "mean": 1e-4}
            return {"rows": [row], "first": None}
        if what == "state":
            counted = {"operator": "mhc_post", "implementation": "kernel", "calls": 3}
            return {"start_s": 1.0, "counters": [counted, {**counted, "operator": "norm", "implementation": "engine"}]}
        if what == "wrong":
            assert (arguments["operators"], arguments["factor"]) == (["mhc_post"], alternate.WRONG)
            return {str(n): {"": answers((1,)), "mhc_post": answers((1,), shift=0.25)} for n in arguments["dampings"]}
        if what == "bench":
            Whole.benches.append((self.name, arguments["command"]))
            return {"avg_latency": {"stock": 3.0}.get(self.name, 2.0), "tokens_per_second": len(Whole.benches)}
        return answers((1, 2)) if what.startswith("outputs") else super().do(what, **arguments)

    def end(self):
        pass


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(alternate, "Side", Whole)
    monkeypatch.setattr(alternate, "_record", lambda options: {"device": "test", "rows": []})
    Whole.started.clear()
    Whole.benches.clear()
    options = alternate.Options(
        sizes=(8, 1), rounds=1, json=tmp_path / "r.json", experts=tmp_path / "x.json", logs=tmp_path / "logs"
    )
    alternate.run(options, Console(quiet=True))
    record = json.loads(options.json.read_text())
    phases = ["decode 1 sequence", "prefill 8000 tokens", "decode 8 sequences"]
    assert [(row["phase"], row["ratio"]) for row in record["rows"]] == [(phase, 1.5) for phase in phases]
    assert record["sites"]["v4-flash"]["first"] is None
    assert [name for name, _ in Whole.benches[:4]] == ["stock", "ours", "ours", "stock"]
    found = record["vllm_bench"]["v4-flash"]
    assert found["latency, batch size 8"]["ratio"] == 1.5
    assert found["throughput"]["runs"] == {"stock": [13, 16], "ours": [14, 15]}
    assert (found["throughput"]["stock"], found["throughput"]["ratio"]) == (16, round(15 / 16, 4))
    wrong = record["wrong"]["v4-flash"]
    assert {octaves: at["mhc_post"]["max_logprob_diff"] for octaves, at in wrong.items()} == {
        str(octaves): 0.25 for octaves in alternate.DAMPINGS
    }
    assert [name for name, _, _ in Whole.started] == ["stock", "ours", "compared", *experts.MODES]
    layers = {
        name: json.loads((tmp_path / "logs" / s["folder"] / "config.json").read_text()) for name, s, _ in Whole.started
    }
    assert {name: config["num_hidden_layers"] for name, config in layers.items()} == {
        "stock": 4, "ours": 4, "compared": 2, "w4a8": 4, "resident": 4, "upcast": 4,
    }  # fmt: skip
    assert {settings["longest"] for _, settings, _ in Whole.started} == {max(experts.SIZES)}
    rows = json.loads(options.experts.read_text())["rows"]
    steps = ["prefill 8000 tokens", "decode 8 sequences", "decode 1 sequence"]
    steps += [f"prefill {size} tokens" for size in experts.SIZES]
    assert [row["phase"] for row in rows] == [
        f"{step}, experts {mode}" for step in steps for mode in ("w4a8", "upcast")
    ], "the mode that failed is left out"
    assert all(row[name] == value for row in rows for name, value in {"stock": 3, "ours": 2, experts.OWN: 2}.items())
    assert {(row["ratio"], row["kernels_ratio"], row["equal"]) for row in rows} == {(1.5, 1.5, True)}
    assert sorted(map(int, rows[0]["damped"])) == [3, 5, 7, 9]


def test_the_record_keeps_the_rows_of_other_models(tmp_path):
    options = alternate.Options(model="v3", json=tmp_path / "record.json")
    options.json.write_text(
        json.dumps({"rows": [{"model": "v3", "a": 1}, {"model": "v4", "a": 2}], "engines": {"v4": 1}})
    )
    alternate._write({"rows": [{"model": "v3", "a": 3}], "engines": {"v3": 2}}, options.json, "v3")
    record = json.loads(options.json.read_text())
    assert record["rows"] == [{"model": "v4", "a": 2}, {"model": "v3", "a": 3}]
    assert record["engines"] == {"v4": 1, "v3": 2}


def test_ranks_that_share_a_gpu_are_compared_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(alternate, "Side", Whole)
    monkeypatch.setattr(alternate, "_record", lambda options: {"device": "test", "rows": []})
    Whole.started.clear()
    Whole.benches.clear()
    own = {"tensor_parallel_size": 2, "disable_custom_all_reduce": False}
    options = alternate.Options(model="v3", arguments=own, one_gpu=True, json=tmp_path / "r.json", logs=tmp_path / "l")
    alternate.run(options, Console(quiet=True))
    record = json.loads(options.json.read_text())
    name = "v3, tensor parallel 2, on one GPU"
    assert (record["rows"], Whole.benches) == ([], [])
    assert record["outputs"][name]["equal"] is True
    assert {part: list(record[part]) for part in ("engines", "settings", "sites", "wrong")} == {
        part: [name] for part in ("engines", "settings", "sites", "wrong")
    }
    assert sorted(record["engines"][name]) == ["ours", "stock"]
    assert [settings["arguments"] for _, settings, _ in Whole.started] == [{**alternate.ONE_GPU, **own}] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "x"}, "expected one of vllm, sglang"),
        ({"model": "x"}, "expected one of"),
        ({"one_gpu": True}, "expected vllm with a tensor_parallel_size"),
        ({"one_gpu": True, "engine": "sglang", "arguments": {"tensor_parallel_size": 2}}, "expected vllm with"),
        ({"one_gpu": True, "experts": Path("x.json"), "arguments": {"tensor_parallel_size": 2}}, "record is one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        alternate.run(alternate.Options(**options), Console(quiet=True))


def test_an_engine_that_ends_says_why(tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text("import sys; print('no such model', file=sys.stderr)")
    monkeypatch.setattr(child, "__name__", "broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = alternate.Side("ours", {}, tmp_path / "log")
    with pytest.raises(alternate.EngineError, match=r"ours: the engine ended .*\nno such model"):
        side.answer()
    side.end()


def test_an_engine_that_does_not_get_ready_says_where_it_is(tmp_path, monkeypatch):
    script = tmp_path / "stuck.py"
    script.write_text("import sys, time; print('compiling', file=sys.stderr, flush=True); time.sleep(60)")
    monkeypatch.setattr(child, "__name__", "stuck")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = alternate.Side("stock", {}, tmp_path / "log")
    with pytest.raises(alternate.EngineError, match=r"(?s)no answer within 2 s .*compiling"):
        side.answer(2)
    side._process.kill()
    side.end()


# -- the README's table --------------------------------------------------------------------------------------------

RECORD = {
    "device": "NVIDIA H200",
    "versions": {"vllm": "0.33.0"},
    "rows": [
        {"model": "v3", "phase": "decode 1 sequence", "ratio": 1.096, "max_logprob_diff": 0.0123},
        {"model": "v3", "phase": "prefill 8000 tokens", "ratio": 1.05, "max_logprob_diff": 0.0123},
    ],
    "engines": {
        "v3": {
            "ours": {
                "sites": [
                    ["routing", "a", "patched", ""],
                    ["swiglu", "b", "stock", "0.8x"],
                    ["x", "c", "not used", ""],
                ],
                "counters": [
                    {"operator": "a", "implementation": "kernel", "calls": 3},
                    {"operator": "d", "implementation": "engine", "calls": 3},
                ],
            }
        }
    },
}


def test_the_support_table_says_what_ran():
    line = support.table([RECORD]).splitlines()[-1]
    assert line == (
        "| v3 | vllm 0.33.0, NVIDIA H200 | `a` | `swiglu` | 0.0123 | "
        "decode 1 sequence: 1.10, prefill 8000 tokens: 1.05 |"
    )


def test_a_model_without_times_is_left_out_where_another_record_has_them():
    outputs = {"max_logprob_diff": 0.5}
    served = {**RECORD, "rows": [], "outputs": {"v3": outputs, "v4": outputs}}
    served["engines"] = {"v3": RECORD["engines"]["v3"], "v4": RECORD["engines"]["v3"]}
    lines = support.table([RECORD, served]).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| v3", "| v4"]
    assert lines[1].endswith("| 0.5 | not compared |")
    sglang = {**served, "engine": "sglang", "versions": {}}
    assert len(support.table([RECORD, sglang]).splitlines()[2:]) == 3


def test_only_what_is_between_the_markers_changes():
    text = f"before\n{support.BEGIN}\nold\n{support.END}\nafter\n"
    assert support.rewrite(text, "new") == f"before\n{support.BEGIN}\n\nnew\n\n{support.END}\nafter\n"
    with pytest.raises(ValueError, match="expected the markers"):
        support.rewrite("no markers", "new")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "v4-flash"),
        ({"kv_cache_memory_bytes": 1}, "v4-flash"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "v4-flash, tensor parallel 2, expert parallel",
        ),
        ({"moe_backend": "deep_gemm"}, "v4-flash, moe_backend deep_gemm"),
        ({"speculative_config": {"method": "ngram"}}, "v4-flash, speculative ngram"),
    ],
)
def test_records_say_what_is_particular_about_the_engines(arguments, name):
    assert alternate.Options(model="v4-flash", arguments=arguments).name == name
