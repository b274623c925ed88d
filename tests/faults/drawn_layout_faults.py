"""Faults of training layouts that nobody chose: place, condition, part and effect, drawn from a seed.

In: seeds and numbers of faults and cases. Out: one JSON line {"healthy": failing cases, "faults": {fault:
{"hits", "case": family, seed and number of the first that fails, or null, "says"}}}.

A program of two gloo ranks. A fault wraps functions of torch, and knows what the layout was asked for, but
nothing of what judges. It strikes on every rank.
"""

# ruff: noqa: E501 - a table of faults reads in rows

import argparse
import contextlib
import functools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as pipelines
from torch.distributed.tensor.placement_types import Partial
from torch.nn.parallel import DistributedDataParallel

from workloads import generated_layout_cases as cases
from workloads import generated_layouts as generated
from workloads import layout_jobs, layout_options, layout_pipelines
from workloads.collective_groups import Watch, watched
from workloads.ranks import joined

CONDITIONS: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {
    "": {"always": lambda _: True, "after the first step": lambda asked: asked["steps"] > 0},
    "ddp": {"views of buckets": lambda asked: asked["gradient_as_bucket_view"],
            "a static graph": lambda asked: asked["static_graph"],
            "unused parameters": lambda asked: asked["find_unused_parameters"],
            "small buckets": lambda asked: asked["bucket_cap_mb"] < 1},
    "fsdp1": {"flat parameters": lambda asked: not asked["use_orig_params"],
              "a strategy of its own": lambda asked: asked["sharding_strategy"].name != "FULL_SHARD",
              "no prefetch": lambda asked: asked["backward_prefetch"] is None,
              "bfloat16": lambda asked: asked["mixed_precision"].param_dtype},
    "fsdp2": {"weights kept after forward": lambda asked: not asked["reshard_after_forward"],
              "replicas": lambda asked: asked["mesh"].ndim > 1,
              "bfloat16": lambda asked: asked["mp_policy"].param_dtype},
    "pipeline": {"several stages": lambda asked: asked["stages"] > 1,
                 "backward in two": lambda asked: asked["schedule"] in layout_options.SPLIT,
                 "the sum of all": lambda asked: asked["loss"] == "sum"},
}  # fmt: skip
MARKS = {"ddp": "static_graph", "fsdp1": "sharding_strategy", "fsdp2": "mp_policy"}  # what tells each
PARTS: dict[str, Callable[[int, torch.Tensor, int], bool]] = {
    "each": lambda *_: True,
    "the first": lambda n, *_: n == 0,
    "the last": lambda n, _, count: n == count - 1,
    "those of one dimension": lambda _, one, __: one.ndim == 1,
    "matrices": lambda _, one, __: one.ndim == 2,
    "those of few elements": lambda _, one, __: one.numel() < 100,
    "those of an odd size": lambda _, one, __: one.numel() % 2 == 1,
}
COUNTS = {"layouts": 42, "checkpoints": 15}  # cases of a seed
FEW = 8  # cases after which a fault that never struck is given up
PIPELINES = ("pipeline", "fsdp2+pipeline")
BUFFERS = ("each", "the first", "those of few elements", "those of an odd size")


def scaled(factor: float) -> Callable[[torch.Tensor, torch.Tensor], object]:
    return lambda out, _: out.mul_(factor)


