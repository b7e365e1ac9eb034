"""What a site leaves in the process is gone before the next test."""

import pytest

from tk_serving import dispatch, kept
from tk_serving_patches import comparing


@pytest.fixture(autouse=True)
def _nothing_counted():
    dispatch.reset_counters()
    comparing.reset()
    yield
    dispatch.reset_counters()
    comparing.reset()
    kept.forget()
