"""Whether a kernel driver serves a runtime, by the documents' lists. In: versions. Out: a `Support`. Pure.

A driver that is newer than every list is no failure: to try it is what a run is for. So it is `unlisted`, and
the run goes on and says so. Only a driver that is older than what the documents ask for is `refused`.

AMD has two numbers for one driver: the release (6.4, 30.30, 31.40), and the version of the module, which is
all that the kernel shows. From 31.40 on the module's version ends in the release (6.19.14.31400000;
ROCm/gpu-operator#609). The amdgpu of the kernel's own tree has no version at all.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).resolve().parent.parent / "drivers.json"
Version = tuple[int, ...]
State = Literal["listed", "unlisted", "refused"]
RELEASE_DIGITS = 2  # a list names a driver by its first two numbers: 30.30 and not 30.30.3
FIRST_OWN_RELEASE = 30  # before, a driver had the number of its ROCm release


@dataclass(frozen=True)
class Support:
    """What the documents say about a driver and a runtime, and the sentence for result and certificate."""

    state: State
    says: str


@dataclass(frozen=True)
class AmdDriver:
    """The two numbers of a driver, as far as its version shows them."""

    release: Version | None
    module: Version | None


def amd(driver: str | None, runtime: str) -> Support:
    """By AMD's lists of ROCm releases for each driver.

    Args:
        driver: What the kernel or the library shows; None or a text without a version: the kernel's own
            amdgpu.
        runtime: The ROCm release, "7.2.53211".
    """
    named = f"ROCm {'.'.join(map(str, _numbers(runtime)[:2]))}"
    found = parse(driver or "")
    if found is None:
        shown = f" ({driver})" if driver else ""
        return Support("unlisted", f"the kernel's own amdgpu{shown}, without a version: {_untested(named)}")
    row = _row(found)
    words = _words(driver or "", row if row and _is(row, found) else None)
    if row is None:
        return Support("refused", f"driver {words} is older than every driver that AMD's documents list")
    window = [_numbers(release) for release in row["runtimes"] or ()]
    asked = _numbers(runtime)[:2]
    if row["closed"] and asked > window[1]:
        supported = " to ".join(row["runtimes"])
        return Support(
            "refused", f"driver {words} supports ROCm {supported}, not {runtime} ({row['source']})"
        )
    if window and _is(row, found) and window[0] <= asked <= window[1]:
        return Support("listed", f"driver {words}: listed for {named} ({row['source']})")
    return Support("unlisted", f"driver {words}: {_untested(named)}")


def nvidia(driver: str | None, runtime: str, serves: str | None = None) -> Support:
    """By CUDA's minor-version compatibility: a driver serves every minor of a major, and all older majors.

    Args:
        driver: The kernel driver's version, "580.95.05".
        runtime: The CUDA release, "13.0".
        serves: The newest CUDA release of the libcuda that is loaded. A forward-compatibility package brings
            one that serves more than the kernel driver's own.
    """
    if not driver or not _numbers(driver):
        return Support("refused", f"cannot read the driver's version: {driver}")
    table, named = _table()["nvidia"], f"CUDA {runtime}"
    least = table["minimum"].get(str(_numbers(runtime)[0]))
    is_served = serves is not None and _numbers(serves)[:2] >= _numbers(runtime)[:2]
    if least is None:
        state: State
        state, says = (
            ("unlisted", _untested(named)) if is_served else ("refused", f"it does not serve {named}")
        )
        return Support(state, f"driver {driver} (CUDA up to {serves or 'unknown'}): {says}")
    if _numbers(driver) < _numbers(least):
        # Minor-version compatibility needs the same major only.
        if serves is not None and _numbers(serves)[0] >= _numbers(runtime)[0]:
            return Support("listed", f"driver {driver}: serves {named} by {table['forward']}")
        words = f"driver {driver} is older than {least}, as {named} needs ({table['source']})"
        return Support("refused", words)
    if _numbers(driver)[:1] > _numbers(table["newest"])[:1]:
        return Support("unlisted", f"driver {driver}: {_untested(named)}")
    return Support("listed", f"driver {driver}: listed for {named} ({table['source']})")


def parse(shown: str) -> AmdDriver | None:
    """Both numbers of a driver of AMD: of "6.12.12", "6.19.14.31400000", "31400000" or "31.40.1"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)*)(?:-.*)?", shown.strip())
    if match is None:
        return None
    numbers = _numbers(match[1])
    if len(numbers) == 1:
        release = _packed(match[1])
        return AmdDriver(release, None) if release else None
    if numbers[0] >= FIRST_OWN_RELEASE or len(numbers) == RELEASE_DIGITS:
        return AmdDriver(numbers, None)
    return AmdDriver(_packed(str(numbers[3])) if len(numbers) > 3 else None, numbers[:3])


def _packed(digits: str) -> Version | None:
    """The release in a package's number: 30100200 is 30.10.2, and 60403 is 6.4.3."""
    if len(digits) == 8:
        digits = digits[:6]
    elif len(digits) != 5:
        return None
    value = int(digits)
    return (value // 10_000, value // 100 % 100, value % 100)


def _row(found: AmdDriver) -> Mapping[str, Any] | None:
    """The row of a driver; of a driver between two rows the older one; None before the first."""
    at_most = [row for row in _table()["amd"] if (both := _both(row, found)) and both[0] <= both[1]]
    return at_most[-1] if at_most else None


def _both(row: Mapping[str, Any], found: AmdDriver) -> tuple[Version, Version] | None:
    """A row's number and the driver's of the same kind; None where one of them has none."""
    if found.release:
        return _numbers(row["release"]), found.release[:RELEASE_DIGITS]
    return (_numbers(row["module"]), found.module) if row["module"] is not None and found.module else None


def _is(row: Mapping[str, Any], found: AmdDriver) -> bool:
    """Whether the row is about this driver, and not only about the next older one."""
    both = _both(row, found)
    return both is not None and both[0] == both[1]


def _words(driver: str, row: Mapping[str, Any] | None) -> str:
    if row is None or driver.startswith(row["release"] + "."):
        return driver
    return f"{row['release']} (amdgpu {driver})" if driver != row["release"] else driver


def _untested(runtime: str) -> str:
    return f"not listed for {runtime}, tested here"


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("-")[0]))


@functools.cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def releases() -> Sequence[Mapping[str, Any]]:
    """The rows of AMD's drivers."""
    rows: Sequence[Mapping[str, Any]] = _table()["amd"]
    return rows
