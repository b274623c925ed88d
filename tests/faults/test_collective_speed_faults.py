"""Faults of timed collectives: the protocol equals nccl-tests', and the timed data are checked too."""

import ctypes
import dataclasses
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import planting
from harness import causes

torch = pytest.importorskip("torch", reason="the suites need torch")

from workloads import collective_library as library  # noqa: E402
from workloads import collective_timing as timing  # noqa: E402
from workloads import nccl_log, speed_outliers  # noqa: E402

MIB = 1 << 20


def said(**facts: object) -> dict[str, str]:
    """The library's log, its files and the kernel's settings of another host."""
    return {"workloads.nccl_log:facts": f"lambda: {{**original(), **{facts!r}}}"}


FAULTS = (
    planting.Fault(
        "a pair's data arrive spoilt",
        "test_collective_speed.py::test_send_receive_bandwidth",
        says="to 0",
        patches={
            "torch.distributed:batch_isend_irecv": "lambda ops: ([w.wait() for w in original(ops)], "
            "[op.tensor.zero_() for op in ops if op.op is irecv and get_rank() == 0], [])[2]"
        },
    ),
    planting.Fault(
        "a barrier lets everybody through",
        "test_collective_speed.py::test_barrier_latency",
        says="left the barrier before",
        patches={"torch.distributed:barrier": "lambda *a, **k: None"},
    ),
    planting.Fault(
        "the measured sum is wrong",
        "test_collective_speed.py::test_all_reduce_busbw",
        says="values",
        patches={
            "torch.distributed:all_reduce": "lambda t, *a, **k: (original(t, *a, **k), "
            "t.view(-1)[-1:].add_(1) if t.numel() > 4096 else 0)[0]"
        },
    ),
    planting.Fault(
        "a file of the image sets the library up",
        "test_collective_speed.py::test_all_reduce_busbw",
        says="/etc/nccl.conf sets NCCL_ALGO=Tree",
        patches=said(files={"/etc/nccl.conf": ["NCCL_ALGO=Tree"]}),
    ),
    planting.Fault(
        "a host without iommu=pt spoils the sum",
        "test_collective_speed.py::test_all_reduce_busbw",
        says="look at: an IOMMU translates between the devices",
        patches={
            **said(warnings=['Missing "iommu=pt" from kernel command line which can lead to a hang!']),
            "torch.distributed:all_reduce": "lambda t, *a, **k: "
            "(original(t, *a, **k), t.view(-1)[-1:].add_(1))[0]",
        },
    ),
)


def test_empty_file_is_evidence_and_no_obstacle(plant):
    check = "test_collective_speed.py::test_send_receive_bandwidth"
    facts = {"files": {"~/.nccl.conf": []}, "warnings": ["one of four"], "kernel": {"numa_balancing": "1"}}
    facts |= {"network": ["Using network IB"]}
    (found,) = plant(planting.Fault("nothing", check, "passed", patches=said(**facts)))["checks"]
    assert found["evidence"]["after"]["collectives"] == facts
    assert found["reason"] is None


@pytest.mark.healthy
def test_lines_that_set_something_are_read_from_hidden_files(tmp_path):
    quiet, loud = tmp_path / "quiet.conf", tmp_path / "loud.conf"
    quiet.write_text("# NCCL_ALGO=Tree\n\n")
    loud.write_text("NCCL_DEBUG=WARN\n  NCCL_ALGO = Ring \n")
    found = nccl_log.configuration([str(quiet), str(loud), str(tmp_path / "none.conf")])
    assert found == {str(quiet): [], str(loud): ["NCCL_DEBUG=WARN", "NCCL_ALGO = Ring"]}


@pytest.mark.healthy
@pytest.mark.parametrize(
    ("environment", "line", "changes"),
    [
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0", False),
        ({"NCCL_NVLS_ENABLE": "0"}, " NCCL_NVLS_ENABLE = 0 ", False),
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=0", True),
        ({}, "NCCL_NVLS_ENABLE=0", True),
        ({"NCCL_ALGO": ""}, "NCCL_ALGO=Tree", True),
        ({}, "NCCL_ALGO", True),
    ],
)
def test_a_file_that_repeats_the_environment_changes_nothing(
    environment, line, changes, tmp_path, monkeypatch
):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (file := tmp_path / "nccl.conf").write_text(f"{line}\n")
    assert bool(nccl_log.configuration([str(file)])[str(file)]) is changes


