"""Generated models of transformers: each architecture that it trains, small, with drawn conditions.

In: a seed and a number. Out: a call.

Logits, loss and the gradient of each weight are judged beside the plain form in float64: each sequence alone,
eager attention, no cache, no checkpoint, not compiled, and the loss by its formula. So a case says at once
that padding changes no real token, that packed sequences are separate, that a cache and a checkpoint change
nothing, and that a batch's loss is the mean of its tokens.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from workloads import device, generated_left, operands
from workloads import transformers_models as models
from workloads.generated_judge import FLOATS, Call

WIDTHS = (32, 48)
HEADS = ((4, 4), (4, 2), (2, 1))
LAYERS, VOCABULARIES, INNER = (2, 3), (61, 96), (40, 64)
LENGTHS = (3, 4, 5, 8, 9, 13)
PLAIN, LEFT, RIGHT, PACKED = "each alone", "padded left", "padded right", "packed"
IGNORED, PAD = -100, 0
SCALE = 64.0  # of the loss, so that gradients are no subnormals of float16
IGNORES = 0.3  # of the labels
REENTRANT = "reentrant"
CHECKPOINTS = REENTRANT, "not reentrant"
EXPERTS = "batched_mm", "grouped_mm"
# What takes some sizes and types only. Its kernels are compiled for each size, so few cases have them.
KERNELS, KERNEL = (models.FLEX, models.FLASH), 0.3
CACHED, MOVED = 0.25, 0.1
COMPILED = 0.03  # of the cases: a compiler takes as long as fifty of them
# Units; in eight seeds on a processor the worst were 29, 26 and 7, where four times these are allowed.
NEEDED = {torch.float32: 16.0, torch.float16: 12.0, torch.bfloat16: 3.0}
Weights = Sequence[torch.Tensor]
Out = list[torch.Tensor]


class Case(NamedTuple):
    """An architecture and its sizes, the batch, and what must not change what comes out."""

    arch: str
    sizes: models.Sizes
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    attention: str = models.EAGER
    experts: str = models.EAGER
    rows: str = PLAIN
    masked: bool = False  # a mask is given though nothing is padded
    cached: int = 0  # so many tokens first, and the others with their cache
    checkpoint: str = ""
    ignored: bool = False  # some labels are
    items: bool = False  # num_items_in_batch is given
    autocast: bool = False
    compiled: str = ""
    seed: int = 0

    def __str__(self) -> str:
        """What is not plain, in words."""
        plain = Case(self.arch, self.sizes, self.lengths)
        pairs = zip(self._fields, self, plain, strict=True)
        return f"{self.arch} {dict(self.sizes)} {self.lengths}: " + ", ".join(
            f"{name}={one}" for name, one, other in pairs if one != other
        )


class Wide(TorchFunctionMode):  # type: ignore[misc]
    """Gives float64 where a model asks for float32: its norms, its softmax, its places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with other types."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        given = {key: _widened(one) for key, one in (kwargs or {}).items()}
        return func(*map(_widened, args), **given)


def _widened(one: Any) -> Any:
    return torch.float64 if one is torch.float32 else one


def draw(source: random.Random, seed: int, number: int) -> Case:
    """One case; each architecture has its turn."""
    turn, row = divmod(number, len(models.table()))
    name = random.Random(f"{seed} {turn}").sample(models.table(), len(models.table()))[row]
    its, pick = models.promises(name), source.choice
    heads, few = pick(HEADS)
    sizes = {"vocabulary": pick(VOCABULARIES), "width": pick(WIDTHS), "heads": heads, "few": few}
    sizes |= {"head": pick((8, 16)), "layers": pick(LAYERS), "inner": pick(INNER)}
    lengths = tuple(pick(LENGTHS) for _ in range(pick((1, 2, 3))))
    wanted = [(RIGHT, its.padding), (LEFT, its.padding and its.left), (PACKED, its.packed and its.loss)]
    if its.places and not its.recurs and not its.packed:
        generated_left.say("packed sequences", "their mask gets no places")  # as in transformers#39997
    rows = pick([one for one, there in wanted if there] or [PLAIN])
    case = Case(name, tuple(sizes.items()), lengths, pick(FLOATS), rows=rows, seed=source.randrange(2**31))
    if its.chooses:
        experts = pick((models.EAGER, *EXPERTS)) if its.experts else models.EAGER
        case = case._replace(dtype=torch.float32, experts=experts)
    every = (models.EAGER, *its.attention)
    kinds = [one for one in every if one not in KERNELS or source.random() < KERNEL]
    case = case._replace(
        attention=pick(kinds),
        ignored=pick((False, True)),
        masked=pick((False, True)),
        items=its.loss and pick((False, True)),
        checkpoint=pick(("", *CHECKPOINTS)) if its.checkpoints else "",
        autocast=case.dtype is torch.bfloat16 and pick((False, True)),
    )
    if rows not in (PLAIN, PACKED) and its.caches and source.random() < CACHED:
        longest = max(lengths)
        return case._replace(cached=source.randrange(1, longest), checkpoint="", items=False)
    if source.random() < COMPILED:
        return case._replace(compiled="inductor" if device().type == "cuda" else "aot_eager", checkpoint="")
    return case


