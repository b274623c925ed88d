"""One unit of ZeRO-1 in flat buffers.

In: a module on the meta device. Out: its weights and gradients side by side, this rank's slice of the
optimizer's state, and the collectives of both (zero1.py says when).
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from errors import RefusedError
from fused import ops
from layouts import flat, prepare
from layouts.flat import ALIGN
from layouts.sharding import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from models.layers import BlockModel
    from options import Options
    from world import World

PIECE = 2**24  # weights that are split into halves at a time: a split needs 14 bytes for each


class FlatUnit:
    """One module's weights and gradients in flat buffers, and this rank's slice of the optimizer's state.

    `low`: the lower 16 bits of this rank's float32 weights; None where weights are float32 themselves.
    `data`: the ranks that share the state. `common`: where the weights begin that every tensor rank holds.
    `length`: elements of the weights; a buffer has padding behind them, so that all ranks have equally large
    slices.
    `mine`: this rank's slice of the buffers, and `own` how much of it is no padding.
    `slice`: the gradients of `mine`, summed over the ranks. `made`: weights with a gradient of this step.
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
        self.offsets, self.common, self.length = flat.offsets(module, name)
        if data.size() > 1 and not options.flat_gradients:
            raise RefusedError(
                f"--no-flat-gradients works on one data rank, got {data.size()}: a reduction needs the "
                "buffer of all gradients; leave the flag out"
            )
        part = share(self.length, data.size())
        self.mine = slice(data.get_local_rank() * part, (data.get_local_rank() + 1) * part)
        self.own = min(max(0, self.length - self.mine.start), part)
        half = options.below_fp32
        kind = torch.bfloat16 if half else torch.float32
        gradients = torch.float32 if options.reduce == "fp32" or not half else torch.bfloat16
        moments = torch.float32 if options.moments == "fp32" else torch.bfloat16
        self.weights = torch.zeros(part * data.size(), device=world.device, dtype=kind)
        self.low = torch.zeros(part, device=world.device, dtype=torch.int16) if half else None
        self.mean, self.variance = (torch.zeros(part, device=world.device, dtype=moments) for _ in range(2))
        self.gradients: Tensor | None = None
        self.slice: Tensor | None = None
        if options.flat_gradients:
            self.gradients = torch.zeros_like(self.weights, dtype=gradients)
            # On a GPU the reduction is in place; gloo gets an output of its own.
            self.slice = self.gradients[self.mine] if world.gpu else torch.zeros(part, dtype=gradients)
        self.fresh, self.last, self.missing, self.reduced = True, True, 0, False
        self.decay = options.weight_decay
        self.made: set[nn.Parameter] = set()
        self.work: dist.Work | None = None
        self.cache: dict[int, Any] = {}
        self._adopt(model, options)

    def _adopt(self, model: BlockModel, options: Options) -> None:
        """Draw each weight whole, and point the module at the buffer.

        A weight that is drawn whole has a value that depends on no layout.
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
            held = flat.spread_as(parameter, flat.view(self.weights, parameter, offset))
            view = torch.nn.Parameter(held, requires_grad=parameter.requires_grad)
            view.unit = self
            if self.gradients is not None:
                view.main_grad = flat.view(self.gradients, parameter, offset)
                # Not the method itself: the collector does not see what a hook holds, so the unit would stay.
                if view.requires_grad:
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
        if parameter in self.made:
            parameter.main_grad.add_(gradient)
        else:
            parameter.main_grad.copy_(gradient)
            self.made.add(parameter)
        parameter.grad = None
        self.missing -= 1
        if self.missing == 0:
            self.ready()

    def begin(self, *, first: bool, last: bool) -> None:
        """Before a microbatch: the first one of a step replaces gradients, the last one has them reduced."""
        self.fresh, self.last, self.missing, self.reduced = first, last, len(self._trained()), False
        if first:
            self.made.clear()
            if self.gradients is None:
                self._drop()

    def begin_many(self, passes: int) -> None:
        """Before all microbatches of a step, whose backwards come in the order of a pipeline's schedule."""
        assert self.gradients is not None, "a pipeline needs flat gradients"
        self.gradients.zero_()
        self.made = self._trained()
        self.fresh, self.last, self.missing, self.reduced = False, True, passes * len(self.made), False

    def _trained(self) -> set[nn.Parameter]:
        """The weights that are not frozen."""
        return {parameter for parameter, _ in self.offsets.values() if parameter.requires_grad}

    def reduce_the_rest(self) -> None:
        """Reduce the unit after the backward pass of a step if it is not reduced yet.

        A weight without a gradient (frozen, or not used) has zero, and keeps no other weight of its unit from
        the reduction.
        """
        if self.reduced or self.gradients is None:
            return
        for parameter, _ in self.offsets.values():
            if parameter not in self.made:
                flat.local(parameter.main_grad).zero_()
        self.ready()

    def ready(self) -> None:
        """All gradients of a microbatch are in the buffer; after the last one, start the reduce-scatter."""
        if not self.last or self.gradients is None:
            return
        self.reduced = True
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
        for parameter, offset in self.offsets.values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.requires_grad:
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
            made = [(part, gradient, self._decay(part.start)) for part, gradient in self._made()]
        else:
            made = [(part, self.slice[part], decay) for part, decay in self._runs()]
        weights = self.weights[self.mine]
        for part, gradient, decay in made:
            held = (kind if kind is None else kind[part] for kind in state)
            adamw(weights[part], *held, gradient, scale, lr=lr, step=step, decay=decay)
        if self.slice is None:
            self._drop()
        self.cache.clear()
        self.gather()

    def _decay(self, at: int) -> float:
        """The decay of the weight that begins here in the buffers: of matrices, not of norms and biases."""
        (parameter,) = (weight for weight, offset in self.offsets.values() if offset == at)
        return self.decay if parameter.ndim > 1 and parameter.requires_grad else 0.0

    def _runs(self) -> list[tuple[slice, float]]:
        """Parts of this rank's slice with one decay each; the whole where nothing decays."""
        part = self.mine.stop - self.mine.start
        if not self.decay:
            return [(slice(0, part), 0.0)]
        begins = sorted(offset for _, offset in self.offsets.values())
        runs: list[tuple[slice, float]] = []
        for begin, end in itertools.pairwise([*begins, self.length]):
            here, there = (min(max(0, at - self.mine.start), part) for at in (begin, end))
            decay = self._decay(begin)
            if runs and runs[-1][1] == decay:
                here = runs.pop()[0].start
            if here < there:
                runs.append((slice(here, there), decay))
        return runs

    def gather(self) -> None:
        """Start completing the weights from every rank's slice."""
        if self.data.size() > 1:
            mine, group = self.weights[self.mine], self.data.get_group()
            mine = mine if self.world.gpu else mine.clone()
            self.work = dist.all_gather_into_tensor(self.weights, mine, group=group, async_op=True)


def share(length: int, ranks: int) -> int:
    """Elements of each rank's slice of a buffer: whole rows of ALIGN, which kernels read fast."""
    return -(-length // (ALIGN * ranks)) * ALIGN


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep the object of its method alive."""
    held = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        found = held()
        assert found is not None, "a gradient came after its layout was gone"
        found(parameter)

    return hook
