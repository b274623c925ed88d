"""The state of NVLS: one rule for the host's description and for every figure."""

import pytest

from vendors import multicast

AVAILABLE = "NCCL INFO NVLS multicast support is available on dev 0"
MISSING = "NCCL INFO NVLS multicast support is not available on dev 0"


@pytest.mark.parametrize(
    ("host", "switch", "log", "state"),
    [
        (("nvidia", 4), "0", None, "off"),
        (("nvidia", 4), "0", AVAILABLE, "off"),
        (("nvidia", 4), None, None, "on"),
        (("nvidia", 4), "1", AVAILABLE, "on"),
        (("nvidia", 4), None, MISSING, "unavailable"),
        (("nvidia", 4), None, "", "unavailable"),
        (("nvidia", 4), None, f"{AVAILABLE}\n{MISSING}", "unavailable"),
        (("nvidia", 1), "0", None, "unavailable"),
        (("amd", 8), None, AVAILABLE, "unavailable"),
        (("cpu", 2), "0", None, "unavailable"),
    ],
)
def test_state_of_multicast(host, switch, log, state, monkeypatch) -> None:
    if switch is None:
        monkeypatch.delenv(multicast.SWITCH, raising=False)
    else:
        monkeypatch.setenv(multicast.SWITCH, switch)
    assert multicast.state(*host, log) == state
