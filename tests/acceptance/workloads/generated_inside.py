"""What runs inside a generated case: each kernel by itself, beside float64, with the operands that it got.

In: a context in which a case runs. Out: the kernel that is farthest from float64, as a share of its gate.

A case's last operators round away or multiply by zero what an earlier one did wrong, and its unit has the
roundings of all of them. A kernel has one or two of its own, so its gate is narrow.
"""

import collections
import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workloads import (
    arch,
    generated_doubts,
    generated_elsewhere,
    generated_judge,
    generated_known,
    generated_left,
    generated_trees,
)
from workloads.generated_judge import Call

# What healthy kernels need beyond half a gate, by benchmarks/generated_profile.py.
PROFILES = Path(__file__).with_name("generated_profiles")
GATES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
SERIES = ("special_", "igamma")  # what is worked out by series has more roundings
RECURRENCES = "_polynomial_"  # and what is worked out by recurrence has rough steps, which overflow
FACTOR = 4.0  # by so much a kernel may leave its profile or a series the gate of its type
TRANSFERS = 2.0  # and by so much more what others need, where nobody measured (docs/reference/trust.md)
GROWS = 4  # numbers for each unit of a kernel whose error grows with them, as it adds them one by one
MOST_CALLS = 16  # of one kernel and type in one program: a loop of thousands would take minutes
MOST_ELEMENTS = 2**20  # of a kernel's operands and results: float64 has six times as many
# What gives memory as it is, or has several right answers.
NO_RESULT = (
    "empty", "new_empty", "resize", "set", "_reshape_alias", "_linalg_svd", "_linalg_eigh", "linalg_eig",
    "_linalg_eigvals", "linalg_qr", "geqrf", "linalg_l", "_linalg_s", "linalg_householder_product", "ormqr",
)  # fmt: skip
# What excuses a kernel: what was measured on healthy ones, a doubt, a known fault; and a gradient: a place.
PROFILE, DOUBTED, KNOWN, CHOSEN = "its profile", "a doubt excuses", "a known fault is passed over", "a place"
INTEGERS = (torch.int32, torch.int64)
# What kernels call the numbers that they write to places.
WRITTEN = {"source", "src", "values", "value"}
# Beside its first result it gives what it worked with, or one of several right places of equal numbers.
GIVES_WORK = (
    "sort", "_embedding_bag", "_embedding_bag_forward_only", "_linalg_det", "_linalg_slogdet",
    "_linalg_solve", "nll_loss2d_forward",
)  # fmt: skip


class JudgeError(Exception):
    """A judge broke, which would pass all that is wrong with a kernel."""


class Inside(TorchDispatchMode):  # type: ignore[misc]
    """Judges each kernel that runs in this context: `found` has the most units by kernel and type."""

    def __init__(self, looser: float = 1.0) -> None:
        """Nothing has run yet; `looser` is by how much a kernel may leave its gate."""
        super().__init__()
        self.looser = looser
        self.found: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.is_open = False  # a kernel has several right results, or one that is excused
        self.marks: set[str] = set()  # what excused one
        self.has_chosen = False  # a device chose another place among equal numbers, where a gradient goes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the kernel, then ask float64 with the operands that it got."""
        kwargs = kwargs or {}
        call = _call(func, args, kwargs)
        if call and call.on is not None:
            generated_known.require_harmless(func, call, args)
        out = generated_trees.run(func, args, kwargs)
        if call:
            key = f"{name_of(func)} {str(call.dtype).removeprefix('torch.')}"
            self.calls[key] += 1
            if call.on is not None and _writes_twice(func, call):
                self.is_open = True
                generated_left.say("place", "it writes to one place twice")
                return out
            units = None
            if self.calls[key] <= MOST_CALLS:
                units = self._units(func, call, out, key)
            else:
                generated_left.say("loop", "beyond the first ones of its kernel")
            if units is not None and units >= self.found.get(key, 0.0):
                self.found[key], self.counts[key] = units, _added(name_of(func), call, out)
        return out

    def _units(self, func: Any, call: Call, out: Any, key: str) -> float | None:
        try:
            units, excused = _units(func, call, out, key)
        except generated_left.RefusedError as error:
            generated_left.say("kernel", f"float64 refuses it by a {type(error.__cause__).__name__}")
            return None
        except Exception as error:
            raise JudgeError(f"judging {key} ends in {type(error).__name__}: {error}") from error
        words = "neither float64 nor its profile say what is right"
        generated_left.say("kernel", words if units is None else generated_left.JUDGED)
        self.has_chosen |= excused == CHOSEN
        self.is_open |= excused not in {"", CHOSEN}
        self.marks |= {excused} & {DOUBTED, KNOWN}
        return units

    @property
    def worst(self) -> tuple[float, str] | None:
        """The worst kernel's share of its gate, and words."""
        shares = {key: units / (self.looser * gate(key)) for key, units in self.found.items()}
        if not shares:
            return None
        key = max(shares, key=shares.__getitem__)
        units, bound = self.found[key], self.looser * gate(key)
        return shares[key], f"its kernel {key} is {units:.3g} units from float64, {bound:.3g} allowed"


