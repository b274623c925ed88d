"""A demonstration history: the committed runs of H200s, other results by name, and nights that nobody ran.

In: a history. Out: the runs in it. The simulated nights are marked as simulated in their records. They have
two drivers for MI300X, a slower product after the second driver, an attention check that fails on it, and a
throttled machine.
"""

import dataclasses
import datetime as dt
import functools
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import result_files
from stackcheck.history.history import History
from stackcheck.suite import judgement
from stackcheck.suite.verdict import Verdict

ROOT = Path(__file__).resolve().parents[3]
NIGHTS = 60
NEW_DRIVER = 52  # the night of the second driver
SIZES = (65536, 1 << 20)  # messages without a bound, as the suites measure them too
UNBOUNDED = {65536: 0.04, 1 << 20: 0.25}  # their share of the bandwidth of 16 MiB
ATTENTION = "test_attention.py::test_attention_of_models[default-bf16]"
RESUME = "test_training.py::test_resume_with_uneven_shards[8]"
ROCM_NEW = "rocm7.2.1-torch2.14.1-fa2.8.3-py3.12-ubuntu24.04"
ROCM_OLD = "rocm7.1.0-torch2.10.0-fa2.8.3-py3.12-ubuntu24.04"
ROCM_REVOKED = "rocm6.4.2-torch2.9.1-fa2.8.3-py3.12-ubuntu24.04"
CUDA_NEW = "cuda13.0-torch2.14.1-fa2.8.3-py3.12-ubuntu24.04"
CUDA_OLD = "cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04"
ARCH = {"amd": "gfx942", "nvidia": "sm_90"}


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine of the simulated cluster. `speed`: its chips against the typical ones."""

    name: str
    vendor: str
    model: str
    speed: float
    stacks: tuple[str, ...]
    drivers: tuple[tuple[int, str], ...]  # night -> the driver from then on
    count: int = 8

    def driver(self, night: int) -> str:
        return [driver for since, driver in self.drivers if since <= night][-1]


NODES = (
    Node("amd-0", "amd", "MI300X", 1.0, (ROCM_NEW, ROCM_OLD), ((0, "30.30.3"), (NEW_DRIVER, "31.40.1"))),
    Node("amd-1", "amd", "MI300X", 1.006, (ROCM_NEW, ROCM_OLD), ((0, "30.30.3"),)),
    Node("nvidia-0", "nvidia", "H200", 1.0, (CUDA_NEW, CUDA_OLD), ((0, "580.95.05"),)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """A run that nobody ran: result.json and the verdict."""

    result: dict[str, Any]
    verdict: Verdict

    @property
    def text(self) -> bytes:
        return json.dumps(self.result, separators=(",", ":")).encode()


# -- one simulated run


@functools.cache
def thresholds(node: Node) -> list[dict[str, Any]]:
    """The bounds of the node's device model that hold for its number of devices."""
    file = ROOT / "tests" / "acceptance" / "thresholds" / node.vendor / f"{node.model}.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["thresholds"]
    return [row for row in rows if row["conditions"].get("devices", node.count) == node.count]


def check_of(metric: str, conditions: dict[str, Any], count: int) -> str:
    """The check that measures a metric."""
    collective, busbw, _ = metric.partition("_busbw")
    single = {
        "gemm_tflops": f"test_kernel_speed.py::test_gemm_speed[{conditions.get('dtype')}]",
        "copy_gb_per_s": "test_kernel_speed.py::test_copy_speed",
        "p2p_gb_per_s": f"test_devices_links.py::test_peer_bandwidth[{count}]",
        "h2d_gb_per_s": f"test_devices_links.py::test_host_bandwidth[{count}]",
        "d2h_gb_per_s": f"test_devices_links.py::test_host_bandwidth[{count}]",
        "train_fsdp2_tokens_per_s_per_gpu": f"test_training.py::test_throughput_fsdp2[{count}]",
        "train_tokens_per_s_per_gpu": f"test_training.py::test_throughput_8b[{count}]",
    }
    if busbw or metric.endswith("_latency_us"):
        return f"test_collective_speed.py::test_{collective.removesuffix('_latency_us')}_busbw[{count}]"
    if metric.startswith("attention_"):
        return f"test_kernel_speed.py::test_attention_speed[{conditions.get('backend')}]"
    return single.get(metric, f"test_node_speed.py::test_every_device_at_once[{count}]")


