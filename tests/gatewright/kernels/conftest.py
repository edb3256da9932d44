"""Every kernel test runs on each implementation that this machine has."""

import pytest

from gatewright.kernels import backend
from gatewright.kernels.native import build


@pytest.fixture(params=["torch", "cpp"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp" and build.compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setenv("GATEWRIGHT_KERNELS", request.param)
    assert (backend.native_library() is None) == (request.param == "torch")
    return str(request.param)
