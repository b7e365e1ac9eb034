"""The flag, from the command line, a file and Python, without starting an engine."""

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt")

from tk_serving.config import settings
from tk_serving.demo import checkpoint
from tk_serving_patches import Ledger, Row
from tk_serving_sglang import activate, flag, report


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(checkpoint.write("v3", tmp_path_factory.mktemp("model")))


@pytest.fixture
def args(sglang_plugins):
    from sglang.srt import server_args

    return server_args


@pytest.fixture
def change(monkeypatch):
    return lambda **values: [monkeypatch.setattr(settings, key, value) for key, value in values.items()]


def parse(args, *words):
    return args.prepare_server_args(["--model-path", "dummy", "--device", "cpu", *words])


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def last_line(code, **environment):
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_plugin_imports_no_engine():
    code = "import json, sys, tk_serving_sglang, tk_serving_sglang.sites, tk_serving_patches.sglang;"
    names = last_line(code + "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))")
    assert not {"sglang", "tilelang"} & set(names)


def test_sglang_loads_the_plugin_which_only_adds_the_flag():
    """In a process of its own, with the environment variable that changes the default."""
    *imported, default, given = last_line(
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "import json, sys; from sglang.srt import server_args, runtime_context\n"
        "from tk_serving_sglang import flag\n"
        "found = [server_args.ServerArgs.__module__, [c.target for c in flag.ledger._changes],"
        " *(n in sys.modules for n in ('tk_serving_sglang.activate', 'tk_serving_sglang.sites', 'tilelang'))]\n"
        "parse, words = server_args.prepare_server_args, ['--model-path', 'dummy', '--device', 'cpu']\n"
        "choices = [parse(words).kernel_backend, parse([*words, '--kernel-backend', 'auto']).kernel_backend]\n"
        "print(json.dumps([*found, *choices]))",
        TK_SERVING_KERNEL_BACKEND="tilekernels",
    )
    assert imported == ["tk_serving_sglang.args", ["sglang.srt.runtime_context:publish"], False, False, False]
    assert (default, given) == ("tilekernels", "auto")


def test_registering_again_changes_nothing(args):
    from sglang.srt import runtime_context
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = args.ServerArgs, runtime_context.publish, len(HookRegistry._hooks[flag._TARGET])
    flag.install()
    assert before == (args.ServerArgs, runtime_context.publish, len(HookRegistry._hooks[flag._TARGET]))


def test_arguments_without_the_field_are_refused_where_the_environment_asks_for_the_backend(published, args, change):
    from sglang.srt import runtime_context

    stock = args.ServerArgs.__mro__[1](model_path="dummy", device="cpu")  # made before the plugins were loaded
    stock.resolve_once()
    runtime_context.publish(stock, role="tokenizer")
    change(kernel_backend="tilekernels")
    with pytest.raises(RuntimeError, match="made before SGLang's plugins were loaded"):
        runtime_context.publish(stock, role="tokenizer")


def test_the_command_line_has_the_flag(args):
    assert parse(args).kernel_backend == "auto"
    assert parse(args, "--kernel-backend", "tilekernels").kernel_backend == "tilekernels"
    assert parse(args, "--kernel-backend=auto").kernel_backend == "auto"


def test_a_configuration_file_has_the_flag(args, tmp_path):
    (tmp_path / "server.yaml").write_text("kernel-backend: tilekernels\nmodel-path: dummy\ndevice: cpu\n")
    assert args.prepare_server_args(["--config", str(tmp_path / "server.yaml")]).kernel_backend == "tilekernels"


