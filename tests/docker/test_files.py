"""The container files: linted, pinned, and without what an image must not have. `make images` builds and runs them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
LOCKED = sorted((ROOT / "docker" / "requirements").glob("*.txt"))


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{Path(sys.prefix) / 'bin'}") or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (requirements/dev.txt)")
    return found


def stages(file: Path) -> list[list[str]]:
    """The instructions of each stage, continuation lines joined and comments left out."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found: list[list[str]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.startswith("FROM"):
            found.append([])
        if found and line:
            found[-1].append(line)
    return found


def test_both_engines_have_a_file():
    assert [file.stem for file in FILES] == ["sglang", "vllm"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint(file):
    done = subprocess.run([tool("hadolint"), str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_compose_follows_the_schema():
    command = [
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        str(ROOT / "docker" / "compose.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_publishes_on_loopback_only():
    ports = re.findall(r'ports: \["([^"]+)"\]', (ROOT / "docker" / "compose.yaml").read_text())
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_last_stage(file):
    *_, last = stages(file)
    text = "\n".join(last)
    assert re.search(r"(?m)^USER [1-9]\d*$", text), "runs as an unprivileged user, by number"
    assert "HEALTHCHECK" in text
    assert not re.search(r"g\+\+|build-essential|nvcc|cuda-toolkit|hatchling|git\b", text), "build tools"
    assert "COPY --from=build /opt/tk-serving" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_wheels_are_installed_by_hash(file):
    installs = re.findall(r"pip install [^&;]+", "\n".join(stages(file)[0]))
    assert installs
    for install in installs:
        local = re.search(r"--no-deps --no-build-isolation \.", install)
        assert local or "--require-hashes --no-deps -r" in install, install


@pytest.mark.parametrize("file", LOCKED, ids=lambda file: file.name)
def test_every_locked_package_has_a_version_and_a_hash(file):
    entries = re.split(r"\n(?=\S)", file.read_text().split("\n", 1)[1].strip())
    assert len(entries) > 100
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[^\s\\]+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry


@pytest.mark.parametrize("file", LOCKED, ids=lambda file: file.name)
def test_locked_versions_are_those_that_are_tested(file):
    text = file.read_text()
    assert "\ntilelang==0.1.12 " in text
    assert "\napache-tvm-ffi==0.1.11 " in text
    wanted = [line for line in file.with_suffix(".in").read_text().splitlines() if re.match(r"[\w-]+==", line)]
    assert wanted
    assert all(re.search(rf"(?m)^{re.escape(line)}(\+cpu)? ", text) for line in wanted)
