"""AMD's module without a call or two: no fault passes for it, and a refusal says which reading is missing.

Releases come and go with other calls, so the suites may not depend on one list. Each call that they make is
left out on a healthy host, and pairs of calls on hosts with a fault, drawn from a seed.
"""

import random
import re
from pathlib import Path

import pytest

import host_verdicts
from stackcheck.suite.verdict import Verdict
from test_amd_hosts import IMAGES, NAMED, NEW, run

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.slow
SOURCES = sorted((HERE.parent / "acceptance/vendors").glob("amd*.py"))
# Without these there is no device to read: the run says so.
NEEDED = {
    "amdsmi_init",
    "amdsmi_get_processor_handles",
    "amdsmi_get_gpu_device_bdf",
    "amdsmi_get_gpu_memory_total",
}
CALLS = sorted(
    {name for path in SOURCES for name in re.findall(r'"(amdsmi_\w+)"', path.read_text(encoding="utf-8"))}
    - NEEDED
)
FAULTY = [fault for fault in NAMED if fault.outcome == "invalid" and NEW in fault.libraries]
DRAW = random.Random(29)
DRAWN = [(DRAW.choice(FAULTY), tuple(DRAW.sample(CALLS, 2))) for _ in range(12)]
EXPLAINED = re.compile(
    r"skipped: .+; the skip is not accepted: devices\.json does not list '.+' as unreadable"
)


def without(state: str, calls: tuple[str, ...], folder: Path) -> Verdict:
    result = run(state, NEW, folder, {"FAKEAMD_WITHOUT": ",".join(calls)})
    return host_verdicts.judged(result, folder, IMAGES[NEW.release][1])


def unexplained(found: Verdict) -> list[str]:
    return [reason for reason in found.reasons if not EXPLAINED.search(reason)]


@pytest.mark.parametrize("call", CALLS)
def test_a_healthy_host_without_a_call_is_refused_for_its_reading_alone(call, tmp_path):
    found = without("mi300x", (call,), tmp_path)
    assert (found.status == "PASSED") == (not found.reasons)
    assert unexplained(found) == []


@pytest.mark.parametrize(("fault", "calls"), DRAWN, ids=str)
def test_no_fault_passes_for_want_of_calls(fault, calls, tmp_path):
    """The fault is named, or a reading is missing; both are reasons."""
    found = without(fault.state, calls, tmp_path)
    named = [reason for reason in found.reasons if reason.startswith(fault.check)]
    assert found.status != "PASSED"
    assert named, found.reasons