def drawn(source: random.Random, seed: int, number: int) -> tuple[str, list[tuple[str, Call]], float] | None:
    """Words, the call, and the units that it needs; `None` if it is left, and for what reason is said."""
    try:
        case = draw(source, seed, number)
        if known(case):
            generated_left.say(generated_left.CALL, "a known fault")
            return None
        call = made(case, seed * 1_000_003 + number)
    except generated_left.RefusedError as error:
        kind = type(error.__cause__).__name__
        generated_left.say(generated_left.CALL, f"the package does not make it: {kind}")
        return None
    generated_left.say(f"rows {case.rows}")
    return str(case), [("", call)], NEEDED[case.dtype]


def known(case: Case) -> bool:
    """Whether the package is known to be wrong in this case.

    Padding behind a sequence changes ProphetNet's logits before it, and CPM-Ant's mask is a dummy by its own
    words. Moshi's cache forgets what is beyond a window that its mask does not have. (No issue is known.)
    Where layers share keys and values, a reentrant checkpoint loses the gradient through these
    (unsloth-zoo#813).
    """
    shared: Any = getattr(models.config(case.arch, case.sizes), "num_kv_shared_layers", None)
    if case.checkpoint == REENTRANT and shared:
        return True
    padded = len(set(case.lengths)) > 1 and case.rows == RIGHT
    return (padded and case.arch in ("prophetnet", "cpmant")) or (
        case.arch == "moshi" and case.cached >= models.WINDOW
    )


def made(case: Case, seed: int) -> Call:
    """The call that a case is, with the call that float64 evaluates."""
    weights = []
    for n, one in enumerate(models.begun(case.arch, case.sizes)):
        own = operands.normal(*one.shape, dtype=torch.float32, seed=case.seed + n)
        # What a model begins with is too small for its attention to choose anything.
        own = own * one.shape[-1] ** -0.5 if one.dim() > 1 else one.to(own.device) + MOVED * own
        weights.append(own.to(case.dtype))
    plain = Case(case.arch, case.sizes, case.lengths, case.dtype, ignored=case.ignored, seed=case.seed)
    call, its = Call(stepped, (weights, plain), {}, case.dtype, seed=seed), models.promises(case.arch)
    return replace(
        call, args=(weights, case), right=call, steps=not its.chooses,
        excused=case.dtype is torch.float32,
        overflows=case.dtype is torch.float16 and its.recurs,
        taken=not (case.compiled or case.cached or its.recurs or case.attention in KERNELS),
        words=f"_judged(generated_transformers.made({case!r}, {seed}), {NEEDED[case.dtype]})",
        smaller=lambda: smaller(case, seed),
    )  # fmt: skip


def smaller(case: Case, seed: int) -> Iterator[Call]:
    """Calls of simpler cases that the package makes."""
    for one in simpler(case):
        with contextlib.suppress(generated_left.RefusedError):
            yield made(one, seed)


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one condition less, or with one sequence less."""
    plain = Case(case.arch, models.SMALLEST, case.lengths)
    for name in ("sizes", "compiled", "autocast", "checkpoint", "items", "masked", "ignored", "experts",
                 "attention", "cached", "dtype"):  # fmt: skip
        if getattr(case, name) != getattr(plain, name):
            yield case._replace(**{name: getattr(plain, name)})
    for n in range(len(case.lengths)):
        if len(case.lengths) > 1:
            yield case._replace(lengths=case.lengths[:n] + case.lengths[n + 1 :])


def stepped(weights: Weights, case: Case) -> Out:
    """Logits of real tokens, the loss, and the gradient of all weights."""
    dtype = torch.float32 if case.autocast and weights[0].dtype is torch.bfloat16 else weights[0].dtype
    its = models.model(case.arch, case.sizes, case.attention, case.experts, dtype)
    with torch.no_grad():
        for own, given in zip(its.parameters(), weights, strict=True):
            own.grad = None
            own.copy_(given)
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        if dtype is torch.float64:
            stack.enter_context(Wide())
        if case.autocast:
            stack.enter_context(torch.autocast(device().type, torch.bfloat16))
        if case.checkpoint:
            its.gradient_checkpointing_enable({"use_reentrant": case.checkpoint == REENTRANT})
            stack.callback(its.gradient_checkpointing_disable)
        call = its
        if case.compiled:
            torch._dynamo.reset()
            call = torch.compile(its, backend=case.compiled, dynamic=False)
        logits, loss = told(call, case)
        torch.autograd.backward([loss * SCALE])  # not its method, behind which no mode is left
    # In one row: a gradient that cancels has the roundings of what it is made of.
    grads = torch.cat(
        [own.new_zeros(own.numel()) if own.grad is None else own.grad.flatten() for own in its.parameters()]
    )
    return [one.detach().clone() for one in (logits, loss, grads)]


def tokens(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The numbers of each sequence, and its labels: those of the next tokens are shifted by the model."""
    generator, found = torch.Generator().manual_seed(case.seed), []
    for length in case.lengths:
        ids = torch.randint(2, dict(case.sizes)["vocabulary"], (length,), generator=generator)
        labels = ids.clone()
        if case.ignored:
            labels[torch.rand(length, generator=generator) < IGNORES] = IGNORED
        labels[-1] = ids[-1]  # one counts; before the second token attention has no gradient at all
        found.append((ids.to(device()), labels.to(device())))
    return found


