"""Cases of drawn placements: drawn, written, made smaller. In: a seed, a number, ranks. Out: cases.

A placement is a text: R (Replicate), S0 or S-1 (Shard of a dimension, counted on where a tensor has fewer),
P and how its parts go together (Partial). What a tensor cannot have is R for it: a number has no dimension.
"""

import datetime as dt
import functools
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from workloads import gates, generated_left, generated_trees
from workloads import generated_operators as operators
from workloads.case_texts import Check, listed, named, one_of, parsed, refuse, whole
from workloads.generated_judge import Call
from workloads.generated_places import PLACES
from workloads.ranks import Ranks
from workloads.time_limits import scaled

Placed = tuple[str, ...]  # of one tensor, for each dimension of the mesh
KINDS = ("float32", "bfloat16", "float64")
SIZES, NUMBERS = ("", "", "", "odd"), ("", "", "uneven", "zero row")  # as drawn operators have them
SHARDS = tuple(f"S{dim}" for dim in (0, 1, 2, 3, -1, -2, -3))
PARTIAL = ("P sum", "P avg", "P max", "P min")
NAMES = ("R", *SHARDS, *PARTIAL)
# They take local parts as they lie (pytorch#186129): wrong numbers, other shapes, or an error of one rank
# alone: drawn are the placements that they are made for.
CONVOLUTIONS = "nn.functional.conv"
WAIT_S = 8.0  # of one collective, which takes milliseconds
OPERANDS = 3  # that have placements of their own; the next ones begin again


# In place they lose a change of what is brought elsewhere, or keep a shape that it was; then ranks send parts
# of other sizes than they say, which ends their process on gloo (docs/reference/trust.md).
LOSES_IN_PLACE = r"index_|scatter|masked_scatter|put|addmv|addr|addbmm|(un)?squeeze|t$|transpose|swap"


@dataclass(frozen=True)
class Operand:
    """Where an operand is: its placements, and which view of what is placed it is."""

    placed: Placed
    view: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operator with numbers of a seed, and where its operands, its result and its gradient are."""

    operator: str
    seed: int
    operands: tuple[Operand, ...]
    kind: str = "float32"
    sizes: str = ""
    numbers: str = ""
    mesh: tuple[int, ...]
    to: Placed = ()  # the result is brought there; it stays where it is without one
    incoming: Placed = ()  # where the gradient that comes in is; everywhere without one
    gradients: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        """What differs from the plainest case, as JSON: what `--case` takes."""
        plain = {each.name: each.default for each in fields(self)}
        told = {name: value for name, value in asdict(self).items() if value != plain[name]}
        return json.dumps(told)


def draw(seed: int, number: int, size: int) -> Case:
    """One case for a number of ranks; each operator has one before any has two."""
    r = random.Random(f"placements {seed} {number}")
    turn, place = divmod(number, len(names()))
    mesh = r.choice([(size,), *([(2, size // 2)] if size > 2 and size % 2 == 0 else [])])

    def placed(*more: str, shards: int = 1) -> Placed:
        return tuple(r.choice(("R", *(r.choice(SHARDS) for _ in range(shards)), *more)) for _ in mesh)

    operator = _order(seed, turn)[place]
    operands = [
        Operand(placed(r.choice(PARTIAL), shards=2), r.choice(tuple(PLACES)) if r.random() < 0.2 else "")
        for _ in range(OPERANDS)
    ]
    if operator.startswith(CONVOLUTIONS):
        whole = [Operand(("R",) * len(mesh)) for _ in range(OPERANDS - 1)]
        operands = [
            Operand(tuple("S0" if name.startswith("S") else "R" for name in operands[0].placed)),
            *whole,
        ]
    return Case(
        operator=operator,
        seed=operators.hash_of(seed, number),
        operands=tuple(operands),
        kind=r.choice([kind for kind in ("float32", *KINDS, "bfloat16") if kind in _kinds()[operator]]),
        sizes=r.choice(SIZES),
        numbers=r.choice(NUMBERS),
        mesh=mesh,
        to=placed() if r.random() < 0.4 else (),
        incoming=placed("P sum") if r.random() < 0.5 else (),
        gradients=r.random() < 0.8,
        in_place=r.random() < 0.3 and _in_place(operator),
    )


def _in_place(operator: str) -> bool:
    """Whether an operator has a form in place that is drawn."""
    has_one = operators.table()[operator].inplace_variant is not None
    return has_one and not re.match(LOSES_IN_PLACE, operator)


@functools.cache
def _kinds() -> dict[str, set[str]]:
    """The types of each operator; float64 is that of float32's numbers."""
    found: dict[str, set[str]] = {}
    for name, kind in operators.rows():
        found.setdefault(name, set()).add(kind)
    return {name: kinds | {"float64"} for name, kinds in found.items() if "float32" in kinds}