EFFECTS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "not reduced": lambda out, own: out.copy_(own),
    "reduced twice": scaled(2),
    "divided twice": scaled(0.5),
    "a hundredth too large": scaled(1.01),
    "rounded to bfloat16": lambda out, _: out.copy_(out.bfloat16()),
    "without its last element": lambda out, own: out.view(-1)[-1:].copy_(own.reshape(-1)[-1:]),
    "zero": lambda out, _: out.zero_(),
    "as it was": lambda out, own: out.copy_(own),
    "without its last row": lambda out, _: out[-1:].zero_() if out.ndim else None,
}
REDUCED = tuple(EFFECTS)[:6]
LEFT = ("zero", "as it was", "a hundredth too large", "without its last row")
# Where a fault is: the layouts that go through it, the parts that it may strike, and its effects.
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    **{f"{one}: a sum": ((one,), BUFFERS, REDUCED) for one in MARKS},
    "tensor: a sum": (("tensor", "fsdp2+tensor"), ("each", *BUFFERS[2:]), REDUCED),
    **{f"{one}: a gradient": ((one,), tuple(PARTS), LEFT) for one in MARKS},
    **{f"{one}: no_sync": ((one,), ("each",), ("never ends", "keeps nothing")) for one in MARKS},
    "ddp: buffers": (("ddp",), ("each",), ("not sent",)),
    "ddp: ZeRO": (("ddp",), ("each",), ("not sent",)),
    "fsdp2: what the host has": (
        ("fsdp2", "fsdp2+tensor"),
        tuple(PARTS)[:2],
        ("as it was", "zero", "without its last row"),
    ),
    "fsdp2: a factor": (("fsdp2",), ("each",), ("not sent",)),
    "pipeline: a pass": (
        PIPELINES,
        ("each", "the first", "the last"),
        ("zero", "reduced twice", "a hundredth too large"),
    ),
    "pipeline: a scale": (PIPELINES, ("each",), ("not sent", "divided twice")),
    "pipeline: a loss": (
        PIPELINES,
        ("each", "the first", "the last"),
        ("reduced twice", "a hundredth too large"),
    ),
    "pipeline: what comes back": (
        PIPELINES,
        ("each", "the first", "the last"),
        ("as it was", "zero", "rounded to bfloat16"),
    ),
    "any: a norm": ((), ("each",), ("not clipped", "clipped twice", "the last one is not clipped")),
    "any: AdamW": ((), ("each",), ("the last one stays", "its count stays")),
    "load: a tensor": ((), tuple(PARTS)[3:], ("as it was", "without its last row", "rounded to bfloat16")),
    "load: bytes": ((), ("each",), ("as it was",)),
    "load: AdamW": ((), ("each",), ("forgotten",)),
    "load: objects": ((), ("each",), ("replaced",)),
    "save: a tensor": ((), tuple(PARTS)[3:], ("rounded to bfloat16", "zero")),
}


@dataclass(frozen=True)
class Fault:
    """Where it is, when it strikes, what of it, and how."""

    place: str
    condition: str
    part: str
    effect: str

    def __str__(self) -> str:
        return f"{self.place}, {self.condition}, {self.part}: {self.effect}"


# Known shapes, each with a case that finds it: family, seed and number.
NAMED = {
    Fault("ddp: no_sync", "a static graph", "each", "never ends"): ("layouts", 7, 21),
    Fault("ddp: buffers", "always", "each", "not sent"): ("layouts", 0, 35),
    Fault("ddp: a sum", "always", "each", "not reduced"): ("layouts", 0, 0),
    Fault("fsdp1: a sum", "flat parameters", "each", "rounded to bfloat16"): ("layouts", 0, 1),
    Fault("fsdp2: no_sync", "bfloat16", "each", "keeps nothing"): ("layouts", 1, 37),
    Fault("fsdp2: what the host has", "always", "each", "as it was"): ("layouts", 0, 4),
    Fault("fsdp2: a factor", "always", "each", "not sent"): ("checkpoints", 1, 11),
    Fault("tensor: a sum", "always", "each", "rounded to bfloat16"): ("layouts", 0, 3),
    Fault("pipeline: a pass", "backward in two", "the last", "zero"): ("layouts", 0, 5),
    Fault("pipeline: a pass", "several stages", "the first", "reduced twice"): ("layouts", 0, 5),
    Fault("pipeline: a scale", "always", "each", "not sent"): ("layouts", 0, 26),
    Fault("pipeline: a loss", "the sum of all", "the last", "a hundredth too large"): ("layouts", 0, 5),
    Fault("pipeline: what comes back", "always", "the last", "as it was"): ("layouts", 0, 5),
    Fault("load: objects", "always", "each", "replaced"): ("checkpoints", 0, 0),
    Fault("load: bytes", "always", "each", "as it was"): ("checkpoints", 0, 0),
}


