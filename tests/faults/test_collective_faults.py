"""Faults of sums that change from call to call, of groups that leave things behind, of weights used twice."""

# ruff: noqa: E501 - a table of faults reads in rows
import random

import pytest

from planting import Fault

SUITE = "test_collectives.py::"
# Every seventh large sum of 16-bit numbers has another last bit, on all ranks.
RESTLESS = (
    "(lambda calls: lambda t, *a, **k: (original(t, *a, **k), "
    "t.view(-1)[-1:].view(torch.int16).bitwise_xor_(1) "
    "if t.numel() == 32768 and t.dtype.itemsize == 2 and next(calls) % 7 == 3 else 0)[0])"
    "(__import__('itertools').count())"
)
CYCLE = "workloads.collective_groups:cycle"
LIMIT = "workloads.collective_groups:LIMIT_S"
# The launch that the checks share carries no large arrays, as the faults of `collective_mutants` are for those,
# and sets up no more than the least number of worlds.
QUICK = {
    "workloads.collective_counts:LARGEST": "{'cpu': 2}",
    "workloads.collective_counts:MORE": "(2, 127)",
    "workloads.collective_groups:BUDGET_S": "{'standard': 0.0}",
}


def fault(name: str, check: str, patches: dict[str, str], says: str, **more: object) -> Fault:
    return Fault(name, SUITE + check, says=says, patches=QUICK | patches, **more)


FAULTS = (
    fault("a sum changes its last bit now and then", "test_same_bits_from_call_to_call", {"torch.distributed:all_reduce": RESTLESS}, "of 50 results differ"),
    fault("a world leaves a descriptor behind", "test_groups_set_up_and_torn_down", {CYCLE: "lambda *a, **k: (os.dup(0), original(*a, **k))[1]"}, "'descriptors': ", another=True),
    fault("a group of a world leaves a descriptor behind", "test_groups_set_up_and_torn_down", {"workloads.collective_groups:regroup": "lambda *a, **k: (os.dup(0), original(*a, **k))[1]"}, "groups of one world: after", another=True),
    fault(
        "a world leaves memory behind",
        "test_groups_set_up_and_torn_down",
        {
            CYCLE: "lambda *a, **k: (vars(os).setdefault('kept', []).append(b'x' * (16 << 20)), "
            "original(*a, **k))[1]"
        },
        "'host_mib': ",
    ),
    fault(
        "a world in twenty sums wrong",
        "test_groups_set_up_and_torn_down",
        {CYCLE: "lambda r, key, **k: original(r, key, **k) and not key.endswith('/5')"},
        "the sums of worlds [5]",
        another=True,
    ),
    fault(
        "a world that is refused on one rank",
        "test_groups_set_up_and_torn_down",
        {
            CYCLE: "lambda r, key, **k: exec('raise RuntimeError(\\'no world here\\')') "
            "if r.rank == 0 and key.endswith('/3') else original(r, key, **k)",
            LIMIT: "10.0",
        },
        "world 3: no world here",
        another=True,
    ),
    fault(
        "a second use replaces the first",
        "test_module_used_twice",
        {
            "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce": "lambda params, *a, **k: "
            "([setattr(p.sharded_param, 'grad', None) for p in params], original(params, *a, **k))[1]"
        },
        "gradient of block.up.weight",
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, marks=pytest.mark.waits if LIMIT in one.patches else ()) for one in FAULTS],
    ids=str,
)
def test_planted_fault_is_caught(planted, plant):
    plant(planted)


SWITCH = "__import__('os').environ.get('NCCL_NVLS_ENABLE') != '0'"  # in a launch in which switches may add
ADDS = {"workloads.nccl_log:nvls": f"lambda *a: 'on' if {SWITCH} else 'off'"}


def test_bits_that_a_switch_changes_are_recorded(plant):
    patches = ADDS | {
        "torch.distributed:all_reduce": RESTLESS.replace("next(calls)", f"{SWITCH} and next(calls)")
    }
    (check,) = plant(
        fault("switches add", "test_same_bits_from_call_to_call", patches, "", outcome="passed")
    )["checks"]
    changed = {
        (m["conditions"]["op"], m["conditions"]["nvls"]): m["value"]
        for m in check["metrics"]
        if m["name"] == "results_with_other_bits"
    }
    assert changed["all_reduce", "on"] > 0
    assert {value for (_, nvls), value in changed.items() if nvls == "off"} == {0}
    assert changed["reduce_scatter", "on"] == 0


@pytest.mark.parametrize(
    ("patches", "says"),
    [
        (ADDS | {"torch.distributed:all_reduce": RESTLESS}, "of 50 results differ"),
        pytest.param(
            {"workloads.nccl_log:nvls": "lambda *a: 'on'"}, "switches add with", marks=pytest.mark.slow
        ),
    ],
    ids=["ranks are restless too", "the switch cannot be turned off"],
)
def test_a_switch_excuses_nothing_that_ranks_do(patches, says, plant):
    plant(fault("switches and ranks", "test_same_bits_from_call_to_call", patches, says))


@pytest.mark.healthy
@pytest.mark.parametrize("seed", range(20))
def test_a_neighbour_that_takes_the_device_s_memory_is_no_leak_and_a_leak_is_one(seed):
    groups = pytest.importorskip("workloads.collective_groups", reason="the suites need torch")
    draw = random.Random(seed)
    worlds, used = draw.randint(8, 40), draw.uniform(500, 9000)
    begins, took = draw.randint(1, worlds), draw.uniform(-3000, 3000)
    neighbour = [{groups.SHARED: used + (took if at >= begins else 0)} for at in range(worlds + 1)]
    assert groups.growth(neighbour)[groups.SHARED] <= 0
    leaked = draw.uniform(11, 100)
    both = [{groups.SHARED: one[groups.SHARED] + leaked * at} for at, one in enumerate(neighbour)]
    if took > 0:
        assert groups.growth(both)[groups.SHARED] > 64, "a leak beside a neighbour that begins"
    assert groups.growth([{"threads": 5.0}, {"threads": 9.0}]) == {"threads": 4.0}
