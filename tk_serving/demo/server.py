"""An OpenAI-compatible server in a process group of its own, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0
_PATIENCE_S = (20.0, 5.0, 10.0)  # after the interrupt, the request to end, and the kill


class ServerError(RuntimeError):
    """The server did not start, or failed while it was serving."""


class Server:
    """Starts a server, and on leaving the context ends every process that it started.

    Args:
        arguments: arguments of the server, without host and port.
        log: file for everything the server prints.
        environment: variables to add to the environment.
        port: the port; 0 for any that is free.
        watch: called about twice a second while waiting, with the last line of the log.
        module: the module that starts the server.

    Attributes:
        last_lines: the end of the log when the server was told to end.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        port: int = 0,
        watch: Callable[[str], None] = lambda line: None,
        module: str = "vllm.entrypoints.openai.api_server",
    ) -> None:
        self.log = log
        self.port = port or _free_port()
        self._arguments = arguments
        self._environment = environment or {}
        self._watch = watch
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self.last_lines: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", self._module, *self._arguments]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the server to end, then kill what is left of its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        self.last_lines = self._log_lines(30)  # shutting down prints much that says nothing
        try:
            for sig, patience in zip((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), _PATIENCE_S, strict=True):
                with contextlib.suppress(ProcessLookupError):
                    if sig == signal.SIGINT:
                        process.send_signal(sig)
                    else:
                        os.killpg(process.pid, sig)
                deadline = time.monotonic() + patience
                while time.monotonic() < deadline:
                    process.poll()
                    if not _group_exists(process.pid):
                        return
                    time.sleep(0.1)
        except KeyboardInterrupt:  # a second Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise

    def get(self, path: str) -> str:
        """Body of a GET request."""
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_TIMEOUT_S) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Parsed body of a POST request.

        Raises:
            ServerError: the server refused the request or went away.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise ServerError(f"{path}: {error}") from error

    def _log_lines(self, count: int) -> list[str]:
        """The last lines of the log."""
        return self.log.read_text(errors="replace").splitlines()[-count:] if self.log.exists() else []

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the server ended with code {code} before it was ready")
            self._watch((self._log_lines(1) or [""])[0])
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.5)
        raise ServerError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _group_exists(group: int) -> bool:
    """Whether a process of the group is alive (a zombie that its parent has yet to reap is not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False
