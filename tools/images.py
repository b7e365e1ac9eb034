"""Build the CPU variants of the images without Docker, start the tiny model in them, and ask a question.

    python tools/images.py [vllm] [sglang] [--keep]

Needs root and Debian's buildah and debootstrap. The base image is made by debootstrap: no registry of images is asked.
Where no OCI runtime may start, as in most containers, steps run in a chroot; BUILDAH_ISOLATION decides otherwise.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "localhost/tk-serving-base:bookworm"
MIRROR = "http://deb.debian.org/debian"
START_TIMEOUT_S = 900
SERVE = {
    "vllm": "--dtype bfloat16 --enforce-eager --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 512",
    "sglang": "--device cpu --dtype bfloat16 --attention-backend torch_native --disable-overlap-schedule "
    "--max-total-tokens 512 --max-running-requests 2 --chunked-prefill-size 64 --mem-fraction-static 0.3 "
    "--skip-server-warmup --enable-metrics",
}
WRITE = """
import pathlib, sys
from tk_serving.demo import checkpoint
checkpoint.write("v3", pathlib.Path(sys.argv[1]))
"""
MODEL = {"vllm": [], "sglang": ["--model-path"]}
ENVIRONMENT = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}


def buildah(*arguments: str | Path) -> str:
    """Run buildah; what it prints."""
    command = ["buildah", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_environment()).stdout.strip()


def _environment() -> dict[str, str]:
    """Chroot isolation without CAP_SYS_RESOURCE: OCI runtimes set limits."""
    capabilities = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    return {"BUILDAH_ISOLATION": "oci" if capabilities >> 24 & 1 else "chroot", **os.environ}


def _stored() -> dict[str, set[str]]:
    """Containers and images of this machine, by the command that removes them."""
    return {
        "rm": set(buildah("containers", "--quiet", "--notruncate").split()),
        "rmi": set(buildah("images", "--quiet", "--no-trunc").split()),
    }


@contextlib.contextmanager
def _tidy(keep: bool) -> Iterator[None]:
    """After a success remove what the build has left: containers of its stages and, unless kept, all of its layers."""
    before = _stored()
    yield
    for added in _stored()["rm"] - before["rm"]:
        buildah("rm", added)
    while not keep and (added := _stored()["rmi"] - before["rmi"]):  # a layer shows when that above it has gone
        buildah("rmi", added.pop())


def base() -> None:
    """Make the base image, unless it is there."""
    if subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True).returncode == 0:
        return
    print(f"images: {BASE} from {MIRROR} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "rootfs"
        log = subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", tree, MIRROR],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if log.returncode:
            raise SystemExit(f"images: debootstrap failed:\n{log.stdout[-2000:]}")
        container = buildah("from", "scratch")
        try:
            buildah("add", "--quiet", container, tree, "/")
            buildah("commit", "--quiet", container, BASE)
        finally:
            buildah("rm", container)


def build(engine: str) -> str:
    """Build the image of an engine; its name."""
    name = f"localhost/tk-serving-{engine}:cpu"
    arguments = {"TARGET": "cpu", "BUILD_IMAGE": BASE, "BASE_IMAGE": BASE}
    command = [
        "bud",
        "--format",
        "docker",
        "--pull-never",
        "--layers",
        "--tag",
        name,
        "--file",
        f"docker/{engine}.Dockerfile",
    ]
    command += [part for item in arguments.items() for part in ("--build-arg", "=".join(item))]
    with tempfile.TemporaryDirectory() as folder:
        volumes = _pip_as_here(Path(folder))
        if len(volumes) > 1:  # pip is told here where to look for wheels
            command += ["--build-arg", "TORCH_INDEX="]
        command += [part for volume in volumes for part in ("--volume", volume)]
        print(f"images: building {name} ...", flush=True)
        start = time.monotonic()
        subprocess.run(["buildah", *command, "."], cwd=ROOT, check=True, env=_environment())
    size = json.loads(buildah("images", "--json", name))[0]["size"]
    print(f"images: {name}, {size}, {time.monotonic() - start:.0f} s", flush=True)
    return name


def _pip_as_here(folder: Path) -> list[str]:
    """Volumes that make pip in the build use the indexes, local wheels and certificates that pip uses here."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    config = configparser.RawConfigParser()
    config["global"] = {}
    volumes = []
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option not in ("find-links", "index-url", "extra-index-url", "cert", "timeout"):
            continue
        text = value.strip("'").replace("\\n", "\n")
        config["global"][option] = text
        for word in text.split():
            place = Path(word.removeprefix("file://"))
            if place.is_absolute() and place.exists():
                place = place.parent if place.name == "simple" else place  # the index names files beside itself
                volumes.append(f"{place}:{place}:ro")
    with (folder / "pip.conf").open("w") as file:
        config.write(file)
    return sorted({*volumes, f"{folder / 'pip.conf'}:/etc/pip.conf:ro"})


