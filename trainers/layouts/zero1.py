"""ZeRO-1: every data rank holds whole bfloat16 weights and a slice of the optimizer's state (arXiv
1910.02054, stage 1); also with tensor parallel, and inside the stages of pipeline.py.

In: a model on the meta device, Options. Out: a Job.

Each unit's weights lie in one flat buffer, and its gradients in another. The reduce-scatter reads gradients
where backward wrote them, the optimizer writes a slice of the weights, and the all-gather completes the
buffer in place: nothing is copied in or out of collectives, and accumulation costs no communication. Float32
master weights are the bfloat16 weights plus 16 more bits of each (`ops.split`).

With tensor parallel a buffer holds this tensor rank's shards, and then what all tensor ranks hold (norms,
embeddings). These collectives run between ranks with the same shards. Only the first tensor rank counts the
second part in the gradients' norm, so the sum over all ranks has every weight once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import peaks
from errors import RefusedError
from fused import ops
from layouts import flat, job, prepare
from layouts.sharding import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from fused import layer
    from models.layers import BlockModel
    from options import Options
    from world import World

# A buffer of a multiple of this many elements divides among 1 to 10, 12, 14, 16 … ranks, and each slice
# begins at an address that kernels read fast.
PAD = 128 * 9 * 5 * 7
PIECE = 2**24  # weights that are split into halves at a time: a split needs 14 bytes for each


class Zero1:
    """The Job of this layout. `data`: the ranks that hold the same weights and share their moments.

    `kept`: the ranks over which a checkpoint's tensors are spread. `counted`: the units that are in the norm.
    """

    def __init__(self, model: BlockModel, options: Options, world: World) -> None:
        self.options, self.world = options, world
        self.tp: DeviceMesh | None = None
        if options.tp * options.pp == 1:
            self.data = self.kept = self.mesh = init_device_mesh(world.device.type, (world.size,))
        else:
            self.mesh = job.mesh(options, world)
            self.data = self.kept = self.mesh["shard"]
        if options.tp > 1:
            self.tp, self.kept = self.mesh["tp"], self.mesh["shard", "tp"]
            prepare.split_blocks(model, self.tp)
        self.data_rank, self.data_size = self.data.get_local_rank(), self.data.size()
        self.units = self.counted = flat_units(model, options, world, self.data)
        self.steps, self.fresh = 0, True
        self.fused: layer.Model | None = None
        self.model: BlockModel | layer.Model = model
        if options.implementation == "fused":
            from fused import layer

            again = prepare.recomputed(model, options)
            self.model = self.fused = layer.Model(
                model, peaks.find(world), fp8=options.precision == "fp8", again=again
            )
        else:
            prepare.compile_and_recompute(model, options, gpu=world.gpu)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job. Ranks sum their gradients: the sum is a mean because `share` is divided by their number."""
        for unit in self.units:
            unit.begin(first=self.fresh, last=last)
        self.fresh = last
        share /= self.data_size
        if self.fused is not None:
            self.fused.share = share  # the fused loss makes gradients in forward, already scaled
            loss: Tensor = self.fused(**batch)
            loss.backward()
            return loss.detach()
        loss = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """As Job."""
        self.steps += 1
        for unit in self.units:
            unit.wait()
        first = self.tp is None or self.tp.get_local_rank() == 0
        total = torch.stack([unit.norm(common=first) for unit in self.counted]).square().sum()
        if self.world.size > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
        for unit in self.units:
            unit.update(scale, lr, self.steps)
        return norm

    def state(self) -> dict[str, Any]:
        """As Job: flat float32 tensors, sharded; their length does not depend on the number of data ranks."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for name, unit in self._named():
            parts = {"master": unit.master(), "mean": unit.mean, "variance": unit.variance}
            state |= {f"{name}.{part}": self._spread(value) for part, value in parts.items()}
        return state

    def _named(self) -> list[tuple[str, FlatUnit]]:
        """Each unit with its name in a checkpoint; a pipeline's stages have names of their own."""
        stage = f"stage{self.mesh['pp'].get_local_rank()}." if self.options.pp > 1 else ""
        return [(f"{stage}{number}", unit) for number, unit in enumerate(self.units)]

    def _spread(self, local: Tensor) -> DTensor:
        """This rank's part of a flat tensor; with tensor parallel of a matrix, a row for each tensor rank."""
        local, places = local.contiguous(), [Shard(0)]
        if self.tp is not None:
            local, places = local[None], [Shard(1), Shard(0)]
        return DTensor.from_local(local, self.kept, places, run_check=False)

    def state_bytes(self) -> int:
        """As Job."""
        held = (part for unit in self.units for part in (unit.low, unit.mean, unit.variance))
        return sum(part.nbytes for part in held if part is not None)

    def restore(self, state: dict[str, Any]) -> None:
        """As Job."""
        self.steps = int(state["steps"])
        for name, unit in self._named():
            unit.mean.copy_(state[f"{name}.mean"].to_local().flatten())
            unit.variance.copy_(state[f"{name}.variance"].to_local().flatten())
            exact = state[f"{name}.master"].to_local().flatten()
            if unit.low is None:
                unit.weights[unit.mine].copy_(exact)
            else:
                ops.split(exact, unit.weights[unit.mine], unit.low)
            unit.cache.clear()
            unit.gather()
            unit.wait()

    def weights(self) -> dict[str, Tensor]:
        """As Job."""
        found = {}
        for unit in self.units:
            part = unit.master().contiguous()
            exact = torch.empty(unit.length, device=part.device)
            dist.all_gather_into_tensor(exact, part, group=self.data.get_group())
            for path, (parameter, offset) in unit.offsets.items():
                whole = flat.spread_as(parameter, flat.view(exact, parameter, offset))
                found[path] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
        return found