def told(call: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of real tokens, one sequence after the other, and the mean loss of their labels."""
    every = tokens(case)
    count = sum(int((labels[1:] != IGNORED).sum()) for _, labels in every)
    if case.rows == PLAIN:
        places = models.promises(case.arch).places
        parts = [
            call(
                input_ids=ids[None],
                use_cache=False,
                **({"position_ids": places_of(ids)[None]} if places else {}),
            ).logits[0]
            for ids, _ in every
        ]
        return torch.cat(parts), lost(parts, every, count)
    if case.rows == PACKED:
        ids, places = torch.cat([ids for ids, _ in every]), torch.cat([places_of(ids) for ids, _ in every])
        labels = torch.cat([torch.where(places_of(ids) == 0, IGNORED, labels) for ids, labels in every])
        given = {"input_ids": ids[None], "position_ids": places[None], "labels": labels[None]}
        out = call(**given, **({"num_items_in_batch": count} if case.items else {}), use_cache=False)
        return out.logits[0], out.loss
    longest, left = max(case.lengths), case.rows == LEFT

    def padded(one: torch.Tensor, by: int) -> torch.Tensor:
        more = longest - len(one)
        return F.pad(one, (more, 0) if left else (0, more), value=by)

    rows = [padded(ids, PAD) for ids, _ in every], [padded(labels, IGNORED) for _, labels in every]
    ids, labels = map(torch.stack, rows)
    mask = torch.stack([padded(torch.ones_like(one), 0) for one, _ in every])
    given = {"attention_mask": mask} if len(set(case.lengths)) > 1 or case.masked else {}
    if models.promises(case.arch).places:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if case.cached:
        logits = in_two(call, ids, given, case.cached)
        parts = [row[real] for row, real in zip(logits, mask.bool(), strict=True)]
        return torch.cat(parts), lost(parts, every, count)
    if left:
        labels[mask.cumsum(-1) == 1] = IGNORED  # what stands before it is padding
    given |= {"num_items_in_batch": torch.tensor(count)} if case.items else {}
    its = models.promises(case.arch).loss
    out = call(input_ids=ids, labels=labels if its else None, use_cache=False, **given)
    parts = [row[real] for row, real in zip(out.logits, mask.bool(), strict=True)]
    return torch.cat(parts), out.loss if its else lost(parts, every, count)


def in_two(call: Any, ids: torch.Tensor, given: Mapping[str, torch.Tensor], first: int) -> torch.Tensor:
    """Logits of the first tokens, and of the others with the cache of these."""
    begun = {key: one[:, :first] for key, one in given.items()}
    out = call(input_ids=ids[:, :first], use_cache=True, **begun)
    rest = {key: one if "mask" in key else one[:, first:] for key, one in given.items()}
    more = call(input_ids=ids[:, first:], past_key_values=out.past_key_values, use_cache=True, **rest)
    return torch.cat([out.logits, more.logits], 1)


def places_of(ids: torch.Tensor) -> torch.Tensor:
    """The place of each token."""
    return torch.arange(len(ids), device=ids.device)


def lost(
    parts: Sequence[torch.Tensor], every: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int
) -> torch.Tensor:
    """The mean over all labels that count."""
    sums = [
        F.cross_entropy(logits[:-1].float(), labels[1:], ignore_index=IGNORED, reduction="sum")
        for logits, (_, labels) in zip(parts, every, strict=True)
    ]
    return torch.stack(sums).sum() / count
