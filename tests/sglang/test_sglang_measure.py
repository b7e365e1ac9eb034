"""The calls of the measurement on CPU tensors, and the table made from its record."""

import dataclasses
import gc
import json
import weakref
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("sglang.srt")

from tk_serving import dispatch
from tk_serving.workloads import MODELS
from tk_serving_patches import table as shared
from tk_serving_sglang import measure, table
from tk_serving_sglang.cases import CASES
from tk_serving_sglang.sites import SITES, _calls


def test_every_site_on_cuda_has_a_case():
    measured = {case.site.name for case in CASES}
    # V2's router, the CPU's experts and the torch form of the hash have no kernel of SGLang beside them.
    assert {site.name for site in SITES} - measured == {
        "routing-grouped",
        "routed-experts",
        "fp4-experts",
        "engram-hash",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_operators_take_the_call(case, published):
    published()
    case = dataclasses.replace(case, site=dataclasses.replace(case.site, unsuitable=lambda: None))
    (model, *_) = [m for m in MODELS if m.key in case.models]
    dispatch.reset_counters()
    _, ours = measure.calls(case, model, 3)
    first = measure.clone(ours())
    assert {row["implementation"] for row in dispatch.counters()} == {"reference"}, dispatch.counters()
    assert {row["operator"] for row in dispatch.counters()} <= set(case.site.operators)
    assert measure.compare(case, first, ours()) == 0


class Issued(TorchDispatchMode):
    """Operators of torch that do work on a GPU; what ours do inside is not seen."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not func.is_view and not name.startswith(("tk_serving::", "aten::empty")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


# SGLang takes the scaling factor out of the weight of a shared expert, for which our operator has no argument.
BESIDE = {"routing": ["aten::fill_.Scalar"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_launches_nothing_beside_our_operators(case, published, monkeypatch):
    published()
    run = dispatch.run

    def unseen(*args, **kwargs):
        with _disable_current_modes():
            return run(*args, **kwargs)

    monkeypatch.setattr(dispatch, "run", unseen)
    case = dataclasses.replace(case, site=dataclasses.replace(case.site, unsuitable=lambda: None))
    (model, *_) = [m for m in MODELS if m.key in case.models]
    _, ours = measure.calls(case, model, 3)
    ours()  # makes what is made once
    with Issued() as issued:
        ours()
    assert issued.names == BESIDE.get(case.name, [])


def test_a_difference_is_found():
    (case,) = [case for case in CASES if case.name == "SwiGLU"]
    one = torch.tensor([[1.0, -8.0]])
    assert measure.compare(case, one, one + torch.tensor([[0.0, 0.5]])) == pytest.approx(0.5 / 8)


RECORD = {
    "device": "GPU",
    "versions": {"sglang": "0.5.23"},
    "revision": "abc",
    "date": "today",
    "rows": [
        {"site": "quant", "model": "v3", "tokens": 1, "ratio": 1.2},
        {"site": "quant", "model": "v3", "tokens": 1, "ratio": 0.9},
        {"site": "quant", "model": "v3", "tokens": 64, "ratio": 1.1},
        {"site": "swiglu", "model": "v3", "tokens": 1, "ratio": 0.5},
        {"site": "mhc-pre", "model": "v4-flash", "tokens": 1, "error": "no kernel"},
    ],
}


def test_the_table_has_the_worst_case_of_a_site(tmp_path, monkeypatch):
    monkeypatch.setattr(table.measured, "file", tmp_path / "table.json")
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    assert table.measured.main(table.generate, [str(tmp_path / "record.json")]) == 0
    told = table.measured.read()
    assert told["record"]["revision"] == "abc"
    assert told["sites"] == {"quant": {"v3": [[1, 0.9], [64, 1.1]]}, "swiglu": {"v3": [[1, 0.5]]}}


def test_another_record_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table.measured, "file", tmp_path / "table.json")
    (tmp_path / "record.json").write_text('{"rows": [{"ratio": 1.0}]}')
    for file in ("record.json", "nothing.json"):
        with pytest.raises(SystemExit):
            table.measured.main(table.generate, [str(tmp_path / file)])
        assert "expected the measurements that the table is made of" in capsys.readouterr().err
    assert not table.measured.file.exists()


def test_the_shipped_table_can_be_read():
    told = table.measured.read()
    assert set(told["sites"]) <= {site.name for site in SITES}
    assert table.measured.file.read_text() == shared.text(told) or not told["sites"]


def test_what_is_slower_stays_with_sglang(tmp_path, monkeypatch):
    from tk_serving.quant.swiglu_forward import swiglu_forward

    monkeypatch.setattr(table.measured, "file", tmp_path / "table.json")
    (tmp_path / "table.json").write_text(shared.text(table.generate(RECORD)))
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    dispatch.reset_counters()
    table.measured.choose(7168, 256)
    try:
        assert table.measured.verdict("swiglu") == (True, "stock by table: 0.50x at 1 tokens")
        assert table.measured.verdict("quant") == (False, "in part stock by table: 0.90x at 1 tokens")
        assert _calls.plan("swiglu", ("swiglu_forward",), swiglu_forward, x, "bf16") is None
        assert _calls.plan("other", ("swiglu_forward",), swiglu_forward, x, "bf16") is not None
    finally:
        table.measured.forget()
    assert _calls.plan("swiglu", ("swiglu_forward",), swiglu_forward, x, "bf16") is not None
    (counted,) = dispatch.counters()
    assert counted["reason"] == "0.50x SGLang's speed at 1 tokens in the record"


def test_what_a_graph_reads_lives_as_long_as_its_measurement(monkeypatch):
    for name in ("Stream", "stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    x = torch.ones(1)
    read = weakref.ref(x)
    microseconds = measure.microseconds(lambda x=x: x + 1)
    del x
    gc.collect()
    assert read() is not None
    del microseconds
    gc.collect()
    assert read() is None
