"""Cases of drawn collectives: drawn, written, made smaller. In: a seed, a number, ranks. Out: cases."""

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from workloads import generated_collective_calls as calls
from workloads.case_texts import Check, listed, named, one_of, parsed, refuse, whole
from workloads.generated_collective_data import COMBINE, KINDS, PAIRED, REDUCING, Call

Partition = tuple[tuple[int, ...], ...]
Group = tuple[str, Partition]  # how it comes to be, and which ranks are together; others take no part
WORLD: Group = ("world", ())
# What only a GPU has: calls on streams of their own, calls that a graph replays, and memory that the library
# has registered.
SPECIAL = ("streams", "graph", "registered")
LARGEST = {"cuda": 26, "cpu": 19}  # powers of two, in bytes: of a case in all
OBJECT = 12  # the same for an object
FLOATS, WHOLE = ("fp64", "fp32", "fp16", "bf16"), ("int8", "uint8", "int32", "int64")
COMPLEX, EIGHTS = ("c64", "c128"), ("e4m3", "e5m2")
MODES = ("in turn", "async", "streams", "coalesced", "graph")
VALUES = ("exact", "bits", "normal")
COALESCED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls, the groups that they name by number, and how they go together."""

    calls: tuple[Call, ...]
    groups: tuple[Group, ...] = (WORLD,)
    mode: str = "in turn"
    order: int = 0
    turns: int = 1
    late: int = -1
    registered: bool = False

    def __str__(self) -> str:
        """What differs from the plainest case, as JSON: what `--case` takes."""
        found = _told(self) | {"calls": [_told(call) for call in self.calls]}
        return json.dumps(found)

    def asked(self, size: int) -> set[int]:
        """The ranks that take part in a call."""
        parts = (self.groups[call.group][1] or (tuple(range(size)),) for call in self.calls)
        return {rank for part in parts for members in part for rank in members}


def _told(one: Any) -> dict[str, Any]:
    plain = {each.name: each.default for each in fields(one)}
    return {name: value for name, value in asdict(one).items() if value != plain[name]}


def of_json(text: str, size: int) -> Case:
    """A case from what is printed of it, for a number of ranks. Raises `CaseError`."""
    flag, rank, order = one_of(False, True), whole(0, size - 1), whole(0)
    call = {
        "dtype": one_of(*KINDS), "count": whole(0), "reduce": one_of(*COMBINE), "values": one_of(*VALUES),
        "offset": whole(-1), "root": whole(0), "uneven": whole(0, 4), "inplace": flag, "apart": flag,
        "group": whole(0), "numbers": whole(0),
    }  # fmt: skip
    more = {"mode": one_of(*MODES), "order": order, "turns": whole(1), "late": whole(-1, size - 1)}
    more |= {"registered": flag, "groups": listed(functools.partial(_group, rank), 1)}
    calls_of = listed(named(Call, {"op": one_of(*calls.OPERATIONS)}, call), 1)
    found: Case = parsed(text, named(Case, {"calls": calls_of}, more))
    for number, one in enumerate(found.calls):
        whole(0, len(found.groups) - 1)(one.group, f"case.calls[{number}].group")
    return found


def _group(rank: Check, value: Any, place: str) -> Group:
    """How a group comes to be, and its parts, which have no common rank."""
    if not isinstance(value, list) or len(value) != 2:
        refuse(place, value, "a list of two: how, and which ranks are together")
    how = one_of("world", "new", "made again")(value[0], f"{place}[0]")
    parts = listed(listed(rank, 1), how != "world")(value[1], f"{place}[1]")
    ranks = [one for part in parts for one in part]
    if len(set(ranks)) < len(ranks) or (ranks and how == "world"):
        refuse(place, value, "each rank at most once, and none with world")
    return how, parts


def draw(seed: int, number: int, size: int, *, device: str, lacks: frozenset[str] = frozenset()) -> Case:
    """One case for a number of ranks. The operations take turns to come first."""
    r, nccl = random.Random(f"collectives {seed} {number}"), device == "cuda"
    special = tuple(one for one in SPECIAL if nccl and one not in lacks)
    mode = r.choice(
        (
            "in turn",
            "in turn",
            "async",
            "async",
            "coalesced",
            *(one for one in special if one != "registered"),
        )
    )
    op = calls.OPERATIONS[number % len(calls.OPERATIONS)]
    if mode == "coalesced":
        op = r.choice(COALESCED)
    if mode == "graph" and op not in calls.CALLS:
        mode = "in turn"
    many = r.choice((1, 1, 4, 8, 12) if mode == "in turn" else (2, 4, 8, 12))
    pool = _pool(seed, size)
    groups = [r.choice(pool) for _ in range(r.choice((1, 1, 2)) if mode != "coalesced" else 1)]
    if r.random() < 0.04:
        groups[0] = ("made again", groups[0][1] or (tuple(range(size)),))
    largest = LARGEST[device] - min(many - 1, 3)
    drawn = [_call(r, op, size, largest, nccl=nccl, rare=many == 1)]
    while len(drawn) < many:
        other = _call(r, r.choice(tuple(calls.CALLS)), size, largest, nccl=nccl, rare=False)
        if mode == "coalesced":
            count = max(0, drawn[0].count + r.randint(-3, 3))
            other = replace(drawn[0], count=count, offset=other.offset, numbers=other.numbers)
        drawn.append(replace(other, group=r.randrange(len(groups))))
    return Case(
        calls=tuple(_without(lacks, call) for call in drawn),
        groups=tuple(groups),
        mode=mode,
        order=r.randrange(24),
        turns=r.choice((2, 3)) if mode == "graph" else r.choice((1, 1, 1, 2, 4)),
        late=r.randrange(size) if r.random() < 0.1 else -1,
        registered="registered" in special and set(groups) == {WORLD} and r.random() < 0.3,
    )


def _without(lacks: frozenset[str], call: Call) -> Call:
    """The nearest call that this backend has."""
    op = "all_to_all_single" if call.op in lacks else call.op
    return replace(call, op=op, reduce="sum" if call.reduce in lacks else call.reduce)


@functools.cache
def _pool(seed: int, size: int) -> tuple[Group, ...]:
    """The groups of a seed: few, because each keeps connections and memory."""
    r, everyone = random.Random(f"groups {seed} {size}"), tuple(range(size))
    subset = tuple(sorted(r.sample(everyone, r.randint(1, size))))
    mixed = tuple(r.sample(everyone, size))
    cut = r.randint(1, size - 1) if size > 1 else 1
    return (
        WORLD,
        WORLD,
        ("new", (everyone[::-1],)),
        ("new", (subset,)),
        ("new", tuple(part for part in (mixed[:cut], mixed[cut:]) if part)),
        ("new", tuple((one,) for one in everyone)),
    )


def _call(r: random.Random, op: str, size: int, largest: int, *, nccl: bool, rare: bool) -> Call:
    reduce, dtype = "sum", r.choice((*FLOATS, *WHOLE, "bool"))
    if op in REDUCING:
        reduce = r.choice(
            ("sum", "sum", "sum", "avg", "product", "min", "max", *(() if nccl else ("bxor", "band", "bor")))
        )
        dtype = r.choice(_types(reduce, nccl=nccl))
        if rare and r.random() < 0.2:
            reduce, dtype = r.choice((*([("sum", t) for t in COMPLEX]), *(_rare() if nccl else ())))
    elif rare and r.random() < 0.2:
        dtype = r.choice(EIGHTS if nccl or op in PAIRED else COMPLEX)
    values = "exact"
    if op not in REDUCING and dtype != "bool":
        values = r.choice(("exact", "bits"))
    elif op in REDUCING and reduce in {"sum", "avg"} and dtype in FLOATS:
        values = r.choice(("exact", "exact", "normal"))
    kind = KINDS[dtype]
    return Call(
        op=op,
        dtype=dtype,
        reduce=reduce,
        count=_count(r, OBJECT if op in calls.OBJECTS else largest, kind.whole.itemsize, size),
        values=values,
        offset=r.choice((-1, 0, 0, 1, 2, 3, 5, 7)),
        root=r.randrange(size),
        uneven=r.choice((0, 1, 2, 3, 4)) if op == "all_to_all_single" or (nccl and op == "all_to_all") else 0,
        inplace=r.random() < 0.3,
        apart=r.random() < 0.5,
        numbers=r.randrange(2**31),
    )


def _types(reduce: str, *, nccl: bool) -> tuple[str, ...]:
    if reduce == "avg":
        return (*FLOATS, *WHOLE[2:]) if nccl else FLOATS
    if reduce in {"bxor", "band", "bor"}:
        return WHOLE
    return (*FLOATS, *FLOATS, *WHOLE)


def _rare() -> tuple[tuple[str, str], ...]:
    """What NCCL has, and not every release for every type."""
    some = [("premul", t) for t in ("fp64", "fp32", "fp16")]
    return (
        *some,
        *((op, "bool") for op in ("sum", "min", "max")),
        *((op, t) for op in ("sum", "max") for t in EIGHTS),
    )


def _count(r: random.Random, largest: int, itemsize: int, size: int) -> int:
    """Few, any number, or beside a power of two or what a library's lines and steps hold, in bytes."""
    way = r.random()
    if way < 0.1:
        return r.choice((0, 1, 2, 3))
    share = size if r.random() < 0.5 or way > 0.9 else 1
    if way < 0.35:
        return round(2 ** r.uniform(0, largest)) // itemsize // size
    border: int = (
        2 ** r.randint(3, largest) * r.choice((8, 8, 8, 12, 15)) // 8
    )  # 15: 120 of 128 bytes are data
    border = min(border, 2**largest)
    if border * size > 2**largest * 4:
        share = size
    return max(0, border // itemsize // share + r.choice((-3, -2, -1, 0, 0, 1, 2, 3)))


def candidates(case: Case) -> Iterator[Case]:
    """Plainer cases, the plainest first."""
    count = len(case.calls)
    for part in (count // 2, count // 4, 1):
        for first in range(0, count, part) if 0 < part < count else ():
            yield replace(case, calls=case.calls[:first] + case.calls[first + part :])
    plain: dict[str, Any] = {"turns": 1, "late": -1, "mode": "in turn", "order": 0, "registered": False}
    plain["groups"] = tuple(WORLD for _ in case.groups)
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    used = sorted({call.group for call in case.calls})
    if len(case.groups) > len(used):
        moved = tuple(replace(call, group=used.index(call.group)) for call in case.calls)
        yield replace(case, calls=moved, groups=tuple(case.groups[one] for one in used))
    for number, call in enumerate(case.calls):
        for other in _plainer(call):
            yield replace(case, calls=(*case.calls[:number], other, *case.calls[number + 1 :]))


def _plainer(call: Call) -> Iterator[Call]:
    plain: dict[str, Any] = {each.name: each.default for each in fields(call)}
    for name in sorted(plain.keys() - {"op", "count", "group", "numbers"}):
        if getattr(call, name) != plain[name]:
            yield replace(call, **{name: plain[name]})
    less = {call.count - (call.count >> power) for power in range(1, call.count.bit_length())}
    for count in sorted({0, 1} | less):
        if count < call.count:
            yield replace(call, count=count)