def draw(count: int, seed: int) -> list[Fault]:
    """Faults of one seed, no two alike."""
    r, found = random.Random(f"faults {seed}"), dict[Fault, None]()
    while len(found) < count:
        place = r.choice(tuple(PLACES))
        _, parts, effects = PLACES[place]
        kinds = {**CONDITIONS[""], **CONDITIONS.get(place.split(":")[0], {})}
        found[Fault(place, r.choice(tuple(kinds)), r.choice(parts), r.choice(effects))] = None
    return list(found)


class Planted:
    """A fault in place of functions of torch."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.hits, self.calls = fault, 0, 0
        self.layout, _, self.what = fault.place.partition(": ")
        self.effect, self.harm = fault.effect, EFFECTS.get(fault.effect)
        self.asked: dict[str, Any] = {"steps": 0}
        self.model: Any = None
        self.kept = dict[Any, Any]()

    def strikes(self) -> bool:
        """Whether the condition holds for the layout that was made last."""
        try:
            kinds = {**CONDITIONS[""], **CONDITIONS.get(self.layout, {})}
            holds = bool(kinds[self.fault.condition](self.asked))
        except KeyError:  # another layout than the condition's
            return False
        self.hits += holds
        return holds

    def damages(self, out: torch.Tensor, own: torch.Tensor, number: int = 1, count: int = 0) -> None:
        """Do the harm to a tensor of the right part and layout."""
        right = MARKS.get(self.layout, "steps") in self.asked and PARTS[self.fault.part](number, out, count)
        if right and self.harm and out.is_floating_point() and self.strikes():
            self.harm(out, own)

    def sums(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Do the harm to the next sum of a step."""
        self.damages(out, own, self.calls)
        self.calls += 1

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        wraps = WRAPS.get(self.fault.place) or WRAPS[self.what]
        with contextlib.ExitStack() as stack:
            for owner, name, function in (*WATCHES, *wraps):
                if original := getattr(owner, name, None):
                    stack.enter_context(mock.patch.object(owner, name, self._in_place(function, original)))
            yield

    def _in_place(self, function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # whose signature says what this release knows
        def call(*a: Any, **k: Any) -> Any:
            return function(self, original, *a, **k)

        return call


def made(planted: Planted, original: Any, model: Any, *a: Any, **k: Any) -> Any:
    """A layout begins: what it was asked for."""
    found = original(model, *a, **k)
    planted.asked, planted.model, planted.calls, planted.kept = {"steps": 0, **k}, model, 0, {}
    return found


def stepped(planted: Planted, original: Any, *a: Any, **k: Any) -> Any:
    found = original(*a, **k)
    planted.asked["steps"] += 1
    planted.calls = 0
    return found


def skipped(planted: Planted, original: Any, *a: Any, **k: Any) -> Any:
    return None if planted.strikes() else original(*a, **k)


def reduced(planted: Planted, original: Any, out: torch.Tensor, *a: Any, **k: Any) -> Any:
    given = a[0] if a and isinstance(a[0], torch.Tensor) else out
    size, rank = dist.get_world_size(k.get("group")), dist.get_rank(k.get("group"))
    own = given.flatten().chunk(given.numel() // out.numel())[0 if given is out else rank].clone()
    if work := original(out, *a, **k):
        work.wait()
    planted.sums(out, own.view_as(out) / (size if "AVG" in str(a[1:]) + str(k) else 1))
    return work


def partial(planted: Planted, original: Any, kind: Any, tensor: torch.Tensor, *a: Any) -> Any:
    work = original(kind, tensor, *a)
    out = work.wait() if hasattr(work, "wait") else work
    planted.sums(out, tensor)
    return out


def hooked(planted: Planted, original: Any, model: Any, *a: Any, **k: Any) -> None:
    """DDP sums by a hook of ours: its own sum is out of reach."""

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole, own = bucket.buffer(), bucket.buffer().clone()

        def then(_: Any) -> torch.Tensor:
            planted.sums(whole.div_(dist.get_world_size()), own)
            return whole

        return dist.all_reduce(whole, async_op=True).get_future().then(then)

    original(model, *a, **k)
    model.register_comm_hook(None, hook)
    model.register_comm_hook = lambda *_: None


def backward(planted: Planted, original: Any, *a: Any, **k: Any) -> None:
    original(*a, **k)
    some = [one for one in planted.model.parameters() if one.grad is not None] if planted.model else []
    for number, one in enumerate(some):
        grad = getattr(one.grad, "_local_tensor", one.grad)
        old, planted.kept[number] = planted.kept.get(number), grad.clone()
        planted.damages(grad, old if old is not None else torch.zeros_like(grad), number, len(some))


@contextlib.contextmanager
def no_sync(planted: Planted, original: Any, model: Any) -> Iterator[None]:
    with original(model):
        yield
    if planted.strikes():
        ends = planted.effect == "never ends"
        if ends and planted.layout == "ddp":
            model.require_backward_grad_sync = False
        for one in model.parameters() if not ends or planted.layout == "fsdp1" else ():
            one.grad = None if one.grad is None else torch.zeros_like(one.grad)


def setting(planted: Planted, original: Any, model: Any, sync: bool) -> None:
    original(model, sync and not (planted.effect == "never ends" and planted.strikes()))


def forgets(planted: Planted, original: Any, param: Any) -> None:
    if planted.effect == "never ends" or not planted.strikes():
        original(param)


def at_host(planted: Planted, original: Any, group: Any) -> None:
    """What a step leaves of gradients that are on the host; as it was: what it was after the pass before."""
    original(group)
    for number, param in enumerate(group.fsdp_params):
        if param.offload_to_cpu and param.sharded_param.grad is not None:
            grad = param.sharded_param.grad._local_tensor
            old = planted.kept.get(id(param), grad)
            planted.kept[id(param)] = grad.clone()
            planted.damages(grad, old, number, len(group.fsdp_params))


def piped(planted: Planted, original: Any, job: Any, layout: Any) -> None:
    """A pipeline begins. It also is a layout of FSDP2, which asked for other things before."""
    original(job, layout)
    planted.asked, planted.calls, planted.kept = {"steps": 0, **layout.options}, 0, {}


def of_pass(planted: Planted, number: int, stage: Any) -> bool:
    """Whether the fault strikes this pass of a stage."""
    right = PARTS[planted.fault.part](number, torch.zeros(()), stage.chunks)
    return right and "schedule" in planted.asked and planted.strikes()


def passed(planted: Planted, original: Any, stage: Any, number: int, *a: Any, **k: Any) -> None:
    """What a pass adds to the gradients of a stage."""
    weights = list(stage.submod.parameters())
    before = [None if one.grad is None else one.grad.clone() for one in weights]
    original(stage, number, *a, **k)
    if of_pass(planted, number, stage):
        for one, old in zip(weights, before, strict=True):
            if one.grad is not None:
                added = one.grad.clone() if old is None else one.grad - old
                assert planted.harm is not None
                planted.harm(added, added)
                one.grad.copy_(added if old is None else old + added)


def shared(planted: Planted, original: Any, stage: Any, factor: int) -> None:
    strikes = "schedule" in planted.asked and factor > 1 and planted.strikes()
    for _ in range(1 if not strikes else 0 if planted.effect == "not sent" else 2):
        original(stage, factor)


def lost(planted: Planted, original: Any, schedule: Any, *a: Any, **k: Any) -> Any:
    loss, planted.calls = original(schedule, *a, **k), planted.calls + 1
    right = PARTS[planted.fault.part](planted.calls - 1, loss, schedule._n_microbatches)
    if right and "schedule" in planted.asked and planted.strikes():
        return loss * {"reduced twice": 2.0}.get(planted.effect, 1.01)
    return loss


def come_back(planted: Planted, original: Any, stage: Any, number: int) -> Any:
    """The gradient that a stage got of the next; as it was: that of the pass before."""
    found = original(stage, number)
    old = planted.kept.get(stage.stage_index, found)
    planted.kept[stage.stage_index] = tuple(None if one is None else one.clone() for one in found)
    if of_pass(planted, number, stage):
        for one, was in zip(found, old, strict=True):
            if one is not None and planted.harm is not None:
                planted.harm(one, was)
    return found


def clip(planted: Planted, original: Any, first: Any, most: float) -> Any:
    every = list(first.parameters() if isinstance(first, nn.Module) else first)
    some = [(one.grad, one.grad.clone()) for one in every if one.grad is not None]
    norm = original(first if isinstance(first, nn.Module) else every, most)
    if planted.strikes():
        for grad, old in some[-1:] if planted.effect == "the last one is not clipped" else some:
            grad.mul_(float(most / norm)) if planted.effect == "clipped twice" else grad.copy_(old)
    return norm


def adamw(planted: Planted, original: Any, optimizer: Any, *a: Any, **k: Any) -> Any:
    some = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    old = some[-1].detach().clone() if some else None
    found = original(optimizer, *a, **k)
    if some and planted.strikes():
        for one in some if planted.effect == "its count stays" else ():
            optimizer.state[one]["step"].fill_(1)
        if planted.effect == "the last one stays":
            some[-1].data.copy_(old)
    return found


def loaded_adamw(planted: Planted, original: Any, model: Any, optimizer: Any, **k: Any) -> Any:
    found = original(model, optimizer, **k)
    for known in optimizer.state.values() if planted.strikes() else ():
        known["exp_avg"].zero_()
    return found


def resolved(planted: Planted, original: Any, planner: Any, item: Any) -> Any:
    """A tensor on its way into a checkpoint, or the place for one on its way out."""
    found = original(planner, item)
    if planted.layout == "save" and isinstance(found, torch.Tensor):
        found = found.clone()
        planted.damages(found, found)
    elif planted.layout == "load":
        planted.kept[item.dest_index, item.dest_offsets] = found.detach().clone()
    return found


def committed(planted: Planted, original: Any, planner: Any, item: Any, tensor: torch.Tensor) -> None:
    original(planner, item, tensor)
    planted.damages(tensor.detach(), planted.kept[item.dest_index, item.dest_offsets])


def replaced(planted: Planted, original: Any, state: Any, **k: Any) -> None:
    original(state, **k)
    if planted.strikes():
        state.update(job=state["job"].state_dict())


Fsdp1, Param = FullyShardedDataParallel, _fsdp_param.FSDPParam
Loading, Saving = default_planner.DefaultLoadPlanner, default_planner.DefaultSavePlanner
WATCHES = (
    *((one, "__init__", made) for one in (DistributedDataParallel, Fsdp1)),
    *((layout_jobs, name, made) for name in ("fully_shard", "parallelize_module")),
    *((one, "step", stepped) for one in (layout_jobs.Job, layout_pipelines.Pipelined)),
    (layout_pipelines.Pipelined, "_spread", piped),
)
Stage = pipelines._PipelineStageBase
SUMS = tuple(
    (dist, name, reduced) for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
)
WRAPS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "a sum": SUMS,
    "ddp: a sum": ((DistributedDataParallel, "__init__", hooked),),
    "tensor: a sum": ((Partial, "_reduce_value", partial),),
    "a gradient": ((torch.Tensor, "backward", backward),),
    "no_sync": tuple((one, "no_sync", no_sync) for one in (DistributedDataParallel, Fsdp1)),
    "fsdp2: no_sync": ((FSDPModule, "set_requires_gradient_sync", setting), (Param, "accumulate_unsharded_grad_if_needed", forgets)),
    "buffers": ((DistributedDataParallel, "_sync_buffers", skipped),),
    "ZeRO": ((ZeroRedundancyOptimizer, "_sync_params", skipped),),
    "a norm": ((torch.nn.utils, "clip_grad_norm_", clip), (Fsdp1, "clip_grad_norm_", clip)),
    "a pass": ((Stage, "backward_one_chunk", passed), (Stage, "backward_weight_one_chunk", passed)),
    "what the host has": ((_fsdp_param_group.FSDPParamGroup, "finalize_backward", at_host),),
    "a factor": ((FSDPModule, "set_gradient_divide_factor", skipped),),
    "a scale": ((Stage, "scale_grads", shared),),
    "a loss": ((schedules._PipelineSchedule, "_compute_loss", lost),),
    "what comes back": ((Stage, "_retrieve_recv_grads", come_back),),
    "AdamW": ((torch.optim.AdamW, "step", adamw),),
    "load: AdamW": ((layout_jobs, "set_state_dict", loaded_adamw),),
    "save: a tensor": ((Saving, "resolve_data", resolved),),
    "load: a tensor": ((Loading, "resolve_tensor", resolved), (Loading, "commit_tensor", committed)),
    "bytes": ((Loading, "load_bytes", skipped),),
    "objects": ((generated.dcp, "load", replaced),),
}  # fmt: skip


NEEDS: dict[str, Callable[[Any, Any], Any]] = {
    "no_sync": lambda case, one: one["sync"] in {"last", "later"}
    and case.chunks > layout_options.groups_of(one, 2),
    "buffers": lambda case, one: case["buffers"] == "means" and one["forward_sync_buffers"],
    "ZeRO": lambda _, one: one["zero"],
    "what the host has": lambda case, one: one["offload"] and case.kind == "float32",
    "a factor": lambda _, one: one["divided"] == "by caller" and one["force_sum"],
    "a norm": lambda case, _: case.clip,
    "unused parameters": lambda _, one: one["find_unused_parameters"],
    "views of buckets": lambda _, one: one["gradient_as_bucket_view"],
    "a static graph": lambda _, one: one["static_graph"],
    "small buckets": lambda _, one: one["bucket_cap_mb"] < 1,
    "flat parameters": lambda _, one: not one["use_orig_params"],
    "replicas": lambda _, one: one["replicas"],
    "bfloat16": lambda case, _: case.kind == "bfloat16",
    "a scale": lambda case, one: one["loss"] == "mean" and case.chunks > layout_options.groups_of(one, 2),
    "what comes back": lambda case, one: (one["inner"] or 2) > 1 and case.chunks > layout_options.groups_of(one, 2),
    "several stages": lambda _, one: one["stages"] > 1,
    "backward in two": lambda _, one: one["schedule"] in layout_options.SPLIT,
    "the sum of all": lambda _, one: one["loss"] == "sum",
}  # fmt: skip


def crossing(fault: Fault, case: Any) -> bool:
    """Whether a case goes through what the fault strikes."""
    where, _, what = fault.place.partition(": ")
    if where in {"load", "save"} and len(case.layouts) == 1:
        return False
    needs = [NEEDS[name] for name in (what, fault.condition) if name in NEEDS]
    some = [one for one in case.layouts if one.parallel in (PLACES[fault.place][0] or cases.PARALLEL)]
    return any(all(need(case, one) for need in needs) for one in some)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--fault-seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--find", action="store_true", help="the first case of each known shape that finds it"
    )
    options = parser.parse_args()
    report: dict[str, Any] = {"healthy": [], "faults": {}, "hung": {}}
    with joined() as ranks, contextlib.ExitStack() as stack:
        watch = Watch(time.monotonic() + 60, report["hung"])
        stack.enter_context(watched(ranks, watch, report))
        if ranks.rank == 0:
            ranks.store.set("folder", stack.enter_context(tempfile.TemporaryDirectory()))
        judge = generated.Judge(ranks, Path(ranks.store.get("folder").decode()), watch)
        seeds = range(options.first, options.first + options.seeds)
        every = [
            (family, seed, number) for seed in seeds for family, of in COUNTS.items() for number in range(of)
        ]
        drawn = {one: cases.draw(*one, ranks.size) for one in every}
        for fault in (*NAMED, *draw(options.faults, options.fault_seed)):
            planted, found, said = Planted(fault), None, []
            crossed = [one for one, case in drawn.items() if crossing(fault, case)]
            crossed.sort(key=lambda one: (one[1], any(of.memory == "compiled" for of in drawn[one].layouts)))
            if fault in NAMED and not options.find:
                crossed = [NAMED[fault]]
            for tried, one in enumerate(crossed, 1):
                with planted.here():
                    said = judge(cases.draw(*one, ranks.size), f"{fault} {one}")["failures"]
                found = one if said else None
                if said or (tried == FEW and not planted.hits):  # it cannot strike
                    break
            if found and fault not in NAMED and judge(drawn[found], f"healthy {found}")["failures"]:
                report["healthy"].append(str(found))
            report["faults"][str(fault)] = {"hits": planted.hits, "case": found, "says": said[:1]}
            sys.stderr.write(f"{fault}: {planted.hits} hits in {len(crossed)}, {found}, {said[:1]}\n")
        report["hung"] = None
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
