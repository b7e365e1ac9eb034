"""From options to a record: saving, stopping, resuming."""

import json

import pytest

from tk_serving.bench import run


def measure(fake_timer, path=None, *names, **options):
    defaults = {"models": ("v3",), "tokens": (1, 2), "peers": ("reference",), "rounds": 2, "revision": "abc"}
    options = run.Options(names=names or ("topk_gate",), json=path, **{**defaults, **options})
    return run.measure(options, timer=fake_timer(2.0, 3.0), device="cpu")


def test_a_record_says_where_and_what(fake_timer):
    record = measure(fake_timer)
    assert (record.device, record.revision, record.copy_gbps, record.floor_us) == ("CPU", "abc", 4000.0, 1.0)
    assert record.versions["torch"]
    assert record.date.startswith("20")
    assert [(row.tokens, row.us, row.peer_us, row.ratio) for row in record.rows] == [
        (1, 2.0, 3.0, 1.5),
        (2, 2.0, 3.0, 1.5),
    ]
    assert record.aborted == ""


def test_modes_have_floors_of_their_own(fake_timer):
    record = measure(fake_timer, modes=("cold",))
    assert record.floors == {"graph": 1.0, "cold": 1.0}
    assert [row.mode for row in record.rows] == ["cold", "cold"]


def test_a_limit_ends_the_run_and_resume_does_the_rest(fake_timer, tmp_path):
    path = tmp_path / "a.json"
    record = measure(fake_timer, path, limit=1e-9)
    assert [row.tokens for row in record.rows] == [1]
    assert record.aborted == "the limit of 1e-09 s is reached; --resume measures the rest"
    record.save(path)
    record = measure(fake_timer, path, resume=True)
    assert [row.tokens for row in record.rows] == [1, 2]
    assert record.aborted == ""
    record.save(path)
    assert measure(fake_timer, path, resume=True).rows == record.rows


def test_without_resume_the_file_is_replaced(fake_timer, tmp_path):
    path = tmp_path / "a.json"
    measure(fake_timer, path, tokens=(4,)).save(path)
    assert [row.tokens for row in measure(fake_timer, path).rows] == [1, 2]


def test_another_revision_is_not_resumed(fake_timer, tmp_path):
    path = tmp_path / "a.json"
    measure(fake_timer, path).save(path)
    with pytest.raises(ValueError, match="merge: revision: expected 'abc', got 'def'"):
        measure(fake_timer, path, resume=True, tokens=(4,), revision="def")


def test_rows_are_saved_while_the_run_goes_on(fake_timer, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_EVERY_SECONDS", -1.0)
    path = tmp_path / "a.json"
    measure(fake_timer, path)  # saving the result is the caller's
    assert [row["tokens"] for row in json.loads(path.read_text())["rows"]] == [1, 2]


def test_chains_are_part_of_a_record(fake_timer):
    record = measure(fake_timer, chains=("v3",), engine="torch_ops")
    assert [(row.chain, row.peer, row.tokens) for row in record.chains] == [
        ("v3", "torch_ops", 1),
        ("v3", "torch_ops", 2),
    ]
    assert "router" in record.chains[0].left_out


def test_chains_are_saved_and_resumed(fake_timer, tmp_path):
    path = tmp_path / "a.json"
    measure(fake_timer, path, chains=("v3",), engine="torch_ops", tokens=(1,))
    assert [row["tokens"] for row in json.loads(path.read_text())["chains"]] == [1]
    saved = path.read_text().replace("no step that both sides can run", "kept")
    path.write_text(saved)
    record = measure(fake_timer, path, chains=("v3",), engine="torch_ops", resume=True)
    assert [row.tokens for row in record.chains] == [1, 2]
    assert record.chains[0].error == "kept"