@functools.cache
def names() -> tuple[str, ...]:
    """The operators."""
    return tuple(_kinds())


@functools.lru_cache(maxsize=8)
def _order(seed: int, turn: int) -> list[str]:
    return random.Random(f"placements {seed} turn {turn}").sample(names(), len(names()))


def call_of(case: Case) -> Call | None:
    """The call of whole tensors: leaves, and what is made of them; None if there is no sample, and why.

    In place, the operand that changes is one of the results, as is what it is a view of.
    """
    kind = "float32" if case.kind == "float64" else case.kind
    op, dtype, source = operators.table()[case.operator], getattr(torch, kind), random.Random(case.seed)
    samples = operators._samples(case.operator, dtype)
    if case.in_place:
        samples = [one for one in samples if not one.broadcasts_input]
    if not samples:
        generated_left.say(generated_left.CALL, "no sample can be judged")
        return None
    base = operators._call(op, dtype, source.choice(samples), case.seed)
    asked = operators.Case(case.operator, kind, case.sizes, case.numbers, case.seed)
    call = operators._varied(base, asked, source) or base
    views = [case.operands[n % len(case.operands)].view for n in range(len(call.tensors()))]
    tensors, changes = call.tensors(), case.in_place
    fit = [one.dim() >= PLACES[view].dims and one.numel() for view, one in zip(views, tensors, strict=True)]
    views = [view if fits else "" for view, fits in zip(views, fit, strict=True)]
    places, shapes = itertools.count(), [tuple(one.shape) for one in tensors]

    def leaf_of(leaf: Any) -> Any:
        return PLACES[views[next(places)]].make(leaf) if isinstance(leaf, torch.Tensor) else leaf

    function = op.inplace_variant if changes else call.function
    program = functools.partial(_program, function, views, shapes, changes=changes)
    return replace(call.mapped(leaf_of), function=program, gradients=case.gradients and call.gradients)


def _program(
    function: Callable[..., Any],
    views: list[str],
    shapes: list[Any],
    *args: Any,
    changes: bool,
    **kwargs: Any,
) -> Any:
    """Call a function with views of leaves. What it changes in place is a copy, and a result too."""
    places, changed = itertools.count(), list[Any]()

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        n = next(places)
        if n == 0 and changes:
            leaf = leaf.clone()
            changed.append(leaf)
        return PLACES[views[n]].take(leaf, shapes[n])

    args, kwargs = generated_trees.mapped((args, kwargs), taken)
    return function(*args, **kwargs), changed


