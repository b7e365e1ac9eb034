"""By which implementation a test calls an operator."""

import pytest


@pytest.fixture(params=["reference", "simulator"])
def implementation(request):
    return request.param
