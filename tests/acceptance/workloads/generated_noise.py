"""Programs that draw numbers in any order of memory: a mask has its share, and backward has forward's mask.

In: a seed, a number. Out: the worst share of a gate, and words. One or two blocks each turn and copy what
they get, draw numbers for it, and use the result; in eager mode or compiled, as it is or recomputed, and
called three times: twice from one seed, then from where the generator is, with other operands.

No other run says which numbers are right. They are read back from the results (result / operand), and have
the mean of their distribution, nothing in common with themselves at any distance, nor with those of another
block or call. Put back into the same program in float64 they give the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._functorch import config as partitioner
from torch.utils import checkpoint as recomputing

from workloads import device, gates, generated_compiled, generated_draws, generated_left, generated_random
from workloads.generated_noise_known import BUDGET, GRADIENT, OTHERS, SEED, known

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    Numbers = list[torch.Tensor]

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
FEW, MANY = (2**10, 2**14), (2**18 + 1, 2**19)
WIDEST = 128  # of what is multiplied by a square matrix
SIZES = (2, 3, 4, 5, 7, 8, 16, 31, 33, 64)
DEVIATIONS = 9.0  # of a mean of so many numbers, or of products of such: below 1e-13 of healthy ones, in each
LOWER, UPPER = 0.125, 0.375  # slopes of RReLU
SELU = -1.7580993408473766  # what alpha dropout puts in
# Of a gradient, beside float64 with the numbers that forward drew; the share of numbers that may be farther.
APART = {torch.float32: (0.02, 0.0), torch.float16: (0.05, 0.01), torch.bfloat16: (0.15, 0.01)}
EAGER, AOT, TRACED, CODE = "eager", "aot_eager", generated_compiled.TRACED, generated_compiled.CODE
MODES = ("default", "default", "reduce-overhead", "reduce-overhead", "max-autotune-no-cudagraphs")
SHRINKS = 12


class Noise(NamedTuple):
    """How numbers are drawn for y; mean and variance of what y is multiplied by."""

    of: Callable[[torch.Tensor], torch.Tensor]
    mean: float
    variance: float


def noises(p: float) -> dict[str, Noise]:
    """Each way to draw numbers, with a share p."""
    without, kept, scale = (1.0, p / (1 - p)), (p, p * (1 - p)), _scale(p)
    slope = -(LOWER + UPPER) / 2, (UPPER - LOWER) ** 2 / 12
    return {
        "dropout": Noise(lambda y: F.dropout(y, p), *without),
        "dropout1d": Noise(lambda y: F.dropout1d(y, p), *without),
        "dropout2d": Noise(lambda y: F.dropout2d(y, p), *without),
        "alpha_dropout": Noise(
            lambda y: F.alpha_dropout(y, p, training=True), (1 - p) * scale, p * (1 - p) * scale**2
        ),
        "rrelu": Noise(lambda y: F.rrelu(-y, LOWER, UPPER, training=True), *slope),
        "bernoulli": Noise(lambda y: y * torch.full_like(y, p).bernoulli(), *kept),
        "bernoulli_": Noise(lambda y: y * torch.empty_like(y).bernoulli_(p), *kept),
        "below": Noise(lambda y: torch.where(torch.rand_like(y, dtype=torch.float32) < p, y, 0), *kept),
        "rand_like": Noise(lambda y: y * torch.rand_like(y), 0.5, 1 / 12),
        "uniform_": Noise(lambda y: y * torch.empty_like(y).uniform_(1, 2), 1.5, 1 / 12),
        "randn_like": Noise(lambda y: y * torch.randn_like(y), 0.0, 1.0),
        "exponential_": Noise(lambda y: y * torch.empty_like(y).exponential_(), 1.0, 1.0),
        "randint_like": Noise(lambda y: y * torch.randint_like(y, 1, 9), 4.5, 5.25),
    }


FEATURES = {"dropout1d": 3, "dropout2d": 4}  # dimensions of what has one number for each sample and channel
# What a block does first: y stays positive, so that a number can be read back.
BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda y: y,
    "cloned": torch.clone,
    "contiguous": lambda y: y.contiguous(),
    "put together": lambda y: y.reshape(-1, y.shape[-1]).clone().view(y.shape),
    "added to its mean": lambda y: y + y.mean(-1, keepdim=True),
    "raised": lambda y: (y * 0.125).exp(),
    "multiplied by a matrix": lambda y: y @ _matrix(y, y.shape[-1]) if y.shape[-1] <= WIDEST else y + 1,
}
AFTER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda out: out.detach(),
    "turned": lambda out: out.permute(*reversed(range(out.dim()))).contiguous(),
    "summed over the first": lambda out: out.sum(0),
    "multiplied by a matrix": lambda out: out @ _matrix(out, 3),
    "normalized": lambda out: F.layer_norm(out, out.shape[-1:], eps=1.0),
}
RECOMPUTED = ("", "", "reentrant", "not reentrant", "not reentrant", "but products", BUDGET)


@dataclass(frozen=True)
class Case:
    """All that makes a case: `order` is that of the leaf's dimensions in memory, `turned` the block's."""

    noise: str
    way: str
    dtype: str
    seed: int
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    turned: tuple[int, ...] = ()
    share: float = 0.5
    blocks: int = 1
    before: str = ""
    after: str = ""
    recomputed: str = ""
    as_eager: bool = False  # Inductor draws by eager mode's kernels
    mode: str = "default"
    dynamic: bool | None = False
    resized: bool = False  # the third call has another size

    @property
    def drawing(self) -> Noise:
        """How it draws numbers."""
        return noises(self.share)[self.noise]

    def smaller(self) -> Iterator[Case]:
        """Simpler cases."""
        for one in (one for one in fields(self)[5:] if getattr(self, one.name) != one.default):
            less: dict[str, Any] = {one.name: one.default}
            yield replace(self, **less)


def draw(source: random.Random, seed: int) -> Case:
    """One case."""
    name, on_gpu = source.choice(list(noises(0.5))), device().type != "cpu"
    way = source.choice((EAGER, EAGER, AOT, TRACED, CODE, CODE, *(CODE, CODE, CODE) * on_gpu))
    features = name in FEATURES
    if way == CODE and not on_gpu and not generated_compiled.has_compiler():
        way = TRACED
    dims = FEATURES.get(name) or source.choice((2, 3, 3, 4))
    most = source.randint(*(FEW if source.randrange(3) else MANY))
    sizes = [source.choice(SIZES[: 10 if dims < 4 else 6]) for _ in range(dims - 1)]
    if features:  # which come first, and few of them say nothing
        sizes = [2**10 + 1, *sizes]
    else:
        sizes.insert(source.randrange(dims), most // math.prod(sizes) + 1)
    order, turned = (tuple(source.sample(range(dims), dims)) for _ in range(2))
    again = source.choice([one for one in RECOMPUTED if _can(one, way, name)])
    mode = source.choice(MODES) if way == CODE and on_gpu else MODES[0]
    code, dtype = way == CODE, source.choice(("float32", "float32", "float16", "bfloat16"))
    return Case(
        name, way, dtype, seed, tuple(sizes), order, () if features else turned, source.choice(SHARES),
        1 if mode == MODES[-1] else source.choice((1, 1, 2)),  # which takes many compilers' time
        source.choice(list(BEFORE)), source.choice(list(AFTER)), again, mode=mode,
        as_eager=code and dtype == "float32" and not source.randrange(3),  # in halves it rounds elsewhere
        dynamic=source.choice((False, False, True, None)) if way != EAGER and mode != MODES[-1] else False,
        resized=not source.randrange(4),
    )  # fmt: skip


def _can(again: str, way: str, name: str) -> bool:
    """Whether a healthy torch recomputes this so; RReLU in eager mode it does wrong, pytorch#193671."""
    fits = {"reentrant": way == EAGER, BUDGET: way not in (EAGER, AOT)}.get(again, True)
    return fits and not (name == "rrelu" and way == EAGER and again)