def name_of(func: Any) -> str:
    """A kernel without its overload, unless that cuts decimals off, and without the mark of one in place."""
    name = str(func._schema.name).removeprefix("aten::").rstrip("_")
    return f"{name}.mode" if "_mode" in func._schema.overload_name else name


@functools.cache
def _has_one_answer(func: Any) -> bool:
    views = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not views and not draws and not name_of(func).startswith(NO_RESULT)


def _call(func: Any, args: Any, kwargs: Any) -> Call | None:
    """The kernel as a call that float64 can repeat; `None` if there is nothing to judge.

    A kernel that works element by element turns tensors of integers into its own type before anything else.
    """
    if not _has_one_answer(func):
        return None
    floats = (one for one in generated_trees.leaves((args, kwargs)) if generated_trees.is_tensor(one))
    dtype = next((one.dtype for one in floats if one.is_floating_point() and one.numel()), None)
    if dtype not in generated_judge.FLOATS:
        return None
    is_pointwise = _is_pointwise(name_of(func))
    if is_pointwise and any(_is_beyond(dtype, one) for one in generated_trees.leaves((args, kwargs))):
        return None
    place = generated_elsewhere.place()
    call = Call(func, tuple(args), kwargs, dtype)
    if place is not None and any(one.device == place for one in call.tensors()):
        call = replace(call.mapped(generated_elsewhere.brought_back), on=place)
    if func._schema.is_mutable:
        kept = functools.partial(generated_trees.kept, func)
        call = replace(call, function=kept).mapped(generated_trees.copied)
    return call.mapped(functools.partial(_rounded, dtype)) if is_pointwise else call


def _is_beyond(dtype: torch.dtype, leaf: Any) -> bool:
    """Whether this is one integer for which a type has infinity alone: some kernels take it as it is."""
    whole = generated_trees.is_tensor(leaf) and leaf.dtype in INTEGERS
    return whole and leaf.numel() == 1 and abs(leaf.item()) > torch.finfo(dtype).max


def _rounded(dtype: torch.dtype, leaf: Any) -> Any:
    if generated_trees.is_tensor(leaf) and leaf.dim() and leaf.dtype in INTEGERS:
        return leaf.to(dtype)
    return leaf


def _as_its_type(dtype: torch.dtype, leaf: Any) -> Any:
    """A number that a tensor is compared with is rounded to the tensor's type first."""
    return torch.tensor(leaf, dtype=dtype).item() if isinstance(leaf, float) else leaf


@functools.cache
def _is_pointwise(name: str) -> bool:
    """Whether a kernel works element by element: itself, or what it is the gradient of."""
    packet = getattr(torch.ops.aten, name.removesuffix("_backward").removesuffix(".mode"), None)
    overloads = [getattr(packet, one) for one in getattr(packet, "overloads", list)()]
    return any(torch.Tag.pointwise in one.tags for one in overloads)


def _added(name: str, call: Call, out: Any) -> int:
    """How many numbers a kernel may add into one; on a device also, over how many it may spread one."""
    results = generated_trees.numbers(out) if call.on is not None else []
    return 0 if _is_pointwise(name) else max(one.numel() for one in (*call.tensors(), *results))


def _writes_twice(func: Any, call: Call) -> bool:
    """Whether a kernel writes numbers to places of which two are one, and does not add them or the like.

    The processor leaves the last one there, and a device any of them.
    """
    given = generated_known.arguments(func, call)
    several = any(
        generated_trees.is_tensor(given[one]) and given[one].numel() > 1 for one in WRITTEN & given.keys()
    )
    if not several or given.get("accumulate") or "reduce" in given or "_add" in name_of(func):
        return False
    indices = generated_trees.leaves([given.get("index"), given.get("indices")])
    places = [one for one in indices if isinstance(one, torch.Tensor) and one.dtype is not torch.bool]
    if not places:
        return False
    dim = given.get("dim")
    if dim is None or places[0].dim() < 2:
        rows = torch.stack([one.flatten() for one in torch.broadcast_tensors(*places)], 1)
        return len(rows.unique(dim=0)) < len(rows)
    return bool((places[0].sort(dim).values.diff(dim=dim) == 0).any())


def _leaves_its_type(call: Call) -> bool:
    """Whether an operand is infinite, or its square is: then sums differ by what they add first."""
    given = [one for one in call.tensors() if one.is_floating_point() and one.numel()]
    most = max(float(one.abs().nan_to_num(0, torch.inf).max()) for one in given)
    return most > math.sqrt(torch.finfo(call.dtype).max)


