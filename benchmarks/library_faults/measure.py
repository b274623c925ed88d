"""Plant faults inside cuBLAS and NCCL, or MKL and gloo, and see which checks fail. In: gcc, torch.
Out: a table, and its figures as JSON.

    python benchmarks/library_faults/measure.py --out DIR [--only products,speed]
    python benchmarks/library_faults/measure.py --out DIR --only processor

Each setting is one run of the acceptance checks that can see it, with `shim.c` loaded before the libraries. A
check that fails without a fault says nothing, and is left out. On a processor each round plants another size
for each check, until the smallest that it sees is known (`smallest.py`); no GPU is needed for it. A run that
lies in DIR already is not made again.
"""

# ruff: noqa: E501 - a table of faults reads in rows

import argparse
import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import runs
import smallest
from planned import LIBRARIES, Setting

PRODUCTS = (
    "(test_gemm and not test_gemm_speed) or test_fp8_gemm or test_fp8_recipes or test_tf32_gemm"
    " or test_fp32_is_ieee or test_linear_cross or test_determinism or test_graph_replay or test_no_silent"
    " or test_loss_falls or test_loss_lies or test_ranks_agree or test_bf16_job or test_resume_is"
    " or (test_attention_backend and math) or (test_fp8_job_follows_the_reference and own) or test_witness"
)
SPEED = "test_gemm_speed or test_throughput_fsdp2 or test_fp8_is_worth_it"
COLLECTIVES = "test_collectives.py or test_loss_falls or test_ranks_agree or test_resume or test_peer_copies"
LINKS = "test_collective_speed.py or test_all_reduce_values or test_node_speed.py"
ALONE = f"test_devices_are_ours_alone or test_gemm_speed or {LINKS}"
FLIP = Setting(kind="flip")
RARELY = replace(FLIP, every=20)


@dataclass(frozen=True)
class Neighbour:
    """Another process that works on device 0 for this share of the time, from before the first check on."""

    share: float


Fault = Setting | Mapping[str, str] | Neighbour
# A group's checks; then the faults, of which the first is none: a setting, variables of NCCL, or a neighbour.
GROUPS: Mapping[str, tuple[str, Mapping[str, Fault]]] = {
    "products": (
        PRODUCTS,
        {
            "none": Setting(),
            **{f"mantissa bit {n} of one element": replace(FLIP, size=n) for n in (1, 4, 7)},
            "mantissa bit 1 of one element, one call in 20": RARELY,
            **{f"{n} mantissa bits are kept": Setting(kind="short", size=n) for n in (9, 5)},
            "the last element is 0": Setting(kind="last"),
            "nobody waits for them": Setting(kind="race"),
            "one call in 20 fails": Setting(kind="fail", every=20),
        },
    ),
    "speed": (SPEED, {"none": Setting(), **{f"one in {n} runs twice": Setting(kind="slow", size=2, every=n) for n in (20, 10, 5)}}),
    "collectives": (
        COLLECTIVES,
        {
            "none": Setting(library="collectives"),
            **{
                f"mantissa bit {n} of one element": replace(FLIP, library="collectives", size=n)
                for n in (1, 7)
            },
            "mantissa bit 1 of one element, one call in 20": replace(RARELY, library="collectives"),
            "the last element is 0": Setting("collectives", "last"),
            "one call in 20 fails": Setting("collectives", "fail", every=20),
        },
    ),
    "links": (
        LINKS,
        {
            "none": Setting(),
            "no peer access": {"NCCL_P2P_DISABLE": "1"},
            "neither peer access nor shared memory": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            "one channel": {"NCCL_MAX_NCHANNELS": "1"},
        },
    ),
    "neighbour": (ALONE, {"none": Setting(), **{f"device 0 works {share:.0%} of the time": Neighbour(share) for share in (1, 0.1, 0.02)}}),
}  # fmt: skip
SHOWN = 0.01  # figures that changed by less are not printed
SUITES = "tests/acceptance"
ROUND_S = 1200  # a round of a processor takes 1 to 5 minutes; more on a busy machine


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--only", default="products,speed", help="groups of faults, or processor")
    asked.add_argument("--library", action="append", choices=LIBRARIES, help="on a processor, these only")
    asked.add_argument("--checks", default="", help="on a processor, those whose ids have this expression")
    asked.add_argument("--limit-s", type=float, default=500.0, help="begin no run after this time")
    asked.add_argument("--fault", action="append", help="plant these only, by their names")
    options = asked.parse_args()
    ends = time.monotonic() + options.limit_s
    if options.only == "processor":
        on_processor(options.library or LIBRARIES, options.checks, options.out, ends)
    else:
        groups = options.only.split(",")
        if unknown := {*groups} - GROUPS.keys():
            asked.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
        there = [fault for group in groups for fault in GROUPS[group][1]]
        if unknown := {*(options.fault or ())} - {*there}:
            asked.error(f"--fault: none is named {'; '.join(sorted(unknown))}; there are {'; '.join(there)}")
        on_gpus(groups, options.fault, options.out, ends)


