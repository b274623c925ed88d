"""A model cut into stages over ranks by torch.distributed.pipelining, trained by AdamW.

In: a case. Out: losses, gradients and weights of all stages, on every rank of a pipeline.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from workloads.compiled_models import BACKEND
from workloads.layout_jobs import Job, Of, Step, gathered, mesh, plain_name
from workloads.layout_models import Case, Layout, Model, Shares, Tensors, chunks_of, entropy
from workloads.layout_options import V_SHAPED
from workloads.ranks import Ranks


class Part(Model):
    """Some parts of the model in turn: one stage. Takes and returns tensors alone."""

    def forward(self, x: torch.Tensor, branch: bool | torch.Tensor) -> Any:
        """What the next stage takes; logits, and with them the output that is never used, of the last."""
        if isinstance(branch, torch.Tensor):  # one element for each row of this pass
            branch = bool(branch[0])
        out, spare = super().forward(x, branch)
        return out if spare is None else (out, spare)


class Pipelined(Job):
    """A job whose model is in stages. `self.model` has those of this rank."""

    def _spread(self, layout: Layout) -> None:
        case, device = self.case, self.ranks.device
        inner = layout["inner"] or self.ranks.size
        data = mesh(device.type, self.ranks.size // inner, inner)
        self.pipe, count = data.get_group("inner"), inner * layout["stages"]
        mine, parts = stages_of(layout, inner)[data.get_local_rank("inner")], list[Part]()
        for number in mine:
            part = Part(case, self.seed).to(device)
            part.recomputed = layout.memory == "recomputed"
            part.keep(cut(len(part.blocks) + 2, count)[number])
            for block in part.blocks if layout.memory == "compiled" else ():
                if block is not None:
                    block.compile(backend=BACKEND[device.type])
            if self.fsdp2:
                self._fsdp2(part, layout, data["outer"])
            parts.append(part)
        self.model, self.first, self.last = nn.ModuleList(parts), 0 in mine, count - 1 in mine
        self.shares = Shares.of(case, layout, case.chunks // self.groups)
        stages = [
            pipelining.PipelineStage(
                part, number, count, device, group=self.pipe, **self._shapes(number, count)
            )
            for number, part in zip(mine, parts, strict=True)
        ]
        schedule = schedules.get_schedule_class(layout["schedule"])
        one = issubclass(schedule, schedules.PipelineScheduleSingle)
        self.schedule = schedule(
            stages[0] if one else stages,
            self.shares.passes,
            loss_fn=self._loss,
            scale_grads=layout["loss"] == "mean",
        )

    def _shapes(self, number: int, count: int) -> dict[str, Any]:
        """What a stage takes and returns, where that is given."""
        if not self.layout["given"]:
            return {}
        case = self.case
        kind = torch.bfloat16 if self.fsdp2 and case.kind == "bfloat16" else torch.float32
        rows = (case.sizes["batch"], case.sizes["length"])
        tokens = torch.empty(rows, dtype=torch.int64, device=self.ranks.device)
        between = tokens.new_empty((*rows, case.sizes["width"]), dtype=kind).requires_grad_()
        kind = torch.bfloat16 if case.kind == "bfloat16" else kind
        logits = tokens.new_empty((*rows, case.sizes["vocab"]), dtype=kind).requires_grad_()
        out = (logits, logits) if case["spare"] else logits
        return {
            "input_args": between if number else tokens,
            "output_args": between if number + 1 < count else out,
        }

    def _loss(self, out: Any, after: torch.Tensor) -> torch.Tensor:
        shares, logits = self.shares, out if isinstance(out, torch.Tensor) else out[0]
        return entropy(logits, after, shares.reduction) / shares.before

    def step(self, number: int, most: float) -> Step:
        """One step of AdamW by the schedule: the losses of this pipeline, and each gradient, whole."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        case, device, shares, losses = self.case, self.ranks.device, self.shares, list[torch.Tensor]()
        every = list(enumerate(chunks_of(case, number)))[self.group :: self.groups]
        tokens = torch.cat([one for _, one in every]).to(device)
        uses = [case.uses(number, chunk) for chunk, _ in every]
        rows = torch.tensor(uses, device=device).repeat_interleave(case.sizes["batch"])
        more: dict[str, Any] = {"target": tokens[:, 1:].contiguous(), "losses": losses} if self.last else {}
        with torch.autocast(device.type, torch.bfloat16, self.autocast):
            self.schedule.step(
                *([tokens[:, :-1].contiguous()] if self.first else []),
                branch=rows if case["branch"] == "chunk" else uses[0],
                **more,
            )
        for _, weight in self.named():
            if weight.grad is not None and shares.after != 1 and self.layout["loss"] == "sum":
                weight.grad.div_(shares.after)
        found = self.whole(lambda weight: weight.grad)
        scale = shares.before / shares.terms
        kept = {"losses": torch.stack(losses).detach().double().cpu() * scale} if self.last else {}
        norm = self._clip(most) if case.clip else None
        if self.optimizer is not None:
            self.optimizer.step()
        return Step(self._of_every_stage(kept)["losses"], {name: found[name] for name in self.trained}, norm)

    def _clip(self, most: float) -> float:
        """The norm of all stages. What torch.nn.utils clips by is the caller's."""
        weights = [weight for _, weight in self.named()]
        norm = nn.utils.get_total_norm([one.grad for one in weights if one.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        squares = norm.to(self.ranks.device).float().square()
        dist.all_reduce(squares, group=self.pipe)
        nn.utils.clip_grads_with_norm_(weights, most, squares.sqrt())
        return float(squares.sqrt())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of this rank by their names in a plain model."""
        return ((plain_name(name), weight) for part in self.model for name, weight in part.named_parameters())

    def buffers(self) -> Tensors:
        """A copy of every buffer."""
        mine = {name: one.detach().cpu().clone() for part in self.model for name, one in part.named_buffers()}
        return self._of_every_stage(mine)

    def whole(self, of: Of) -> Tensors:
        """What belongs to each weight of any stage; zeros where there is nothing."""
        return self._of_every_stage({name: gathered(of(weight), weight) for name, weight in self.named()})

    def _of_every_stage(self, mine: Tensors) -> Tensors:
        every: list[Any] = [None] * dist.get_world_size(self.pipe)
        dist.all_gather_object(every, mine, group=self.pipe)
        return {name: one for of in every for name, one in of.items()}


def stages_of(layout: Layout, inner: int) -> list[list[int]]:
    """The stages of each rank of a pipeline: in rounds, or down and up again."""
    if layout["schedule"] in V_SHAPED:
        return [[rank, 2 * inner - 1 - rank] for rank in range(inner)]
    return [[rank + turn * inner for turn in range(layout["stages"])] for rank in range(inner)]


def cut(parts: int, stages: int) -> list[range]:
    """The parts of each stage in turn; the first stages have one more where they do not divide."""
    ends = [0]
    for number in range(stages):
        ends.append(ends[-1] + parts // stages + (number < parts % stages))
    return [range(*some) for some in itertools.pairwise(ends)]


def job_of(case: Case, layout: Layout, ranks: Ranks, seed: int, epsilon: float) -> Job:
    """The job of a layout."""
    kind = Pipelined if "pipeline" in layout.parallel else Job
    return kind(case, layout, ranks, seed, epsilon)
