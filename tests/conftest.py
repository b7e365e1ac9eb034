"""Builds of the tests go below the user's cache folder, by content: all checkouts of a machine share them."""

import logging
import os
import pathlib

import pytest

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tk-serving" / "tests"

# Before anything imports tk_serving or tilelang: both read their settings then.
os.environ.setdefault("TK_SERVING_SIMULATOR_CACHE", str(CACHE / "simulator"))
os.environ.setdefault("TILELANG_CACHE_DIR", str(CACHE / "tilelang"))
os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

# A function that cannot be traced is printed whole at this level; pytest shows the exception.
logging.getLogger("tilelang").setLevel(logging.CRITICAL + 1)


@pytest.fixture(autouse=True)
def _plans_anew():
    """Tests replace what plans follow from."""
    from tk_serving import kept

    kept.forget()


def pytest_addoption(parser):
    parser.addoption("--run-benchmark", action="store_true", help="after the tests, measure their operators")


def pytest_configure(config):
    if config.getoption("--run-benchmark"):
        from tk_serving.bench import pytest_summary

        if reason := pytest_summary.refusal():
            raise pytest.UsageError(reason)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--run-benchmark"):
        from rich.console import Console

        from tk_serving.bench import pytest_summary

        files = {item.path for item in getattr(terminalreporter._session, "items", ())}
        terminalreporter.section("benchmarks")
        pytest_summary.summarise(sorted(files), Console(width=max(terminalreporter._tw.fullwidth, 140)))
