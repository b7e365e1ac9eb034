import pytest
import torch

from tk_serving import config


@pytest.fixture(autouse=True)
def _restore():
    yield
    config.reload()
    config._num_sms = None
    config.set_token_alignment(128)


def test_environment_is_read_again_on_request(monkeypatch):
    monkeypatch.setenv("TK_SERVING_DISABLE", "topk_gate, routing ,")
    monkeypatch.setenv("TK_SERVING_CPU", "simulator")
    settings = config.reload()
    assert settings is config.settings
    assert settings.disable == {"topk_gate", "routing"}
    assert settings.cpu == "simulator"
    monkeypatch.delenv("TK_SERVING_DISABLE")
    monkeypatch.delenv("TK_SERVING_CPU")
    assert config.reload().disable == frozenset()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CPU", "gpu", "'reference' or 'simulator'"),
        ("CHECK", "maybe", "a valid boolean"),
        ("EXPERTS_MIN_TOKENS", "-1", "greater than or equal to 0"),
    ],
)
def test_wrong_setting_names_the_variable_and_the_choices(monkeypatch, name, value, expected):
    monkeypatch.setenv(f"TK_SERVING_{name}", value)
    with pytest.raises(ValueError, match=rf"^TK_SERVING_{name}: expected {expected}, got '{value}'$"):
        config.reload()


def test_every_setting_is_documented():
    assert all(field.description for field in config.Settings.model_fields.values())


def test_num_sms_is_bounded_by_the_device():
    limit = config.get_device_num_sms()
    assert config.get_num_sms() == limit
    config.set_num_sms(limit - 20)
    assert config.get_num_sms() == limit - 20
    for wrong in (0, limit + 1):
        with pytest.raises(ValueError, match=rf"set_num_sms: n: expected 1 to {limit}, got {wrong}"):
            config.set_num_sms(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_without_a_gpu_the_hopper_count_is_assumed():
    assert config.get_device_num_sms() == 132


def test_token_alignment():
    assert config.get_token_alignment() == 128
    config.set_token_alignment(16)
    assert config.get_token_alignment() == 16
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        config.set_token_alignment(0)