def _scale(p: float) -> float:
    """What alpha dropout multiplies by."""
    return float(((1 - p) * (1 + p * SELU**2)) ** -0.5)


def _matrix(y: torch.Tensor, columns: int) -> torch.Tensor:
    count = y.shape[-1] * columns
    return (torch.arange(count, device=y.device).view(-1, columns) % 7 + 1).to(y.dtype) / y.shape[-1]


def program(case: Case, x: torch.Tensor, noise: Callable[[torch.Tensor, int], torch.Tensor]) -> Numbers:
    """What the blocks draw and make of it."""
    given: Numbers = []
    for n in range(case.blocks):

        def block(x: torch.Tensor, n: int = n) -> tuple[torch.Tensor, ...]:
            y = BEFORE[case.before](x.permute(case.turned) if case.turned else x)
            out = noise(y, n)
            return y * 0.5 + out.abs() * 0.5 + 0.5, out, AFTER[case.after](out)

        x, *more = _recomputed(case, block)(x)
        given += more
    return given


def _recomputed(case: Case, block: Callable[..., Any]) -> Callable[..., Any]:
    if case.recomputed in ("", BUDGET):
        return block
    given: dict[str, Any] = {"use_reentrant": case.recomputed == "reentrant"}
    if case.recomputed == "but products":
        kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
        given["context_fn"] = functools.partial(recomputing.create_selective_checkpoint_contexts, kept)
    return functools.partial(recomputing.checkpoint, block, **given)


