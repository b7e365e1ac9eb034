"""Pin what the images install: every wheel by version and SHA-256.

    python tools/lock_images.py [NAME ...]

For each docker/requirements/<engine>-<target>.in this writes a .txt of the same name for pip's --require-hashes. The
first lines of the .in file say for which Python and platform, and whether dependencies are resolved. Needs uv.
"""

import argparse
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docker" / "requirements"


def lock(source: Path) -> None:
    """Write the pinned requirements for one .in file."""
    text = source.read_text()
    python, glibc = _option(text, "python"), _option(text, "glibc")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--no-header", "--no-annotate"]
        command += ["--python-version", python, "--python-platform", f"x86_64-manylinux_{glibc.replace('.', '_')}"]
        if _option(text, "dependencies") == "listed":
            command.append("--no-deps")
        subprocess.run([*command, "--output-file", str(out), str(source)], cwd=ROOT, check=True)
        packages = tomllib.loads(out.read_text())["packages"]
    tags = _tags(python, glibc)
    # A wheel that is not on PyPI takes the place of the one that is.
    instead = {name: (version, [sha]) for name, version, sha in re.findall(r"(?m)^# instead: (\S+) (\S+) (\S+)$", text)}
    lines = [f"# Generated from {source.name} by tools/lock_images.py; do not edit."]
    for package in packages:
        name = package["name"]
        version, hashes = instead.get(name) or (package["version"], _hashes(package, tags))
        lines.append(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{h}" for h in hashes)]))
    source.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    print(f"{source.with_suffix('.txt').relative_to(ROOT)}: {len(packages)} packages")


def _option(text: str, name: str) -> str:
    found = re.search(rf"(?m)^# {name}: (\S+)", text)
    if found is None:
        raise SystemExit(f"lock_images: expected a line '# {name}: ...'")
    return found[1]


def _tags(python: str, glibc: str) -> set:
    version = tuple(int(part) for part in python.split("."))
    minor = int(glibc.split(".")[1])
    platforms = [f"manylinux_2_{m}_x86_64" for m in range(minor, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return {
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    }


def _hashes(package: dict, tags: set) -> list[str]:
    """The wheels that fit; the source distribution where there is none."""
    wheels = [w for w in package.get("wheels", ()) if parse_wheel_filename(_file(w))[3] & tags]
    chosen = wheels or [package["sdist"]]
    return sorted(item["hashes"]["sha256"] for item in chosen)


def _file(item: dict) -> str:
    return item.get("name") or item.get("url", item.get("path", "")).rsplit("/", 1)[-1].replace("%2B", "+")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="such as vllm-cuda; all by default")
    chosen = parser.parse_args().names
    for file in sorted(FOLDER.glob("*.in")):
        if not chosen or file.stem in chosen:
            lock(file)