def measured(row: dict[str, Any], speed: float, noise: random.Random) -> dict[str, Any]:
    """A figure a little better than its bound."""
    better = row["direction"] == "min"
    healthy = row["bound"] * (1.055 if better else 0.93)
    # Some bounds are so near to their ceiling that nothing fits between them.
    ceiling = row["ceiling"] if row["ceiling"] and (row["ceiling"] > healthy * 1.01) == better else None
    value = healthy * (speed if better else 1 / speed) * noise.gauss(1, 0.004)
    repeats = [value * noise.gauss(1, 0.003) for _ in range(5)]
    said = {name: row[name] for name in ("unit", "conditions", "direction", "bound", "source")}
    verdict = "pass" if (value >= row["bound"]) == better else "fail"
    return result_files.metric(
        row["metric"], value, repeats=repeats, ceiling=ceiling, verdict=verdict, **said
    )


def recorded(name: str, value: float, **more: Any) -> dict[str, Any]:
    """A figure that nothing judges."""
    plain = {"direction": None, "bound": None, "source": None, "verdict": "recorded"}
    return result_files.metric(name, value, **plain, **more)


def small_messages(node: Node, rows: list[dict[str, Any]], noise: random.Random) -> Iterator[dict[str, Any]]:
    """The bandwidths of small messages, which nothing judges."""
    for row in rows:
        if row["metric"].endswith("_busbw") and row["conditions"].get("bytes") == 1 << 24:
            for size in SIZES:
                value = row["bound"] * UNBOUNDED[size] * node.speed * noise.gauss(1, 0.01)
                conditions = {**row["conditions"], "bytes": size}
                yield recorded(row["metric"], value, unit=row["unit"], conditions=conditions)


def readings(noise: random.Random, *, throttled: bool) -> dict[str, Any]:
    during = {
        "samples": 84,
        "clock_mhz_median": 1410 if throttled else round(1965 + noise.gauss(0, 6)),
        "clock_mhz_min": 900 if throttled else 1830,
        "power_w_max": round(690 + noise.gauss(0, 4), 1),
        "temperature_c_max": 96 if throttled else round(61 + noise.gauss(0, 2)),
        "throttle": ["hardware thermal"] if throttled else ["software power cap"],
    }
    unfit = {"0": {"unfit": ["hardware thermal"]}} if throttled else {}
    return {"before": {}, "after": {**unfit, "during": during}}


@functools.cache
def reference() -> dict[str, Any]:
    """The curve of the small job and its band."""
    path = ROOT / "trainers" / "curves" / "CPU" / "llama-tiny.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def losses(noise: random.Random) -> list[float]:
    """The losses of the small job: the reference, a few tenths of the band away from it."""
    curve = reference()
    first, last = curve["band"]["first"], curve["band"]["last"]
    steps, side = len(curve["losses"]), noise.uniform(-0.35, 0.35)
    return [
        loss * (1 + first * (last / first) ** (step / (steps - 1)) * (side + noise.uniform(-0.1, 0.1)))
        for step, loss in enumerate(curve["losses"])
    ]


def speed_of(node: Node, stack: str, night: int) -> float:
    """The planted step: one stack multiplies matrices slower from the second driver on."""
    slower = stack == ROCM_OLD and node.driver(night) == "31.40.1"
    return node.speed * (0.97 if slower else 1.0)


def failing(node: Node, stack: str, night: int) -> dict[str, tuple[str, str]]:
    """Check -> how it ended and why; what is not named passed."""
    if stack == ROCM_NEW and node.driver(night) == "31.40.1" and night >= NIGHTS - 3:
        why = (
            "AssertionError: 2 of 182 cases failed\n"
            "  b2 h32/8 1024x1024 d128 causal: dq frobenius: got nan, bound 0.0137\n"
            "  b2 h32/8 4096x4096 d128 causal: dq frobenius: got nan, bound 0.0137\n"
            "look at: the driver and the attention kernels; the same image passed on the driver before"
        )
        return {ATTENTION: ("failed", why)}
    if node.name == "nvidia-0" and stack == CUDA_OLD and night in {17, NIGHTS - 1}:
        name = "test_kernel_speed.py::test_gemm_speed[bf16]"
        return {name: ("invalid", "device 0 throttled: hardware thermal")}
    return {}


def simulated(node: Node, stack: str, night: int, now: dt.datetime) -> Simulated:
    """One run of one night."""
    noise = random.Random(f"{node.name} {stack} {night}")
    started = (
        now - dt.timedelta(days=NIGHTS - 1 - night, hours=8) + dt.timedelta(minutes=noise.uniform(0, 240))
    )
    bad = failing(node, stack, night)
    checks = list(_checks(node, stack, night, noise, bad))
    host = result_files.host(node.vendor, *[node.model] * node.count, driver=node.driver(night))
    for number, device in enumerate(host["devices"]):
        device["id"] = hashlib.sha256(f"{node.name} {number}".encode()).hexdigest()[:16]
        device["arch"] = ARCH[node.vendor]
    document = result_files.result(
        *checks,
        run_id=hashlib.sha256(f"{node.name} {stack} {night}".encode()).hexdigest()[:32],
        started=started.isoformat(),
        finished=(started + dt.timedelta(minutes=4, seconds=noise.uniform(0, 50))).isoformat(),
        tier="standard",
        stack_id=stack,
        image={
            "reference": f"stackcheck/{stack}",
            "config_digest": digest_of(stack),
            "manifest_digest": None,
        },
        host=host,
        software={"python": "3.12.3", "torch": stack.partition("torch")[2].partition("-")[0]},
    )
    return Simulated(result=document, verdict=_verdict(checks, bad))


