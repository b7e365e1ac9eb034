"""tools/prebuild.py: what it compiles ahead of the tests on a GPU."""

import importlib.util
from pathlib import Path

from tk_serving.compile import cache
from tk_serving.operator import find

SPEC = importlib.util.spec_from_file_location("prebuild", Path(__file__).parents[2] / "tools/prebuild.py")
prebuild = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prebuild)


def test_each_kernel_that_no_cache_has_once(monkeypatch, tmp_path):
    op = find("per_token_cast")
    monkeypatch.setattr(prebuild, "operators", lambda: [op])
    monkeypatch.setattr(cache, "find", lambda launch, arch: None)
    found = [launch for launch, _ in prebuild.lacking("sm_90a")]
    assert {cache.digest(launch, "sm_90a") for launch in found} == {
        cache.digest(launch, "sm_90a") for launch in prebuild.launches(op)
    }
    assert len({cache.digest(launch, "sm_90a") for launch in found}) == len(found)
    assert {launch.config["aligned"] for launch in found} == {True, False}
    monkeypatch.setattr(cache, "find", lambda launch, arch: tmp_path)
    assert prebuild.lacking("sm_90a") == []