class Meshes:
    """Meshes of groups of their own, made anew after a case in which ranks waited."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.serial = ranks, itertools.count()
        self.made: dict[tuple[int, ...], DeviceMesh] = {}

    def of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """The mesh of a shape. Another name keeps what torch remembers of an earlier one apart."""
        if shape not in self.made:
            every = torch.arange(self.ranks.size).view(shape)
            groups = [self._group(every.movedim(dim, -1)) for dim in range(every.dim())]
            names, kind = tuple(f"dim{next(self.serial)}" for _ in shape), self.ranks.device.type
            many = len(groups) > 1
            self.made[shape] = DeviceMesh.from_group(
                groups if many else groups[0], kind, every if many else None, mesh_dim_names=names
            )
        return self.made[shape]

    def _group(self, parts: torch.Tensor) -> Any:
        rows, limit = parts.reshape(-1, parts.shape[-1]).tolist(), dt.timedelta(seconds=scaled(WAIT_S))
        return dist.new_subgroups_by_enumeration(rows, timeout=limit)[0]

    def forget(self) -> None:
        """Make new groups from now on; on a GPU nobody waits in the old ones any more."""
        for mesh in self.made.values() if self.ranks.device.type == "cuda" else ():
            for group in mesh.get_all_groups():
                group.abort()
        self.made.clear()


def placement(name: str, one: torch.Tensor) -> Any:
    """A placement by its name, as a tensor can have it."""
    if name.startswith("S") and one.dim():
        dim = int(name[1:])
        return Shard(dim % one.dim() if dim >= 0 else -((-dim - 1) % one.dim()) - 1)
    number = one.is_floating_point() or (name != "P avg" and one.dtype is not torch.bool)
    return Partial(name[2:]) if name.startswith("P") and number and not one.is_complex() else Replicate()


def placed(one: torch.Tensor, mesh: DeviceMesh, names: Placed) -> DTensor:
    """A whole tensor in its placements; without communication, so each rank makes its own part."""
    wanted = [placement(name, one) for name in names] or [Replicate()] * mesh.ndim
    whole = [Replicate() if isinstance(each, Partial) else each for each in wanted]
    found = distribute_tensor(one.detach(), mesh, whole, src_data_rank=None)
    if whole == wanted:
        return found
    local = found.to_local()
    for dim, each in enumerate(wanted):
        if isinstance(each, Partial):
            local = _part(local, str(each.reduce_op), mesh.get_local_rank(dim), mesh.size(dim))
    return DTensor.from_local(local, mesh, wanted, run_check=False, shape=one.shape, stride=found.stride())


def _part(one: torch.Tensor, by: str, rank: int, size: int) -> torch.Tensor:
    """A part whose reduction gives the tensor to the bit, and that no other operation takes for it.

    What has no other parts is the same on all ranks: zeros, whose sign a sum may lose, and what is infinite.
    """
    if by in {"sum", "avg"}:
        factor = (2, -1, *[0] * size)[rank] * (size if by == "avg" else 1) if size > 1 else 1
        part, splits = one * factor, (one != 0) & one.isfinite()
        return torch.where(splits, part, one)
    other = one - one.abs() - 1 if by == "max" else one + one.abs() + 1
    mine = torch.arange(one.numel(), device=one.device).view(one.shape) % size == rank
    return torch.where(mine | ~one.isfinite(), one, other)


def words_of(call: Call) -> str:
    """Operands and options, as ranks compare them."""
    told = call.mapped(_told)
    return f"{told.args} {told.kwargs}"


def _told(leaf: Any) -> Any:
    """A leaf in few words that ranks may compare."""
    if isinstance(leaf, torch.Tensor):
        return gates.checksum(generated_trees.numbers(leaf)[0])
    return leaf if isinstance(leaf, str | int | float) else type(leaf).__name__


def is_known(case: Case) -> bool:
    """Whether somebody says what is right: not of what draws numbers, or has several right answers."""
    random = getattr(operators.table()[case.operator], "has_nondeterministic_output", False)
    # With other numbers the borders of these are not sorted.
    unsorted = case.operator in {"bucketize", "searchsorted"} and (case.sizes or case.numbers)
    return not (random or unsorted or case.operator.startswith(operators.NOT_A_FUNCTION))


def candidates(case: Case) -> Iterator[Case]:
    """Plainer cases, the plainest first."""
    flat = (case.mesh[0] * case.mesh[-1],) if case.mesh[1:] else case.mesh
    if flat != case.mesh:
        cut = [replace(one, placed=one.placed[:1]) for one in case.operands]
        yield replace(case, mesh=flat, operands=tuple(cut), to=case.to[:1], incoming=case.incoming[:1])
    plain: dict[str, Any] = {"gradients": False, "in_place": False, "to": (), "incoming": (), "sizes": "",
                             "numbers": "", "kind": "float32"}  # fmt: skip
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for n, one in enumerate(case.operands):
        others = [replace(one, view="")] if one.view else []
        others += [
            replace(one, placed=(*one.placed[:dim], "R", *one.placed[dim + 1 :]))
            for dim, name in enumerate(one.placed)
            if name != "R"
        ]
        for other in others:
            yield replace(case, operands=(*case.operands[:n], other, *case.operands[n + 1 :]))


def of_json(text: str, size: int) -> Case:
    """A case from what is printed of it, for a number of ranks. Raises `CaseError`."""
    flag, placed = one_of(False, True), listed(one_of(*NAMES))
    operand = named(Operand, {"placed": placed}, {"view": one_of(*PLACES)})
    needed = {"operator": one_of(*names()), "seed": whole(0, 2**31), "operands": listed(operand, 1)}
    needed["mesh"] = listed(whole(1), 1)
    more: dict[str, Check] = {"kind": one_of(*KINDS), "sizes": one_of(*SIZES), "numbers": one_of(*NUMBERS)}
    more |= {"to": placed, "incoming": placed, "gradients": flag, "in_place": flag}
    found: Case = parsed(text, named(Case, needed, more))
    if math.prod(found.mesh) != size:
        refuse("case.mesh", found.mesh, f"a mesh of {size} ranks")
    for one in (*(each.placed for each in found.operands), found.to, found.incoming):
        if one and len(one) != len(found.mesh):
            refuse("case", one, f"a placement for each of the mesh's {len(found.mesh)} dimensions")
    return found


def _has(case: Case, kind: str, *operands: int) -> bool:
    """Whether one of these operands, or of all, has a placement of a kind."""
    chosen = [case.operands[n] for n in operands] if operands else case.operands
    return any(name.startswith(kind) for one in chosen for name in one.placed)


def _sharded(placed: Placed) -> bool:
    return any(name.startswith("S") for name in placed)


def _without_a_batch(case: Case) -> bool:
    """Whether what is convolved has no batch, or not an example for each rank."""
    call, dims = call_of(case), int(re.findall(r"\d", case.operator)[0])
    x = call.tensors()[0] if call is not None else torch.ones(())
    return x.dim() < dims + 2 or len(x) < max(case.mesh)


ANY, UNITS = "", "units from float64"
LOSSES = (
    r"nn\.functional\.(mse|smooth_l1|huber|soft_margin|binary_cross_entropy|kl_div|poisson_nll|gaussian_nll|"
    r"multi|hinge|l1|nll|cross_entropy|cosine_emb|margin|triplet)"
)
# Faults of torch: the operators, what cases with them say, and which cases these are
# (docs/reference/trust.md).
KNOWN: dict[str, tuple[str, str, Callable[[Case], Any]]] = {
    "pytorch#186129: convolutions take operands as they lie": (
        CONVOLUTIONS, ANY, lambda case: _has(case, "S", 0) and _without_a_batch(case)),
    "pytorch#162692: the mean of a loss of uneven shards": (LOSSES, UNITS, lambda case: _has(case, "S")),
    "pytorch#166638: item() of a part": (
        r"(narrow|gradient|tensor_split)$", ANY, lambda case: _has(case, "P", 1, 2)),
    "threshold keeps a maximum": (r"nn\.functional\.threshold", UNITS, lambda case: _has(case, "P m", 0)),
    "a transform keeps a maximum": (r"fft\.|stft|istft", UNITS, lambda case: _has(case, "P m", 0)),
    "a smaller index is split as what it indexes": (
        r"gather|scatter|take_along_dim", UNITS, lambda case: _has(case, "S") or _sharded(case.incoming)),
    "the gradient of adaptive_avg_pool2d is split as its channels": (
        r"nn\.functional\.adaptive_avg_pool2d", UNITS,
        lambda case: case.gradients and (_has(case, "S", 0) or _sharded(case.incoming))),
    "a sum over no dimension that keeps them": (
        r"(masked\.)?(amax|amin|norm|max|min)|linalg\.(vector_|matrix_)?norm|(nan)?sum|mean|sum_to_size",
        UNITS,
        lambda case: _has(case, "S", 0)),
    "a view that is brought elsewhere is a copy": (
        "", UNITS, lambda case: case.in_place and case.operands[0].view and not _has(case, "R", 0)),
}  # fmt: skip


def known(case: Case, failure: str) -> str:
    """The known fault of torch that explains a failure, or nothing."""
    for name, (operators_of, words, holds) in KNOWN.items():
        if re.match(operators_of, case.operator) and re.search(words, failure) and holds(case):
            return name
    return ""
