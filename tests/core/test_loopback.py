"""The demo's servers are for this machine alone."""

import pytest

from tk_serving.demo import server


@pytest.mark.parametrize("port", [0, 8123])
def test_demo_servers_bind_to_loopback(monkeypatch, tmp_path, port):
    started = []

    def start(command, **options):
        started.append(command)
        raise OSError("not started in this test")

    monkeypatch.setattr(server.subprocess, "Popen", start)
    with pytest.raises(OSError, match="not started"), server.Server(["--model", "x"], tmp_path / "log", port=port):
        pass
    (command,) = started
    # The last value of an option counts, so nothing in the arguments can open the server.
    assert command[-4:-1] == ["--host", "127.0.0.1", "--port"]
    assert int(command[-1]) == port or port == 0