def ask(engine: str, image: str) -> None:
    """Start the image with the tiny model and ask for a completion.

    Raises:
        SystemExit: the server did not start or answer, or no call of ours was counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        subprocess.run([sys.executable, "-c", WRITE, f"{folder}/model"], check=True, cwd=ROOT)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        with _container(image) as container:
            print(
                f"images: {engine}: user {_run(container, ['id', '-un'])}, {_run(container, ['python', '-V'])}",
                flush=True,
            )
            print(_run(container, ["tk-serving", "doctor", "--no-self-test"]), flush=True)
            with _server(engine, image, container, Path(folder)) as url:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
                request = urllib.request.Request(
                    f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                answer = json.loads(urllib.request.urlopen(request, timeout=600).read())
                print(f"images: {engine}: {answer['choices'][0]['text']!r}, {answer['usage']}", flush=True)
                time.sleep(3)  # the workers write their counters every second
                metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    calls = [line for line in metrics.splitlines() if line.startswith("tk_serving_calls_total")]
    print("\n".join(calls))
    if not calls:
        raise SystemExit(f"images: {engine}: no calls of tk-serving at /metrics")


@contextlib.contextmanager
def _container(image: str) -> Iterator[str]:
    container = buildah("from", "--pull-never", image)
    try:
        yield container
    finally:
        buildah("rm", container)


def _run(container: str, command: list[str]) -> str:
    return buildah("run", container, "--", *command)


@contextlib.contextmanager
def _server(engine: str, image: str, container: str, folder: Path) -> Iterator[str]:
    """The image's entry point on a free loopback port, once its own health check succeeds; ended afterwards."""
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {**ENVIRONMENT[engine], "HF_HUB_OFFLINE": "1", "PORT": port}
    run = ["buildah", "run", *(part for item in variables.items() for part in ("--env", "=".join(item)))]
    command = [*config["Entrypoint"], *MODEL[engine], "/model", *SERVE[engine].split(), "--served-model-name", "tiny"]
    command += ["--kernel-backend", "tilekernels", "--host", "127.0.0.1", "--port", port]
    health = config["Healthcheck"]["Test"][1:]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*run, "--volume", f"{folder}/model:/model:ro", container, "--", *command],
            stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while subprocess.run([*run, container, "--", *health], env=_environment(), capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"images: {engine} did not start:\n{log.read_text()[-6000:]}")
            time.sleep(3)
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        print(log.read_text()[-6000:])
        raise
    finally:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engines", nargs="*", choices=[*SERVE, []], default=["vllm"])
    parser.add_argument(
        "--keep", action="store_true", help="keep the images, and the layers that make the next build fast"
    )
    options = parser.parse_args()
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(
            f"images: {' and '.join(missing)} missing; on Debian and Ubuntu: apt-get install {' '.join(missing)}"
        )
    base()
    for engine in options.engines or ["vllm"]:
        with _tidy(options.keep):
            ask(engine, build(engine))
        print(f"images: {engine}: OK", flush=True)


if __name__ == "__main__":
    main()