def flat_units(model: BlockModel, options: Options, world: World, data: DeviceMesh) -> list[FlatUnit]:
    """Every unit with weights, in the order of forward; each waits for its weights before it runs.

    The root comes last here, so that it takes what is left: made first, it would take the weights of all
    blocks, and hold them all in float32 at once.
    """
    tied, found = prepare.ties_weights(model), []
    for name, part, runs in _parts(model):
        if not any(parameter.is_meta for parameter in part.parameters()):
            continue  # an earlier unit took all of its weights
        unit = FlatUnit(name, part, model, options=options, world=world, data=data)
        runs.register_forward_pre_hook(lambda *_, unit=unit: unit.wait())
        found.append(unit)
    if tied:
        found.insert(0, found.pop())  # the tied embedding is in the root, and is used first
    return found


def _parts(model: BlockModel) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Each part with a unit of its own, with its name, and the module before which its weights must be there.

    A copy of another stage's weight is alone in its unit, as the weight is there: their slices are equal.
    """
    for name, part in (*prepare.units(model), ("", model)):
        for path in model.copies:
            owner = path.rpartition(".")[0]
            if owner.startswith(f"{name}.") and name:
                yield owner, model.get_submodule(owner), part
        yield name, part, part


class FlatUnit:
    """One module's weights and gradients in flat buffers, and this rank's slice of the optimizer's state.

    `low`: the lower 16 bits of this rank's float32 weights; None where weights are float32 themselves.
    `data`: the ranks that share the state. `common`: where the weights begin that every tensor rank holds.
    `mine`: this rank's slice of the buffers. `slice`: the gradients of `mine`, summed over the ranks.
    `gradients` and `slice` are None with --no-flat-gradients: each gradient stays where autograd made it.
    `fresh`: the next gradients replace the buffer's; otherwise they add up. `work`: the collective under way.
    `cache`: the FP8 copies of the weights, valid until the next update.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        model: BlockModel,
        *,
        options: Options,
        world: World,
        data: DeviceMesh,
    ) -> None:
        self.name, self.world, self.data = name, world, data
        self.offsets, self.common, length = flat.offsets(module, name)
        self.length = -(-length // PAD) * PAD
        if self.length % data.size():
            raise RefusedError(
                f"--parallel zero1 needs a number of data ranks that divides {PAD}, got {data.size()}; "
                "start fewer"
            )
        if data.size() > 1 and not options.flat_gradients:
            raise RefusedError(
                f"--no-flat-gradients works on one data rank, got {data.size()}: a reduction needs the "
                "buffer of all gradients; leave the flag out"
            )
        part = self.length // data.size()
        self.mine = slice(data.get_local_rank() * part, (data.get_local_rank() + 1) * part)
        half = options.below_fp32
        kind = torch.bfloat16 if half else torch.float32
        gradients = torch.float32 if options.reduce == "fp32" or not half else torch.bfloat16
        moments = torch.float32 if options.moments == "fp32" else torch.bfloat16
        self.weights = torch.zeros(self.length, device=world.device, dtype=kind)
        self.low = torch.zeros(part, device=world.device, dtype=torch.int16) if half else None
        self.mean, self.variance = (torch.zeros(part, device=world.device, dtype=moments) for _ in range(2))
        self.gradients: Tensor | None = None
        self.slice: Tensor | None = None
        if options.flat_gradients:
            self.gradients = torch.zeros(self.length, device=world.device, dtype=gradients)
            # On a GPU the reduction is in place; gloo gets an output of its own.
            self.slice = self.gradients[self.mine] if world.gpu else torch.zeros(part, dtype=gradients)
        self.fresh, self.last, self.missing = True, True, 0
        self.work: dist.Work | None = None
        self.cache: dict[int, Any] = {}
        self._adopt(model, options)

    def _adopt(self, model: BlockModel, options: Options) -> None:
        """Draw each weight whole, so that its value depends on no layout, and point the module
        at the buffer.
        """
        for path, (parameter, offset) in self.offsets.items():
            value = prepare.initial_value(
                model.our_name(path), parameter.shape, model.config.layers, options, self.world.device
            )
            at = offset
            for piece in flat.own_part(value, parameter).flatten().split(PIECE):
                self.hold(piece, at)
                at += piece.numel()
        for path, (parameter, offset) in self.offsets.items():
            view = torch.nn.Parameter(flat.spread_as(parameter, flat.view(self.weights, parameter, offset)))
            view.unit = self
            if self.gradients is not None:
                view.main_grad = flat.view(self.gradients, parameter, offset)
                # Not the method itself: the collector does not see what a hook holds, so the unit would stay.
                view.register_post_accumulate_grad_hook(_weakly(self._collect))
            for owner, leaf in flat.owners(model, parameter):
                setattr(owner, leaf, view)
            self.offsets[path] = (view, offset)

    def hold(self, exact: Tensor, at: int) -> None:
        """Hold these float32 values, which begin at this place of the buffers."""
        end = at + exact.numel()
        if self.low is None:
            self.weights[at:end].copy_(exact)
            return
        low = torch.empty(exact.numel(), device=exact.device, dtype=torch.int16)
        ops.split(exact, self.weights[at:end], low)
        begin, mine = max(at, self.mine.start), self.mine.start
        if begin < min(end, self.mine.stop):
            end = min(end, self.mine.stop)
            self.low[begin - mine : end - mine].copy_(low[begin - at : end - at])

    def master(self) -> Tensor:
        """This rank's slice of the float32 weights."""
        part = self.weights[self.mine]
        return part if self.low is None else ops.join(part, self.low)

    def _collect(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd made into the buffer."""
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        if self.fresh:
            parameter.main_grad.copy_(gradient)
        else:
            parameter.main_grad.add_(gradient)
        parameter.grad = None
        self.missing -= 1
        if self.missing == 0:
            self.ready()

    def begin(self, *, first: bool, last: bool) -> None:
        """Before a microbatch: the first one of a step replaces gradients, the last one has them reduced."""
        self.fresh, self.last, self.missing = first, last, len(self.offsets)
        if first and self.gradients is None:
            self._drop()

    def begin_many(self, passes: int) -> None:
        """Before all microbatches of a step, whose backwards come in the order of a pipeline's schedule."""
        assert self.gradients is not None, "a pipeline needs flat gradients"
        self.gradients.zero_()
        self.fresh, self.last, self.missing = False, True, passes * len(self.offsets)

    def ready(self) -> None:
        """All gradients of a microbatch are in the buffer; after the last one, start the reduce-scatter."""
        if not self.last or self.gradients is None:
            return
        if self.data.size() == 1:
            self.slice = self.gradients
            return
        group = self.data.get_group()
        self.work = dist.reduce_scatter_tensor(self.slice, self.gradients, group=group, async_op=True)

    def norm(self, *, common: bool) -> Tensor:
        """Norm of `slice`; with or without the weights that every tensor rank holds."""
        if self.slice is None:
            made = [gradient for _, gradient in self._made()]
            norms = torch._foreach_norm(made, 2, dtype=torch.float32)  # noqa: SLF001
            return torch.linalg.vector_norm(torch.stack(norms))
        own = self.slice if common else self.slice[: max(0, self.common - self.mine.start)]
        return torch.linalg.vector_norm(own, dtype=torch.float32)

    def _made(self) -> Iterator[tuple[slice, Tensor]]:
        """Where each weight lies in the buffers, and its gradient as autograd made it, flat."""
        for path, (parameter, offset) in self.offsets.items():
            if parameter.grad is None:
                raise AssertionError(f"backward made no gradient of {path}; leave --no-flat-gradients out")
            yield slice(offset, offset + parameter.numel()), parameter.grad.flatten()

    def _drop(self) -> None:
        """Free the gradients that autograd made."""
        for parameter, _ in self.offsets.values():
            parameter.grad = None

    def wait(self) -> None:
        """Make the device (on a CPU, the caller) wait for the collective under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def update(self, scale: Tensor, lr: float, step: int) -> None:
        """Step this rank's slice and send it to the others; `wait` before the weights are read."""
        adamw, state = ops.pick("adamw_", self.world.device), (self.low, self.mean, self.variance)
        if self.slice is None:
            for part, gradient in self._made():
                held = (kind if kind is None else kind[part] for kind in state)
                adamw(self.weights[part], *held, gradient, scale, lr=lr, step=step)
            self._drop()
        else:
            adamw(self.weights[self.mine], *state, self.slice, scale, lr=lr, step=step)
        self.cache.clear()
        self.gather()

    def gather(self) -> None:
        """Start completing the weights from every rank's slice."""
        if self.data.size() > 1:
            mine, group = self.weights[self.mine], self.data.get_group()
            mine = mine if self.world.gpu else mine.clone()
            self.work = dist.all_gather_into_tensor(self.weights, mine, group=group, async_op=True)


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep the object of its method alive."""
    held = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        found = held()
        assert found is not None, "a gradient came after its layout was gone"
        found(parameter)

    return hook