class Run(NamedTuple):
    """What one call gave: the operand, results in turns (a block's numbers, their use), a gradient."""

    x: torch.Tensor
    given: Numbers
    grad: torch.Tensor


class Bench:
    """A case that is compiled once and called several times."""

    def __init__(self, case: Case) -> None:
        """Nothing runs yet."""
        self.case, noise = case, case.drawing.of

        def whole(x: torch.Tensor) -> Numbers:
            return program(case, x, lambda y, _: noise(y))

        torch._dynamo.reset()
        self.function: Callable[[torch.Tensor], Numbers] = whole
        if case.way != EAGER:
            given: dict[str, Any] = {"backend": case.way, "fullgraph": True, "dynamic": case.dynamic}
            if case.way == CODE:
                modes = {} if case.mode == "default" else torch._inductor.list_mode_options(case.mode)
                given["options"] = {**modes, "fallback_random": case.as_eager}
            self.function = torch.compile(whole, **given)

    def run(self, seed: int | None, number: int = 0) -> Run:
        """One call and its gradient, from a seed or from where the generator is."""
        x = operand(self.case, number)
        if seed is not None:
            generated_random._seed(seed)
        budget = (0.0, 0.5)[self.case.seed % 2] if self.case.recomputed == BUDGET else 1.0
        changes = {"activation_memory_budget": budget} if self.case.way != EAGER else {}
        patched = partitioner.patch(changes) if changes else contextlib.nullcontext()
        with generated_compiled._refusing(), patched:
            if self.case.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            given = self.function(x)
            roots = [one for one in given if one.requires_grad]
            torch.autograd.backward(roots, [weights(one) for one in roots])
        # Memory of a graph on a GPU is written again by the next call.
        return Run(x.detach(), [one.detach().clone() for one in given], _gradient(x).clone())


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def operand(case: Case, number: int) -> torch.Tensor:
    """A positive leaf in its order of memory; the third call may have another first size."""
    generator = torch.Generator().manual_seed(case.seed + number)
    shape = [case.shape[0] + (number == 2 and case.resized) * 3, *case.shape[1:]]
    values = (torch.rand(shape, generator=generator) + 1).to(device(), getattr(torch, case.dtype))
    if case.order:
        back = [case.order.index(n) for n in range(len(shape))]
        values = values.permute(case.order).contiguous().permute(back)
    return values.requires_grad_()


def weights(one: torch.Tensor) -> torch.Tensor:
    """Gradients that come in: positive, and not all equal."""
    return (torch.arange(one.numel(), device=one.device) % 5 + 4).view(one.shape).to(one.dtype) / 8


def read_back(case: Case, run: Run) -> tuple[Numbers, torch.Tensor, Numbers]:
    """Each block's numbers, and what float64 has with them: the gradient and the results."""
    found: Numbers = []

    def again(y: torch.Tensor, n: int) -> torch.Tensor:
        out = run.given[2 * n].double()
        slopes = (out / y).detach()
        if case.noise == "alpha_dropout":
            put = _scale(case.share) * (SELU + case.share * -SELU)
            slopes = torch.where((out - put).abs() < 0.02, 0.0, _scale(case.share)).detach()
        found.append(slopes)
        return slopes * y + (out - slopes * y).detach()

    x = run.x.double().requires_grad_()
    given = program(replace(case, recomputed=""), x, again)
    roots = [one for one, its in zip(given, run.given, strict=True) if one.requires_grad]
    torch.autograd.backward(roots, [weights(one) for one in roots])
    return found, _gradient(x), [one.detach() for one in given]


