"""Leaks in each step of training: the check of growth sees them, and nothing else."""

import sys

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import growth

CHECK = "test_growth.py::test_nothing_grows"
KEEPS = {
    "a tensor": ("torch.zeros(1)", "tensors grow by 1 "),
    "256 kB of the host": ("b'1' * (1 << 18)", "host bytes grow by 2.6"),
    "a thread": (
        "__import__('threading').Thread(target=__import__('time').sleep, args=(600,), daemon=True).start()",
        "threads grow by 1 ",
    ),
    "a descriptor": ("open('/dev/null')", "descriptors grow by 1 "),
    "a child that nobody waits for": ("__import__('subprocess').Popen(['true'])", "children grow by 1 "),
    # Each quarter takes more than twice the one before: a busy machine takes half as long again now and then.
    "more to add up": ("sum(range(2 * max(0, len(kept) - 20) ** 3))", "seconds grow by "),
    "a view of another process's memory": (
        "torch.zeros(1 << 14).share_memory_().numpy()",
        "descriptors grow by 1 ",
    ),
}
COMPILES = (
    "lambda *a: (lambda step, kept: lambda: (kept.append(1), "
    "torch.compile(lambda x: x + len(kept), backend='eager', dynamic=False)(torch.ones(2)), step())[-1])"
    "(original(*a), [])"
)
SHARED = (
    "lambda pipe: (lambda kept: original(type('Pipe', (), {'send': pipe.send, "
    "'recv': lambda self: (kept.append(pipe.recv()), kept[-1])[1]})()))([])"
)


def planted(
    name: str, patches: dict[str, str], says: str, action: str = "steps", *, another: bool = False
) -> Fault:
    """One mode shows a leak; the others cost as much time again."""
    patches = {"workloads.growth:MODES": "('eager',)", **patches}
    return Fault(name, f"{CHECK}[{action}]", patches=patches, says=says, tier="soak", another=another)


def keeps(expression: str) -> dict[str, str]:
    """Each step keeps what the expression gives."""
    step = f"lambda: (kept.append({expression}), step())[-1]"
    return {"workloads.growth:training": f"lambda *a: (lambda step, kept: {step})(original(*a), [])"}


FAULTS = (
    *(
        planted(f"each step keeps {name}", keeps(what), says, another=name != "a tensor")
        for name, (what, says) in KEEPS.items()
    ),
    planted(
        "each step compiles",
        {"workloads.growth:training": COMPILES},
        "graphs were compiled in 20 steps",
        another=True,
    ),
    planted(
        "the other process keeps each tensor",
        {"workloads.growth:echo": SHARED},
        "the other process's tensors grow by 1 ",
        "processes",
    ),
    Fault("nothing", f"{CHECK}[steps]", outcome="passed", tier="soak", another=True),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_nothing_else_is_seen(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))


@pytest.mark.parametrize(
    ("readings", "grown"),
    [
        ([0, 0, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9], 0),  # a cache that is filled once
        ([5, 0, 7, 1, 5, 8, 5, 2, 9, 0, 5, 5], 0),  # noise
        ([51 * n for n in range(12)], 3),  # in each 17 steps
        ([153 * (n // 3) for n in range(12)], 3),  # now and then
        ([51 * n + 10_000 * (n % 3 == 0) for n in range(12)], 3),
        ([-n for n in range(12)], -3 / 51),
    ],
)
def test_only_what_grows_all_the_time_counts(readings, grown):
    assert growth.growth(readings) == pytest.approx(grown, abs=0.05)