def _known(
    func: Any, call: Call, got: list[torch.Tensor], reference: generated_judge.Reference
) -> tuple[list[torch.Tensor], str]:
    """What is judged, and what excuses the rest: a known fault, or another place among equal numbers."""
    chosen = False
    if call.on is not None:
        got = _alike(got, reference)
        chosen = any(generated_judge.are_places(*pair) for pair in zip(got, reference.right, strict=False))
    got, passed = generated_known.passed_over(func, call, got, reference.right)
    return got, KNOWN if passed else CHOSEN if chosen else ""


def _alike(got: list[torch.Tensor], reference: generated_judge.Reference) -> list[torch.Tensor]:
    """What a device's kernel gives until it is what a device alone works with, which has other shapes."""
    pairs = zip(got, reference.right, strict=False)
    same = itertools.takewhile(lambda pair: pair[0].shape == pair[1].shape, pairs)
    return [one for one, _ in same] or got[:1]


def _units(func: Any, call: Call, out: Any, key: str) -> tuple[float | None, str]:
    """How far a kernel's result is from float64, and what excuses more than that.

    `None` if float64 does not take its operands.
    """
    known, got = profile(), generated_trees.numbers(out)
    if key in known["unknown"] or sum(one.numel() for one in (*call.tensors(), *got)) > MOST_ELEMENTS:
        return None, PROFILE if key in known["unknown"] else ""
    got = [one.cpu() for one in got]
    name, enough = key.split(maxsplit=1)[0], needed(key)
    is_pointwise = _is_pointwise(name)
    if not generated_known.is_at_its_places(func, call, got):
        return math.inf, ""
    if all(one.dtype is torch.bool for one in got):
        call = call.mapped(functools.partial(_as_its_type, call.dtype))
    call = replace(
        call,
        noisy=RECURRENCES in key or key in known["noisy"],
        overflows=RECURRENCES in key
        or key in known["overflows"]
        or (not is_pointwise and _leaves_its_type(call)),
        passes_over_nan=is_pointwise and name.endswith("_backward"),
    )
    reference = generated_judge.Reference(call)
    got, excused = _known(func, call, got, reference)
    if name in GIVES_WORK:
        got = got[:1]
    units = generated_judge.distance(call, got, reference, enough)
    if units is not None and enough < units < torch.inf:
        reference.ask_again()
        units = generated_judge.distance(call, got, reference, enough)
    if units is None or units <= enough:
        return units, excused
    if name in known["grows"] and units <= _added(name, call, out) / GROWS:
        return enough, PROFILE
    try:
        units = generated_doubts.of_kernel(call, got, reference, units, alone=is_pointwise)
        units = generated_doubts.by_twin(call, got, reference, units, enough) or 0.0
    except generated_left.REFUSED:
        return units, ""
    return (enough, DOUBTED) if units <= enough else (units, "")


def needed(key: str) -> float:
    """The units that a healthy kernel needs, by its name and type."""
    return float(profile()["units"].get(key, _gate(key) / 2))


def gate(key: str) -> float:
    """The units that a kernel may have, by its name and type."""
    measured = max(_gate(key), FACTOR * float(profile()["units"].get(key, 0)))
    return measured if path().exists() else TRANSFERS * measured


def _gate(key: str) -> float:
    return GATES[key.split()[1]] * (FACTOR if key.startswith(SERIES) else 1)


LISTS = ("broken", "grows", "noisy", "operators", "overflows", "unknown")
PROCESSOR = "cpu"


def path() -> Path:
    """The file of this architecture: `cpu.json`, `sm_90.json`."""
    return PROFILES / f"{arch.name()}.json"


@functools.cache
def profile() -> dict[str, Any]:
    """What was measured on this architecture; where nobody measured, all that others need.

    By kernel and type: `units`, and `unknown` if nothing helps. Also `noisy` if its rounding is rougher than
    its inputs', `overflows` if inner values leave the type. By kernel: `grows` if its error grows with the
    number of its operands' elements. `operators`: their results are far from float64; `broken`: they break
    loudly, which a processor says of no device.
    """
    files = [path()] if path().exists() else sorted(PROFILES.glob("*.json"))
    known: dict[str, Any] = {"units": {}, **{name: [] for name in LISTS}}
    for file in files:
        measured = json.loads(file.read_text(encoding="utf-8"))
        if PROCESSOR in {file.stem} ^ {path().stem}:
            measured["broken"] = []
        for key, units in measured.get("units", {}).items():
            known["units"][key] = max(units, known["units"].get(key, 0))
        for name in LISTS:
            known[name] = sorted({*known[name], *measured.get(name, ())})
    if not path().exists():  # what loses all in float32 loses as much in fewer bits
        names = [key.split()[0] for key in known["unknown"] if key.endswith(" float32")]
        known["unknown"] = sorted({*known["unknown"], *(f"{a} {b}" for a in names for b in GATES)})
    return known