def judged(case: Case) -> tuple[float, str]:
    """The worst share of a gate, and words."""
    bench = Bench(case)
    for number in range(2 if case.mode == "reduce-overhead" else 0):  # it runs, it is captured, then replayed
        bench.run(None, number)
    first, again, other = bench.run(case.seed), bench.run(case.seed), bench.run(None, 2)
    pairs = zip([*first.given, first.grad], [*again.given, again.grad], strict=True)
    same = all(generated_random._same(*pair) for pair in pairs)
    found = [known(case, 0.0 if same else math.inf, SEED)]
    if case.as_eager and not case.recomputed:
        eager = Bench(replace(case, way=EAGER)).run(case.seed)
        same = all(map(generated_random._same, eager.given[::2], first.given[::2]))
        found.append(known(case, 0.0 if same else math.inf, OTHERS))
    drawn: list[Numbers] = []
    for run in (first, other):
        numbers, grad, given = read_back(case, run)
        drawn.append([_one_of_each(case, one) for one in numbers])
        found.append(known(case, _apart(run.grad, grad), GRADIENT))
        pairs = zip(run.given, given, strict=True)
        found += [(_apart(*pair), "what it gives has not the numbers that it drew") for pair in pairs]
    for one in (each for numbers in drawn for each in numbers):
        found += _of_numbers(case, one)
    both = itertools.combinations([one for numbers in drawn for one in numbers], 2)
    found += [(_together(case, *pair), "two draws have numbers in common") for pair in both]
    return max(found, key=lambda one: one[0])


def _one_of_each(case: Case, numbers: torch.Tensor) -> torch.Tensor:
    """Of dropout of whole features one number each; NaN where they differ."""
    if case.noise not in FEATURES:
        return numbers
    flat = (numbers.flatten(2) > 0.5).double()
    same = flat.amax(-1) == flat.amin(-1)
    return torch.where(same, flat[..., 0], torch.nan) / (1 - case.share)


def _apart(got: torch.Tensor, right: torch.Tensor) -> float:
    """How far numbers are from float64's, as a share of what they may be."""
    most, share = APART[got.dtype]
    size = right.abs() + right.square().mean().sqrt() + torch.finfo(torch.float32).tiny
    off = ((got.double() - right).abs() / size)[right.abs() < torch.finfo(got.dtype).max / 2]
    off = off.nan_to_num(nan=math.inf).sort(descending=True)[0]
    return float(off[int(share * len(off))]) / most if len(off) else 0.0


def _of_numbers(case: Case, numbers: torch.Tensor) -> Iterator[tuple[float, str]]:
    """What numbers have alone: the mean of their distribution, and nothing in common with each other."""
    noise = case.drawing
    rounding = 4 * gates.unit_roundoff(getattr(torch, case.dtype)) * max(1.0, abs(noise.mean))
    deviation = math.sqrt(noise.variance / numbers.numel())
    off = abs(float(numbers.mean()) - noise.mean) / (DEVIATIONS * deviation + rounding)
    yield off if math.isfinite(off) else math.inf, "its numbers have another mean"
    yield _together(case, numbers, numbers), "its numbers repeat each other"


def _together(case: Case, one: torch.Tensor, other: torch.Tensor) -> float:
    """How much numbers have in common with others at the worst distance."""
    signs = [(each.flatten() > case.drawing.mean).float() for each in (one, other)]
    centred = [each - each.mean() for each in signs]
    size = math.prod(float(each.square().mean().sqrt()) for each in centred)
    length = 2 ** math.ceil(math.log2(2 * max(map(len, centred))))
    spectra = [torch.fft.rfft(each, length) for each in centred]
    sums = torch.fft.irfft(spectra[0].conj() * spectra[1], length).abs()
    most = sums[1:-1].max() if one is other else sums.max()
    return float(most) / (size * math.sqrt(min(map(len, centred))) * DEVIATIONS) if size else math.inf


def one(seed: int, number: int) -> tuple[float, str] | None:
    """A case of a seed; `None` if a compiler refuses it, which is loud."""
    case = draw(generated_draws.source("noise", seed, number), (seed * 1_000_003 + number) % 2**31)
    with generated_compiled._plain():
        said = asked(case)
        if said is None or said[0] <= 1:
            return said
        with generated_left.counted():
            small, told = smallest(case, said)
    again = f"    again: generated.repeat('noise', {seed}, {number})"
    return said[0], f"  noise({case}): {said[1]}\n    at its smallest ({small}): {told[1]}\n{again}"


def smallest(case: Case, said: tuple[float, str]) -> tuple[Case, tuple[float, str]]:
    """A simpler case that fails, and what is said of it."""
    for other in itertools.islice(case.smaller(), SHRINKS):
        its = asked(other)
        if its and its[0] > 1:
            return smallest(other, its)
    return case, said


def asked(case: Case) -> tuple[float, str] | None:
    """What is said of a case; `None` if torch refuses it, and that is counted."""
    try:
        return judged(case)
    except generated_compiled.Refused as refused:
        generated_left.say(generated_left.CALL, f"refused: {str(refused).partition(':')[0]}")
    except RuntimeError as broken:
        return math.inf, str(broken)
    return None