@pytest.mark.healthy
def test_kernel_that_moves_pages_is_a_named_cause():
    assert causes.of_host((), {"numa_balancing": "1"}) == (causes.NUMA_BALANCING,)
    assert not causes.of_host(("something else",), {"numa_balancing": "0"})
    assert not causes.of_host((), nccl_log.kernel() | {"numa_balancing": None})


@pytest.mark.healthy
def test_small_size_is_gated_inside_a_graph_and_a_large_one_as_it_runs():
    from test_collective_speed import record_curve

    def figure(size: int, mode: str) -> dict[str, Any]:
        return {"op": "all_gather", "bytes": size, "moved": size, "mode": mode, "seconds": [size * 1e-11]}

    figures = [figure(MIB, "eager"), figure(MIB, "graph"), figure(64 * MIB, "eager")]
    run = {"figures": figures, "nvls": "off", "choices": {}, "library": "", "environment": {}, "files": {}}
    gates = {}
    record_curve(
        run,
        "all_gather",
        4,
        lambda name, *_, conditions, gate, **__: gates.update({(name, conditions["bytes"]): gate}),
    )
    assert gates == {
        ("all_gather_busbw", MIB): False,
        ("all_gather_latency_us", MIB): True,
        ("all_gather_busbw", 64 * MIB): True,
    }


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_fails_the_suite(fault, plant):
    plant(
        dataclasses.replace(fault, patches={"workloads.collective_timing:ITERATIONS": "2", **fault.patches})
    )