def digest_of(stack: str) -> str:
    return "sha256:" + hashlib.sha256(stack.encode()).hexdigest()


def _checks(
    node: Node, stack: str, night: int, noise: random.Random, bad: dict[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    rows = thresholds(node)
    speed = speed_of(node, stack, night)
    metrics: dict[str, list[dict[str, Any]]] = {}
    for metric in (*small_messages(node, rows, noise), *(measured(row, speed, noise) for row in rows)):
        name = check_of(metric["name"], metric["conditions"], node.count)
        metrics.setdefault(name, []).append(metric)
    for name, found in metrics.items():
        outcome, reason = bad.get(name, ("passed", None))
        evidence = readings(noise, throttled=outcome == "invalid")
        yield result_files.check(
            name,
            outcome,
            reason=reason,
            doc="The speed keeps its bound for this device model.",
            metrics=found,
            evidence=evidence,
            seconds=noise.uniform(2, 14),
        )
    curve = losses(noise)
    loss = recorded(
        "train_loss_last", curve[-1], unit="nats", repeats=curve, conditions={"devices": node.count}
    )
    yield result_files.check(f"test_training.py::test_loss_falls[{node.count}]", metrics=[loss])
    proves = "Attention of real models agrees with a float64 reference, forward and backward."
    outcome, reason = bad.get(ATTENTION, ("passed", None))
    yield result_files.check(ATTENTION, outcome, reason=reason, doc=proves)
    yield result_files.check(RESUME, doc="A resumed job continues with the same losses.")


def _verdict(checks: list[dict[str, Any]], bad: dict[str, tuple[str, str]]) -> Verdict:
    failed = tuple(name for name, (outcome, _) in bad.items() if outcome == "failed")
    invalid = tuple(name for name, (outcome, _) in bad.items() if outcome == "invalid")
    return Verdict(
        status="FAILED" if failed else "UNFIT" if invalid else "PASSED",
        reasons=tuple(f"{outcome}: {name}: {reason}" for name, (outcome, reason) in bad.items()),
        passed=tuple(check["id"] for check in checks if check["outcome"] == "passed"),
        failed=failed,
        skipped=(),
        invalid=invalid,
        warned=(),
        required=tuple(check["id"] for check in checks),
        bounds={"measured": sum(len(check["metrics"]) for check in checks)},
    )


# -- the whole


def nights(now: dt.datetime, count: int = NIGHTS) -> Iterator[Simulated]:
    """Every simulated run of the last nights, oldest first."""
    for night in range(NIGHTS - count, NIGHTS):
        for node in NODES:
            for stack in node.stacks:
                yield simulated(node, stack, night, now)


def committed() -> list[Path]:
    """The committed results of real H200s, of schema 1."""
    return sorted((ROOT / "docs" / "results").glob("suites-h200*.json"))


def fill(history: History, now: dt.datetime, real: Iterable[Path] = (), count: int = NIGHTS) -> None:
    """Keep the real results with this checkout's verdicts, then the simulated nights."""
    for path in (*committed(), *real):
        found = judgement.judge_file(path, ROOT, None)
        history.append(path.read_bytes(), found.verdict.as_json(), None, source=f"import {path.name}")
    shown = {run.result["run_id"]: run for run in (*nights(now, count), *certified(now))}
    for run in shown.values():
        history.append(run.text, run.verdict.as_json(), None, source="simulation", simulated=True)


def certified(now: dt.datetime) -> list[Simulated]:
    """The runs whose images are published, some of them older than the nights."""
    new, old, nvidia = NODES[0], NODES[1], NODES[2]
    return [
        simulated(old, ROCM_NEW, NIGHTS - 1, now),
        simulated(old, ROCM_OLD, NIGHTS - 1, now),
        simulated(new, ROCM_OLD, NIGHTS - 1, now),
        simulated(nvidia, CUDA_NEW, NIGHTS - 2, now),
        simulated(nvidia, CUDA_OLD, NIGHTS - 39, now),
        simulated(old, ROCM_REVOKED, NIGHTS - 3, now),
    ]
