"""Cases of drawn layouts of training: drawn, written, made smaller. In: a seed, a number, ranks. Out: cases.

Also what PyTorch says that cannot run, and what its releases are known to get wrong.
"""

import functools
import itertools
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from workloads.attention_refusals import release
from workloads.case_texts import CaseError, Check, listed, named, one_of, parsed, refuse, whole
from workloads.layout_jobs import HAS_UNUSED
from workloads.layout_models import FROZEN, TYPES, Case, Layout
from workloads.layout_options import OPTIONS, SPLIT, V_SHAPED, compiled_whole, groups_of

FAMILIES = ("layouts", "checkpoints")
SAVED = ("ddp", "fsdp1", "fsdp2", "tensor", "fsdp2+tensor")  # between which checkpoints go
PARALLEL = (*SAVED, "pipeline", "fsdp2+pipeline")
MEMORY = ("plain", "recomputed", "compiled")
ADAMW = ("foreach", "fused", "for")
TRAITS: dict[str, tuple[str, ...]] = {
    "frozen": ("", "", "", *(name for name in FROZEN if name)), "spare": ("", "", "yes"),
    "branch": ("", "", "step", "chunk"), "buffers": ("", "", "counts", "means"), "tied": ("", "", "yes"),
    "twice": ("", "", "yes"), "gain": ("", "", "one", "scalar"), "mixed": ("", "", "yes"),
}  # fmt: skip
SIZES: dict[str, tuple[int, ...]] = {
    "width": (8, 33, 66), "hidden": (10, 32, 37, 134), "vocab": (64, 131, 257), "blocks": (1, 2, 3),
    "batch": (1, 2, 3), "length": (8, 14, 13),
}  # fmt: skip