class Store(dict):
    """The part of a rendezvous store that the timing uses."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]


def alone(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=rank, size=size, store=Store(), device=torch.device("cpu"))


def test_sizes_are_those_of_nccl_tests():
    # nccl-tests -b 1M -e 1M -d bfloat16 on 4 ranks prints these counts.
    assert library.plan("all_reduce", MIB, 4) == library.Plan(524_288, 524_288, 524_288)
    assert library.plan("all_gather", MIB, 4) == library.Plan(131_072, 524_288, 131_072)
    assert library.plan("reduce_scatter", MIB, 4) == library.Plan(524_288, 131_072, 131_072)
    assert library.plan("all_to_all", MIB, 3).count == 174_760  # rounded down to 16 bytes
    assert library.plan("all_gather", MIB, 3).total_bytes == 3 * 174_760 * 2


def test_every_iteration_has_its_own_part_of_the_buffers_and_none_beyond(monkeypatch):
    seen: list[tuple[int, int, int]] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *library.SIGNATURES["ncclAllReduce"])
    functions = {name: SimpleNamespace() for name in library.SIGNATURES}
    functions |= {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(lambda *_: 0)
        for name, kinds in library.SIGNATURES.items()
    }
    functions["ncclAllReduce"] = kind(lambda *call: seen.append(call[:3]) or 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _path: SimpleNamespace(**functions))
    sent, received = (torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2))
    planned = library.plan("all_reduce", 480, 1)
    call = library.Communicator(alone(), 0, library="any").caller("all_reduce", planned, sent, received)
    for iteration in range(timing.ITERATIONS):
        call(iteration)
    offsets = [source - sent.data_ptr() for source, _, _ in seen]
    assert offsets[:5] == [0, 480, 960, 1440, 0]
    assert all(
        target - received.data_ptr() == offset for offset, (_, target, _) in zip(offsets, seen, strict=True)
    )
    assert max(offsets) + planned.total_bytes <= 2000


def test_a_refusal_of_the_library_is_an_error_with_its_code(monkeypatch):
    refusing = {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(lambda *_: 4)
        for name, kinds in library.SIGNATURES.items()
    }
    monkeypatch.setattr(ctypes, "CDLL", lambda _path: SimpleNamespace(**refusing))
    with pytest.raises(RuntimeError, match="ncclGetUniqueId answered 4"):
        library.Communicator(alone(), 0, library="any")


def test_the_library_is_the_one_that_torch_loaded():
    maps = "7f r-xp 0 08:01 7 /a/libnccl-net.so\n7f r-xp 0 08:01 7 /x y/lib/libnccl.so.2\n7f rw-p 0 00:00 0"
    assert library.holder(maps) == "/x y/lib/libnccl.so.2"
    assert library.holder("7f r-xp 0 08:01 7 /t/lib/libtorch_hip.so") == "/t/lib/libtorch_hip.so"
    with pytest.raises(LookupError, match="has loaded no libnccl"):
        library.holder("7f r-xp 0 08:01 7 /usr/lib/libc.so.6")


def test_the_protocol_enqueues_twenty_and_waits_once():
    events: list[str] = []
    seconds = timing.eagerly(
        lambda iteration: events.append(str(iteration)),
        lambda: events.append("wait"),
        lambda: events.append("meet"),
    )
    one = ["0", "wait", "meet", *map(str, range(20)), "wait", "meet"]
    assert len(seconds) == timing.REPEATS
    assert events == [*map(str, range(timing.WARM_UP)), "wait", *one * timing.REPEATS]


def test_a_slow_rank_is_in_the_average():
    assert timing.average([[1.0, 1.0], [3.0, 1.0]]) == [2.0, 1.0]
    assert timing.slowest([[1.0, 1.0], [3.0, 1.0]]) == [3.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is of Linux")
def test_ranks_meet_and_an_absent_rank_is_named(monkeypatch):
    first, second = alone(0, 2), alone(1, 2)
    second.store = first.store
    mine = timing.HostBarrier(first)
    monkeypatch.setattr(timing.HostBarrier, "_made", iter((int(next(iter(first.store)).split("/")[1]),)))
    other = timing.HostBarrier(second)
    thread = threading.Thread(target=other)
    thread.start()
    mine()
    thread.join(10)
    assert not thread.is_alive()
    monkeypatch.setattr(timing, "LIMIT_S", 0.05)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not reach the barrier"):
        mine()


@pytest.mark.parametrize(
    ("rates", "odd"),
    [
        ({(0, 1): 390.0, (1, 0): 388.0, (0, 2): 391.0, (2, 0): 389.0}, []),
        ({(0, 1): 390.0, (1, 0): 200.0, (0, 2): 391.0, (2, 0): 389.0}, ["1 to 0"]),
        (
            {(0, 1): 40.0, (1, 0): 40.0, (0, 2): 391.0, (2, 0): 389.0, (1, 2): 390.0, (2, 1): 390.0},
            ["0 to 1", "1 to 0"],
        ),
        ({(0, 1): 390.0, (1, 0): 345.0, (0, 2): 391.0, (2, 0): 389.0}, ["1 to 0"]),
        (
            {(0, 1): 340.0, (1, 0): 340.0, (0, 2): 391.0, (2, 0): 389.0, (1, 2): 390.0, (2, 1): 390.0},
            ["0 to 1", "1 to 0"],
        ),
        ({(0, 1): 375.0, (1, 0): 390.0}, []),
        ({(0, 1): float("nan"), (1, 0): 390.0}, ["0 to 1", "1 to 0"]),
    ],
    ids=[
        "healthy",
        "one direction",
        "one pair",
        "one direction by a tenth",
        "one pair by an eighth",
        "within noise",
        "not a number",
    ],
)
def test_an_odd_pair_is_found(rates, odd):
    found = speed_outliers.odd_pairs(rates)
    assert [text.split(" 4")[0].split(" 2")[0].split(" nan")[0].split(" 3")[0] for text in found] == odd


def test_pairs_without_links_between_them_may_differ_by_their_way_through_the_host():
    rates = {(0, 1): 50.0, (1, 0): 50.0, (0, 2): 30.0, (2, 0): 28.0, (1, 2): 30.0, (2, 1): 30.0}
    assert speed_outliers.odd_pairs(rates, {}, set()) == []
    assert speed_outliers.odd_pairs({**rates, (2, 0): 20.0}, {}, set())
    linked = {
        (0, 1): 2,
        (1, 0): 2,
        (0, 2): 1,
        (2, 0): 1,
        (1, 2): 1,
        (2, 1): 1,
    }  # two in a package, one outside
    assert speed_outliers.odd_pairs(rates, linked) == []


FACTS = {"files": {}, "warnings": [], "kernel": {"numa_balancing": "0"}, "network": [], "nvls": "off"}


def launched(
    check: str, name: str, outcome: str = "failed", *, says: str = "", **told: Any
) -> planting.Fault:
    """The launches of two H200s say this."""
    text = json.dumps({**FACTS, "pairs": [], "figures": [], "bytes": 64 * MIB, **told})
    return planting.Fault(
        name,
        f"test_collective_speed.py::{check}",
        outcome,
        says,
        vendor="nvidia",
        nvml={"devices": 2},
        patches={"harness.launch:launch": f"lambda *a, **k: json.loads({text!r})"},
    )


def timed(size: int, **seconds: float) -> list[dict[str, Any]]:
    """Seconds of both sums by mode."""
    return [
        {"op": op, "bytes": size, "moved": size, "mode": mode, "seconds": [one] * 5}
        for op in ("all_reduce", "reduce_scatter")
        for mode, one in seconds.items()
    ]


def beside(name: str, outcome: str = "failed", *, says: str = "", share: float = 1.0) -> planting.Fault:
    """Sums of float32 at a share of the speed of bfloat16."""
    figures = timed(64 * MIB, torch=2e-4, fp32=2e-4 / share)
    return launched("test_fp32_beside_bf16_speed", name, outcome, says=says, figures=figures)


def through_torch(name: str, outcome: str = "failed", *, share: float, mib: int = 64) -> planting.Fault:
    """Collectives through torch at a share of the speed of the library's own calls."""
    figures, says = timed(mib * MIB, eager=2e-4, torch=2e-4 / share), "through torch" if share != 1 else ""
    says = says if outcome == "failed" else ""
    return launched("test_torch_beside_the_library_speed", name, outcome, says=says, figures=figures)