def test_an_unknown_value_is_refused_with_the_choices(args, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(args, "--kernel-backend", "tilekernel")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "--kernel-backend" in message
    assert "auto" in message
    assert "tilekernels" in message
    with pytest.raises(ValueError, match="kernel_backend: expected one of auto, tilekernels, got 'tilekernel'"):
        args.ServerArgs(model_path="dummy", kernel_backend="tilekernel")


def test_the_engine_takes_the_keyword(args):
    import sglang

    assert sglang.Engine is not None  # imports the class, which has the arguments' class as an attribute
    flag.install()
    from sglang.srt.entrypoints.engine import Engine

    assert Engine.server_args_class is args.ServerArgs
    assert Engine.server_args_class(model_path="dummy", kernel_backend="tilekernels").kernel_backend == "tilekernels"


def test_unpickling_adds_the_flag_where_no_plugin_was_loaded(args, tmp_path):
    """What a Ray actor and a tokenizer worker do: unpickle the arguments, then publish them."""
    path = tmp_path / "arguments"
    path.write_bytes(pickle.dumps(args.ServerArgs(model_path="dummy", device="cpu", kernel_backend="tilekernels")))
    backend, flag_targets, metrics_targets = last_line(
        "import json, pickle\n"
        "from sglang.srt import plugins, runtime_context\n"
        f"arguments = pickle.load(open({str(path)!r}, 'rb'))\n"
        "arguments._resolution_finished = True  # by the process that sent them\n"
        "from tk_serving_sglang import flag, report\n"
        "assert not plugins._plugins_loaded\n"
        "runtime_context.publish(arguments, role='tokenizer')\n"
        "targets = [[change.target for change in l._changes] for l in (flag.ledger, report._ledger)]\n"
        "print(json.dumps([runtime_context.get_exec().kernel.kernel_backend, *targets]))",
        TK_SERVING_STATE_DIR=str(tmp_path),
    )
    assert backend == "tilekernels"
    assert flag_targets == ["sglang.srt.runtime_context:publish"]
    assert metrics_targets == ["sglang.srt.utils.common:add_prometheus_middleware"]


# -- activation ----------------------------------------------------------------------------------------------------


def test_a_scheduler_follows_its_configuration(published, model):
    from sglang.srt.layers.moe import topk
    from sglang.srt.runtime_context import get_exec

    stock = topk.biased_grouped_topk
    published(model_path=model, kernel_backend="tilekernels")
    assert get_exec().kernel.kernel_backend == "tilekernels"
    assert topk.biased_grouped_topk is not stock
    assert topk.biased_grouped_topk_gpu is topk.biased_grouped_topk  # the alias in the same module follows
    rows = {row.site: row for row in activate.ledger.rows()}
    assert {name for name, row in rows.items() if row.status == "patched"} == {"routing", "routed-experts", "swiglu"}
    assert {row.reason for row in rows.values() if row.status == "skipped"} == {"for cuda; this platform is cpu"}
    assert rows["mhc-pre"].status == "not used"
    published(model_path=model, kernel_backend="auto")
    assert topk.biased_grouped_topk is stock
    assert activate.ledger.rows() == []


def test_other_processes_patch_no_call_sites(published, model):
    published("tokenizer", model_path=model, kernel_backend="tilekernels")
    published("detokenizer", model_path=model, kernel_backend="tilekernels")
    assert activate.ledger.rows() == []


def test_the_main_process_shares_a_folder_with_its_children(published, model, change):
    change(state_dir="")
    published("tokenizer", model_path=model, kernel_backend="tilekernels")
    assert settings.state_dir == os.environ["TK_SERVING_STATE_DIR"]
    assert os.path.isdir(settings.state_dir)


def test_this_environment_can_honour_the_flag(args):
    arguments = args.ServerArgs(model_path="dummy", device="cpu")
    arguments.resolve_once()
    assert activate.problems(arguments) == []


def test_every_reason_not_to_start_is_listed(args, change, monkeypatch):
    change(disable=frozenset({"routing", "swiglu_froward"}))
    monkeypatch.setattr(activate, "_version", lambda: "0.5.22")
    arguments = args.ServerArgs(model_path="dummy", device="xpu", enable_torch_compile=True)
    first, second, third, fourth = activate.problems(arguments)
    assert first == "sglang 0.5.22 is installed; tested is 0.5.23"
    assert second == "the device is xpu; tested are cpu and cuda"
    assert third.startswith("--enable-torch-compile")
    assert fourth.startswith("TK_SERVING_DISABLE names swiglu_froward; known: ")
    assert "routing" in fourth.partition("known: ")[2]


def test_refusal_stops_before_the_engine_starts(args, model, monkeypatch):
    monkeypatch.setattr(activate, "_version", lambda: "9.9")
    arguments = args.ServerArgs(model_path=model, device="cpu", kernel_backend="tilekernels")
    with pytest.raises(RuntimeError, match=r"cannot be honoured:\n  - sglang 9\.9 is installed; tested is 0\.5\.23"):
        arguments.resolve_once()


def test_other_models_are_refused(args, model, monkeypatch):
    monkeypatch.setattr(activate, "_architecture", lambda arguments: "LlamaForCausalLM")
    arguments = args.ServerArgs(model_path=model, device="cpu", kernel_backend="tilekernels")
    with pytest.raises(RuntimeError, match="no call sites are known for LlamaForCausalLM; known models: Deepseek"):
        arguments.resolve_once()


# -- proof that it happened ----------------------------------------------------------------------------------------


def test_schedulers_report_and_the_main_process_insists(tmp_path, change):
    change(state_dir=str(tmp_path))
    activate.confirm([{"status": "ready", activate.KEY: []}, {"status": "ready", activate.KEY: []}])
    with pytest.raises(RuntimeError, match="scheduler 1 reports no call sites"):
        activate.confirm([{"status": "ready", activate.KEY: []}, {"status": "ready"}])
    with pytest.raises(RuntimeError, match="no scheduler reports call sites"):
        activate.confirm([{"max_req_input_len": 1}])  # a data-parallel controller
    (tmp_path / "tk-serving-1.json").write_text('{"pid": 1, "counters": [], "sites": [{"site": "routing"}]}')
    activate.confirm([{"max_req_input_len": 1}])


def test_the_handshake_and_the_server_information_have_the_report(monkeypatch):
    ledger = Ledger()
    ledger._rows["routing"] = [Row("routing", "top2_sum_gate", "patched")]
    monkeypatch.setattr(activate, "ledger", ledger)
    assert activate._get_init_info(lambda self: {"status": "ready"})(None) == {
        "status": "ready",
        activate.KEY: [{"site": "routing", "operator": "top2_sum_gate", "status": "patched", "reason": ""}],
    }
    output = SimpleNamespace(internal_state={})
    told = activate._get_internal_state(lambda self, request: output)(None, None).internal_state[activate.KEY]
    assert told["sites"][0]["status"] == "patched"
    assert len(told["kernels"]) == 12


def test_a_call_site_that_other_code_took_back_stops_the_scheduler(published, model, monkeypatch):
    from sglang.srt.layers.moe import topk

    published(model_path=model, kernel_backend="tilekernels")
    ours = topk.biased_grouped_topk
    topk.biased_grouped_topk = None
    try:
        with pytest.raises(RuntimeError, match="biased_grouped_topk was replaced by other code"):
            activate._get_init_info(lambda self: {})(None)
    finally:
        topk.biased_grouped_topk = ours


def test_the_metrics_page_has_the_counters(sglang_plugins, tmp_path, monkeypatch):
    import prometheus_client
    from sglang.srt.utils import common

    (tmp_path / "tk-serving-1.json").write_text(
        json.dumps(
            {
                "pid": 1,
                "sites": [],
                "counters": [{"operator": "topk_gate", "implementation": "kernel", "reason": "", "calls": 3}],
            }
        )
    )
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    registries = []
    monkeypatch.setattr(prometheus_client, "make_asgi_app", lambda registry: registries.append(registry) or str)
    made = prometheus_client.make_asgi_app
    report.expose(str(tmp_path))
    try:
        common.add_prometheus_middleware(SimpleNamespace(routes=[]))
    finally:
        report._ledger.revert()
    assert prometheus_client.make_asgi_app is made
    page = prometheus_client.generate_latest(registries[0]).decode()
    assert 'tk_serving_calls_total{implementation="kernel",operator="topk_gate",reason=""} 3.0' in page
