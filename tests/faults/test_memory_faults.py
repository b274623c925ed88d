"""Memory that does not grow by step: peaks of jobs, what stays on devices, what the host loses."""

# ruff: noqa: E501 - a table of faults reads in rows
import fcntl
import os
import sys
from collections.abc import Callable

import pytest

from device_hosts import nvidia
from planting import TESTS, Fault

pytest.importorskip("torch", reason="the arithmetic of trainers/memory.py needs torch")
sys.path.insert(0, str(TESTS / "acceptance"))

from harness import host_memory, training_jobs
from workloads import trainers

PEAK, STAYS = "test_training_variants.py::test_peak_of_one_rank_of_eight", "test_no_memory_of_devices_stays"
HOST = "test_memory_after.py::test_no_memory_of_the_host_is_lost"
KEEPS = "original.__dict__.setdefault('kept', [])"


def peak(
    name: str, layout: str, patches: dict[str, str], says: str = "times the least", *, another: bool = True
) -> Fault:
    return Fault(name, f"{PEAK}[{layout}]", patches=patches, says=says, another=another)


FULLY_SHARD = {
    "layouts.fsdp2:fully_shard": "lambda *a, **k: original(*a, **{**k, 'reshard_after_forward': False})"
}
TWICE = {
    "train:accumulate": "lambda run, step: (original(run, step), run.extra.update(twice=[w.grad.clone() for w in run.job.model.parameters()]))[0]"
}
TWIN = {
    "layouts.optimizer:update": "lambda optimizer, lr: (original(optimizer, lr), optimizer.__dict__.setdefault('twin', "
    "[x.clone() for kept in optimizer.state.values() for x in kept.values()]))[0]"
}
LOGITS = {
    "torch.nn.functional:cross_entropy": f"lambda x, *a, **k: ({KEEPS}.append(x.detach()), original(x, *a, **k))[1]"
}
FAULTS = (
    peak("gathered weights stay after a layer", "fsdp2", FULLY_SHARD, another=False),
    peak("gathered weights stay after a layer, with tensor parallel", "tensor", FULLY_SHARD),
    peak("gradients are held twice", "recomputed", TWICE),
    peak("a clone of the optimizer's state", "compiled", TWIN),
    peak("logits are kept", "recomputed", LOGITS),
    peak("a compiled job is never freed", "compiled", {"train:build": f"lambda *a: ({KEEPS}.append(original(*a)), {KEEPS}[-1])[1]"}, "bytes stay after the job"),
    nvidia("the driver keeps memory that no process has", STAYS, "device 0: 300 MiB stay in use", tier="soak", one={"used_late": 900 << 20}),
    nvidia("a process stays after the run", STAYS, "device 0 is shared with 4321 python3", "invalid", "soak", one={"processes_late": [4321], "used_late": 1600 << 20}),
    nvidia("nothing", STAYS, outcome="passed", tier="soak", one={"used_late": 616 << 20}),
    Fault("the kernel loses memory all the time", HOST, says="memory that no process owns grew by", tier="soak", patches={
        "harness.host_memory:PERIOD_S": "0.001", "harness.host_memory:LEAST": "8",
        "harness.host_memory:reading": f"lambda *a: ({KEEPS}.append(0), {{**original(*a), host_memory_no_owner: float(len({KEEPS})) * (1 << 28)}})[1]".replace("host_memory_no_owner", "NO_OWNER")}),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_healthy_layouts_pass(plant):
    plant(Fault("nothing", PEAK, outcome="passed"))


GIB = 2**30
LARGE = (*training_jobs.LARGE, "--micro-batch", 2)
WIDE = (
    "--size",
    "8b",
    "--layers",
    4,
    "--seq-len",
    4096,
    "--micro-batch",
    2,
    "--implementation",
    "fused",
    "--parallel",
    "zero1",
)
# Job, flags, ranks, the GiB allocated that docs/results has of the trainers as they are.
READ = [
    ("proxy", training_jobs.PROXY, 1, 24.18), ("proxy", training_jobs.PROXY, 2, 14.08),
    ("fsdp2", training_jobs.FSDP2, 1, 56.55), ("fsdp2", training_jobs.FSDP2, 2, 41.91), ("fsdp2", training_jobs.FSDP2, 4, 34.10),
    ("large", LARGE, 2, 115.90), ("large", LARGE, 4, 97.21),
    ("wide bf16", (*WIDE, "--precision", "bf16"), 1, 33.81), ("wide fp8", (*WIDE, "--precision", "fp8"), 1, 35.44),
]  # fmt: skip
ERROR = {"error": "no such stream"}


@pytest.mark.parametrize(
    ("release", "found", "outcome"),
    [
        ("2.13.0", {"peak": 2.2, "least": 1.0, "left": 0.0}, "failed"),
        ("2.9.1", {"peak": 2.2, "least": 1.0, "left": 0.0}, "failed"),
        ("2.8.0", {"peak": 3.0, "least": 1.0, "left": 0.0}, "passed"),
        ("2.8.0", {"peak": 3.1, "least": 1.0, "left": 0.0}, "failed"),
        ("2.6.0", {"peak": 2.0, "least": 1.0, "left": 9e4}, "failed"),
        ("2.8.0", ERROR, "failed"),
        ("2.6.0", ERROR, "skipped"),
    ],
)
def test_peaks_of_an_older_release_are_judged_too(release, found, outcome, plant):
    answer = {"torch": release, "jobs": {"fsdp2": found}}
    patches = {"workloads.layout_peaks:check": f"lambda jobs: {answer!r}"}
    plant(Fault(f"{release} {outcome}", f"{PEAK}[fsdp2]", outcome, patches=patches))


PARAMETERS = 2.80e9  # of the FSDP2 job
# What a fault adds to that job, in bytes, by the number of ranks.
ADDED = {
    ranks: {
        "gathered weights stay": 2 * (PARAMETERS - 1.05e9),
        "gradients twice": 4 * PARAMETERS / ranks,
        "moments twice": 8 * PARAMETERS / ranks,
        "logits stay": 2 * 16384 * 128256,
    }
    for ranks in (1, 2, 4)
}


def require(
    job: str, flags: tuple[object, ...], ranks: int, allocated_gib: float, model: str = "H200"
) -> None:
    options = trainers.module("options").parse([str(word) for word in flags])
    preset = trainers.module("presets").find(options.model, options.size, layers=options.layers)
    least = trainers.module("memory").need(options, preset, ranks=ranks, micro_batch=2).least / GIB
    record = {"memory": {"allocated_gib": allocated_gib, "least_gib": least}}
    training_jobs.require_planned(record, job, model)


@pytest.mark.parametrize(("job", "flags", "ranks", "read"), READ)
def test_peaks_that_were_read_pass_and_more_fail(job, flags, ranks, read):
    require(job, flags, ranks, read)
    require(job, flags, ranks, read + 2.4, model="MI300X")  # nobody has read it there
    more = training_jobs.ABOVE_LEAST_GIB[job]
    for model, fault in (("H200", 2.4), ("MI300X", 2.4 + more), ("no model of today", 2.4 + more)):
        with pytest.raises(AssertionError, match="GiB allocated at once, at most"):
            require(job, flags, ranks, read + fault, model=model)


def test_a_job_on_a_device_that_says_nothing_of_its_memory_fails():
    training_jobs.require_planned({"memory": None}, "proxy", "CPU")
    for memory in (None, {}):
        with pytest.raises(AssertionError, match="says nothing of its memory"):
            training_jobs.require_planned({"memory": memory}, "proxy", "MI300X")


@pytest.mark.parametrize(("ranks", "fault"), [(ranks, fault) for ranks in ADDED for fault in ADDED[ranks]])
def test_each_fault_of_the_timed_job_is_seen_in_its_peak(ranks, fault):
    read = next(row[3] for row in READ if row[0] == "fsdp2" and row[2] == ranks)
    with pytest.raises(AssertionError, match="allocated at once"):
        require("fsdp2", training_jobs.FSDP2, ranks, read + ADDED[ranks][fault] / GIB)


def lost(steps: int, take: Callable[[], object]) -> dict[str, float]:
    """What the readings say after each step has taken some memory of the kernel."""
    readings = []
    for _ in range(steps):
        take()
        readings.append(
            host_memory.reading(host_memory.MEMINFO.read_text(), host_memory.ZONEINFO.read_text())
        )
    return host_memory.grown(readings)


def test_pages_of_the_kernel_that_no_process_owns_are_seen(monkeypatch):
    monkeypatch.setattr(host_memory, "LEAST", 16)
    pipes: list[int] = []

    def fill() -> None:
        pipes.extend(os.pipe())
        fcntl.fcntl(pipes[-1], fcntl.F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(pipes[-1], False)
        os.write(pipes[-1], bytes(1 << 20))

    try:
        assert lost(48, fill)[host_memory.NO_OWNER] > 6 << 20, "a quarter fills 12 MiB of pipes"
    finally:
        for one in pipes:
            os.close(one)
