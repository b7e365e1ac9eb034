"""Ring 3 writes what it saw: ``pytest -m gpu --record FILE`` keeps device, versions, date and a table as JSON."""

import collections
import datetime
import json
import pathlib

import pytest
import torch

from tk_serving.cli.env import collect
from tk_serving.environment import revision

MOST_CACHED_BYTES = 2 << 30


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write device, versions, date and results per operator as JSON")
    parser.addoption("--revision", default="", help="git revision to name in the record where no git is at hand")


def pytest_configure(config):
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(config), "ring3-recorder")


@pytest.fixture(autouse=True)
def free_memory(request):
    """Leave the tensors of a large test to the next one, in this process or another."""
    yield
    cached = torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_CACHED_BYTES
    if cached or request.node.get_closest_marker("large"):
        torch.cuda.empty_cache()


class Recorder:
    """Counts outcomes for each operator and writes the record when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.file = pathlib.Path(config.getoption("--record"))
        self.revision = config.getoption("--revision") or revision()
        self.outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.failures: dict[str, list[str]] = collections.defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        properties = dict(report.user_properties)
        name = properties.get("operator", report.nodeid.split("::")[1].split("[")[0])
        self.outcomes[name][report.outcome] += 1
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self.failures[name].append(f"{report.nodeid}: {properties.get('difference', last)}")

    def pytest_sessionfinish(self) -> None:
        found = collect()
        record = {
            "ring": 3,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "devices": found["cuda"]["devices"],
            "python": found["python"],
            "packages": {name: version for name, version in found["packages"].items() if version},
            "nvcc": found["cuda"]["nvcc"],
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "git revision": self.revision,
            "results": [
                {"operator": name, **outcome, "failures": self.failures.get(name, [])}
                for name, outcome in sorted(self.outcomes.items())
            ],
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(record, indent=1) + "\n")