def draw(family: str, seed: int, number: int, size: int) -> Case:
    """One case for a number of ranks; 42 in turn have every kind, way and type of the first layout.

    Of checkpoints 30 have.
    """
    r = random.Random(f"{family} {seed} {number}")
    two = family == "checkpoints"
    ways = SAVED if two else PARALLEL
    turn, way = divmod(number, len(ways))
    memory, kind = MEMORY[turn % 3], tuple(TYPES)[turn // 3 % 2]
    while True:
        layouts = [_layout(r, ways[way], memory, size)]
        if two:
            layouts.append(_layout(r, r.choice((*SAVED, "alone")), r.choice(MEMORY), size))
        traits = {name: some for name, of in TRAITS.items() if (some := r.choice(of))}
        sizes = {name: r.choice(of) for name, of in SIZES.items()}
        chunks = r.choice((1, 2, 3, 4)) * max(groups_of(one, size) for one in layouts)
        if stages := _stages(layouts[0], size):
            sizes["blocks"] = max(sizes["blocks"], stages - 2)
            chunks *= r.choice((1, layouts[0]["inner"] or size))
        case = Case(
            numbers=seed * 1_000_003 + number,
            sizes=sizes,
            kind=kind,
            chunks=chunks,
            layouts=tuple(layouts),
            traits=traits,
            steps=r.choice((2, 2, 3)),
            clip=r.random() < 0.4,
            adamw=r.choice(ADAMW),
            late=two and r.random() < 0.5,
        )
        if fits(case, size):
            return case


def _layout(r: random.Random, parallel: str, memory: str, size: int) -> Layout:
    key = r.random()  # a new option shall change no other
    options = {name: random.Random(f"{key} {name}").choice(of) for name, of in OPTIONS[parallel].items()}
    if _is_of_two(parallel, options):
        options["inner"] = r.choice(_divisors(size))
    return Layout(parallel=parallel, memory=memory, options=options)


def _is_of_two(parallel: str, options: Mapping[str, Any]) -> bool:
    """Whether the mesh of a layout has an inner dimension."""
    return (
        parallel in {"fsdp2+tensor", "fsdp2+pipeline"}
        or options.get("replicas")
        or "HYBRID" in options.get("strategy", "")
    )


def _stages(one: Layout, size: int) -> int:
    """How many stages a pipeline has; 0 of another layout."""
    return (one["inner"] or size) * one["stages"] if "pipeline" in one.parallel else 0


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def fits(case: Case, size: int) -> bool:
    """Whether PyTorch says that such a case can run."""
    return not any(
        rule(case, one, size) for one in case.layouts for rule in (_refused, _flat, _tensor, _pipeline)
    )


def _refused(case: Case, one: Layout, size: int) -> Any:
    """What no layout, DDP or FSDP2 can do. Tensors of two meshes have no common norm, nor a common update."""
    two, unused, static = len(case.layouts) > 1, one["find_unused_parameters"], one["static_graph"]
    whole = one.parallel in {"alone", "pipeline"}  # no rank has a part of a gradient
    coarse = one["unused"] and one["sync"] == "last" and case.kind != one["reduce"]
    meshes = "tensor" in one.parallel and not one["sequence"] and (case.adamw != "for" or case.clip)
    some = case["spare"] or case["branch"]
    ddp = (
        (static and (unused or case["branch"]))
        or (some and not (static or unused))
        or (one["skip_all_reduce_unused_params"] and (some or not unused))
        or (one["zero"] and (two or case["mixed"]))  # it has one type
    )
    return (
        meshes
        or case.chunks % groups_of(one, size)
        or (two and case["buffers"] == "means")
        or (case["branch"] == "chunk" and coarse)  # some ranks raise: pytorch#196996
        or (case["branch"] == "chunk" and not (unused or (HAS_UNUSED and one["unused"]) or whole))
        or (one["ignored"] and case["frozen"] and case.kind == "bfloat16")  # it stays in float32
        or (case["mixed"] and (case.kind == "bfloat16" or one.memory == "compiled"))
        or (case["mixed"] and "fsdp" in one.parallel and one["units"] != "blocks")
        or (ddp if one.parallel == "ddp" else case["gain"] == "scalar" and not whole)
    )


def _flat(case: Case, one: Layout, size: int) -> Any:
    """FSDP1: a flat parameter has one type, and without the original ones all of it is trained or nothing.
    On the host, gradients replace those of the pass before, and are not added to them.

    Not drawn, as torch 2.13 gets them wrong: a hybrid whose shards have one rank each becomes NO_SHARD of one
    rank, and sums nothing; and a flat parameter takes the count of steps of any of its weights.
    """
    if one.parallel != "fsdp1":
        return False
    frozen, flat = case["frozen"], not one["use_orig_params"]
    whole = not frozen or (
        one["ignored"] if frozen == "embedding" else frozen == "a block" and one["units"] == "blocks"
    )
    resumed = len(case.layouts) > 1 and (case["spare"] or case["branch"])
    return (
        one["inner"] == 1 < size
        or (one["offload"] and one["sync"] == "each" and case.chunks > groups_of(one, size))
        or (flat and (not whole or one.memory == "compiled" or resumed))
        or (case["tied"] and one["units"] == "size")
    )


def _tensor(case: Case, one: Layout, size: int) -> Any:
    """Weights that are in no plan have gradients of a part of the sequence; a plan unties weights."""
    thawed = case["frozen"] == "a block" and one["sequence"] and len(case.layouts) > 1
    return "tensor" in one.parallel and (
        {"tied", "gain", "branch", "buffers", "mixed"} & case.traits.keys()
        or case["frozen"] == "all but adapters"
        or thawed
        or case.sizes["hidden"] % size
        or case.sizes["length"] % size
    )


def _pipeline(case: Case, one: Layout, size: int) -> Any:
    """A stage takes and returns tensors alone, and shares no weight with another.

    Shapes are given with whether their gradients are needed, and of one type. Not drawn, as torch 2.13
    gets them wrong: buffers that the pass for shapes changes too; and, where the backward pass is in two,
    weights that FSDP2 reshards after forward, and a block used twice that is not in the first stage.
    """
    stages, inner = _stages(one, size), one["inner"] or size
    passes, schedule = case.chunks // groups_of(one, size), one["schedule"]
    split = schedule in SPLIT
    return stages and (
        len(case.layouts) > 1
        or case["tied"]
        or stages > case.sizes["blocks"] + 2
        or one["stages"] != {"GPipe": 1, "1F1B": 1, **dict.fromkeys(V_SHAPED, 2)}.get(schedule, one["stages"])
        or (schedule in {"1F1B", "DualPipeV"} and passes < stages)
        or ("Interleaved" in schedule and passes % max(1, passes // inner))
        or (split and (one.memory == "compiled" or one["reshard_after_forward"]))
        or (split and case["twice"] and stages == case.sizes["blocks"] + 2)
        or (one["given"] and (case["frozen"] or case["mixed"]))
        or (case["buffers"] and not one["given"])
    )


# Faults of torch: the cases that have them, and what these then say (docs/reference/trust.md).
KNOWN: dict[str, tuple[str, Callable[[Case, Layout, int], Any]]] = {
    "pytorch#187732": (
        r"raised RuntimeError: .*reducer\.cpp",
        lambda _, one, passes: one["static_graph"] and one["sync"] == "last" and passes > 1),
    "pytorch#97030": (
        r"raised RuntimeError: Expected to have finished reduction",
        lambda case, one, _: one["static_graph"] and case["spare"]),
    "pytorch#97030, silently": (
        r": gradient [1-9] of ",
        lambda case, one, _: one["static_graph"] and case["spare"] and case.kind == "bfloat16"),
    "pytorch#190626": (
        r"norm\.(weight|bias): share of bfloat16",
        lambda case, one, passes: one.parallel == "fsdp2+tensor" and one["sequence"]
        and (case.kind, passes) == ("bfloat16", 1)),
    "zeros of unused parameters have another type": (
        r"FSDP reduce-scatter expects uniform gradient dtype",
        lambda case, one, passes: one["unused"] and one["sync"] == "last" and passes > 1
        and case.kind != one["reduce"] and (case["spare"] or case["branch"])),
    "a factor divides twice where a shard has one rank": (
        r": gradient \d of ",
        lambda _, one, __: one["divided"] == "by ranks" and one["force_sum"] and one["replicas"]
        and one["inner"] == 1),
    "no state of what is unused": (
        r"Missing key in checkpoint state_dict: job\.optimizer\.state\.(spare|blocks\.\d\.side)",
        lambda case, *_: len(case.layouts) > 1 and (case["spare"] or case["branch"])),
    "SequenceParallel trains what is frozen": (
        r": (weight blocks\.0\.norm\.\w+ after step|norm) \d",
        lambda case, one, _: one["sequence"] and case["frozen"] == "a block"),
    "SequenceParallel: gradients of norms are not clipped": (
        r": weight (blocks\.\d\.)?norm\.(weight|bias) after step \d",
        lambda case, one, _: release() < (2, 12) and one.parallel == "tensor" and one["sequence"]
        and case.clip),
    "FSDP1 gathers a frozen unit for nothing": (
        r"'NoneType' object has no attribute 'data'",
        lambda case, one, _: case["frozen"] and case["spare"]
        and one["backward_prefetch"] == "BACKWARD_POST"),
    "FSDP1 gives tied weights gradients of another type": (
        r"attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'",
        lambda case, one, passes: passes > 1 and case["tied"]
        and (one["strategy"], one["sync"], case.kind) == ("NO_SHARD", "last", "bfloat16")),
    "compiled: a number of a buffer is read after it changed": (
        r"gradient \d of (embedding\.weight|gain)",
        lambda case, one, _: case["buffers"] and one.memory == "compiled" and compiled_whole(one)),
}  # fmt: skip


def known(case: Case, failures: list[str], size: int) -> list[str]:
    """The known faults of torch that such a case has, if they explain all of its failures."""
    held = {
        name: words
        for name, (words, holds) in KNOWN.items()
        if any(holds(case, one, case.chunks // groups_of(one, size)) for one in case.layouts)
    }
    explained = [[name for name, words in held.items() if re.search(words, one)] for one in failures]
    return sorted(set(itertools.chain(*explained))) if all(explained) else []


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are plainer by one thing."""
    yield from (
        replace(case, traits={k: v for k, v in case.traits.items() if k != out}) for out in case.traits
    )
    for n, one in enumerate(case.layouts):
        plain = {name: of[0] for name, of in OPTIONS[one.parallel].items()}
        others = [replace(one, memory="plain")]
        others += [replace(one, options={**one.options, name: to}) for name, to in plain.items()]
        yield from (replace(case, layouts=(*case.layouts[:n], o, *case.layouts[n + 1 :])) for o in others)
    yield from (replace(case, chunks=n) for n in range(1, case.chunks))
    yield from (replace(case, sizes={**case.sizes, name: of[0]}) for name, of in SIZES.items())
    yield from (replace(case, steps=n) for n in range(len(case.layouts), case.steps))
    yield from (replace(case, **plain) for plain in ({"clip": False}, {"late": False}, {"adamw": "for"}))


def told(case: Case) -> str:
    """A case as JSON."""
    return json.dumps(asdict(case))


def of_json(text: str, size: int) -> Case:
    """A case from what is printed of it, for a number of ranks. Raises `CaseError`."""
    flag = one_of(False, True)
    needed = {
        "numbers": whole(0), "sizes": named(dict, dict.fromkeys(SIZES, whole(1)), {}),
        "kind": one_of(*TYPES), "chunks": whole(1), "layouts": listed(functools.partial(_of_layout, size), 1),
    }  # fmt: skip
    traits = named(dict, {}, {name: one_of("", *of) for name, of in TRAITS.items()})
    more = {"traits": traits, "steps": whole(1), "clip": flag, "adamw": one_of(*ADAMW), "late": flag}
    found: Case = parsed(text, named(Case, needed, more))
    if len(found.layouts) > min(2, found.steps) or not fits(found, size):
        refuse("case", text, f"one or two layouts, no more than steps, that {size} ranks can have")
    return found


def _of_layout(size: int, value: Any, place: str) -> Layout:
    """All options of its kind; which these are, the first reading tells."""
    more: dict[str, Check] = {"memory": one_of(*MEMORY), "options": lambda one, _: one}
    needed = {"parallel": one_of(*OPTIONS)}
    kind = named(dict, needed, more)(value, place)["parallel"]
    options = {name: one_of(*of) for name, of in OPTIONS[kind].items()}
    more["options"] = named(dict, options, {"inner": one_of(*_divisors(size))})
    layout: Layout = named(Layout, needed, more)({"options": {}, **value}, place)
    if _is_of_two(kind, layout.options) and layout["inner"] is None:
        refuse(f"{place}.options", layout.options, "the size of its mesh as inner")
    return layout


def given(text: str) -> Case | None:
    """The case that a program shall judge alone; None for a family, of which it draws cases."""
    if text in FAMILIES:
        return None
    try:
        return of_json(text, int(os.environ.get("WORLD_SIZE", "1")))
    except CaseError as error:
        sys.exit(f"{' or '.join(FAMILIES)}, or a case: {error}")
