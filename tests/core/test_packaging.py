"""The source distribution and the wheel: complete, typed, and working where nothing else of ours is installed."""

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the unpacked source distribution, so that what that lacks is missed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=next(folder.glob("*/")))
    return next(folder.glob("*.whl"))


def test_wheel_has_all_packages_their_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"tk_serving", "tk_serving_vllm", "tk_serving_sglang", "tk_serving_patches"}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == packages
    assert packages == {name.split("/")[0] for name in names if name.endswith("/py.typed")}
    assert any(name.startswith("tk_serving/simulator/runtime/") and name.endswith(".h") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_clean_environment_passes_doctor(wheel, tmp_path):
    """The dependencies are those of this environment; our own editable installation is not."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    theirs = [path for path in sys.path if path.endswith("-packages")]
    # A path file makes importable what lies in a folder, without running that folder's own path files.
    (site / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    found = run(python, "-c", "import tk_serving, tk_serving_vllm; print(tk_serving.__file__)", cwd=tmp_path)
    assert found.startswith(str(tmp_path))
    report = json.loads(run(python, "-m", "tk_serving.cli", "doctor", "--json", "--no-self-test", cwd=tmp_path))
    assert report["ok"], report
    assert (tmp_path / "venv" / "bin" / "tk-serving").exists()