def pairs(name: str, outcome: str = "failed", *, says: str = "", to_0: list[float]) -> planting.Fault:
    """Seconds of three repeats from 1 to 0; the way back takes 0.2 ms."""
    found = [
        {"from": sender, "to": 1 - sender, "seconds": seconds, "failures": []}
        for sender, seconds in ((0, [2e-4] * 3), (1, to_0))
    ]
    return launched("test_send_receive_bandwidth", name, outcome, says=says, pairs=found)


@pytest.mark.parametrize(
    "fault",
    [
        beside("sums of float32 at half the speed", says="in fp32", share=0.5),
        beside("sums of float32 are a little slower", "passed", share=0.93),
        through_torch("torch copies each buffer", share=0.7),
        through_torch("torch copies small buffers twice", share=0.5, mib=16),
        through_torch("torch on a busy host", "passed", share=0.81, mib=16),
        through_torch("torch from 64 MiB on", "passed", share=0.97),
        pairs("one direction has lost a sixth of its channels", says="1 to 0", to_0=[2.4e-4] * 3),
        pairs("a host is busy in two of three repeats", "passed", to_0=[2.4e-4, 2.1e-4, 2.3e-4]),
        *(
            dataclasses.replace(fault, another=True)
            for fault in (
                beside("sums of float32 without a time", says="in fp32", share=float("nan")),
                through_torch("torch without a time", share=float("nan")),
                pairs("a direction without a time", says="1 to 0", to_0=[float("nan")] * 3),
            )
        ),
    ],
    ids=str,
)
def test_slow_collective_beside_another_is_found(fault, plant):
    plant(fault)


@pytest.mark.healthy
def test_what_the_library_says_of_the_network_is_read_from_its_log():
    """Lines as NCCL 2.2x writes them (src/transport/net_ib.cc, src/net.cc, src/misc/param.cc)."""
    log = """\
n1:71:90 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5
n1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:71:90 [0] NCCL INFO Using network IB
n1:71:90 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
n1:71:90 [0] NCCL INFO Channel 00/24 : 0 1 2 3
"""
    found = nccl_log.network(log)
    assert found[-1] == "Using network IB"
    assert len(found) == 4
    assert any("mlx5_1:1/IB" in line for line in found)
    assert any(line.startswith("NCCL_IB_HCA") for line in found)
    assert nccl_log.network("") == []