def on_gpus(groups: list[str], chosen: list[str] | None, out: Path, ends: float) -> None:
    """One run for each fault of some groups; `chosen` names those to plant, beside none."""
    machine = runs.made("nvidia", out)
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        selection, faults = GROUPS[group]
        for fault, planted in faults.items():
            if chosen and fault not in ("none", *chosen):
                continue
            if time.monotonic() > ends:
                print(f"not run, no time was left: {group}: {fault}")
                continue
            setting = planted if isinstance(planted, Setting) else Setting()
            variables = planted if isinstance(planted, Mapping) else {}
            checks = ("tests/", "-k", selection)
            with working(planted.share) if isinstance(planted, Neighbour) else contextlib.nullcontext():
                one = runs.run(
                    f"{group}: {fault}", checks, {"": setting}, machine, out=out, variables=variables
                )
            found[f"{group}: {fault}"] = one
            write(out, found)
            calls = f"{one['calls']} calls, {one['changed']} changed"
            print(f"{one['seconds']:5.0f} s  {group}: {fault}: {calls}; {one['counts']}", flush=True)
    show(found)


@contextlib.contextmanager
def working(share: float) -> Iterator[None]:
    """Another process works on device 0 meanwhile."""
    command = (sys.executable, "-u", str(Path(__file__).with_name("neighbour.py")), str(share))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if not process.stdout or not process.stdout.readline():
                raise RuntimeError("the neighbour ended before it worked")
            yield
        finally:
            process.kill()


def on_processor(libraries: Sequence[str], chosen: str, out: Path, ends: float) -> None:
    """Find the smallest fault of each library on a processor that each check sees."""
    machine = runs.made("cpu", out)

    def run(name: str, checks: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Any]:
        one = runs.run(name, checks, settings, machine, out=out, timeout_s=ROUND_S)
        calls = f"{one['calls']} calls, {one['changed']} changed"
        print(f"{one['seconds']:5.0f} s  {name}: {calls}; {one['counts']}", flush=True)
        return one

    healthy = run("healthy", ("tests/",), {})
    units = [
        unit
        for library in libraries
        for unit in smallest.units(library, healthy["outcomes"], healthy["by_check"], healthy["lasted"])
        if any(re.search(chosen, check) for check in unit.found)
    ]
    names = (f"round {number}" for number in itertools.count(1))

    def judged(
        checks: Sequence[str], settings: Mapping[str, Setting]
    ) -> tuple[smallest.Outcomes, smallest.Counts]:
        one = run(next(names), [f"{SUITES}/{check}" for check in checks], settings)
        return one["outcomes"], one["by_check"]

    for _ in smallest.search(units, judged):
        write(out, [asdict(unit) for unit in units])
        if time.monotonic() > ends:
            print("not all is known: no time was left")
            break
    print(*smallest.table(units), sep="\n")


def write(out: Path, found: Any) -> None:
    """Keep what is known by now."""
    (out / "library-faults.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """For each fault: the checks that failed beside those that fail without it, and figures that changed."""
    plain = {name.partition(":")[0]: one for name, one in found.items() if name.endswith(": none")}
    for name, one in found.items():
        healthy = plain[name.partition(":")[0]]
        if one is healthy:
            continue
        seen: dict[str, int] = defaultdict(int)
        able: dict[str, int] = defaultdict(int)
        for check, outcome in one["outcomes"].items():
            if healthy["outcomes"].get(check) == "passed":
                short = check.partition("::")[2].partition("[")[0]
                able[short] += 1
                seen[short] += outcome not in ("passed", "skipped")  # "invalid" blames the machine
        by = [f"{check} {count}/{able[check]}" for check, count in sorted(seen.items()) if count]
        print(f"== {name}: seen by {', '.join(by) or 'none'}")
        print(
            "   not by " + ", ".join(f"{check} ({able[check]})" for check in sorted(seen) if not seen[check])
        )
        for figure, value in one["figures"].items():
            before = healthy["figures"].get(figure)
            if before and abs(value / before - 1) > SHOWN:
                print(f"   {figure}: {value / before - 1:+.1%}")


if __name__ == "__main__":
    main()
