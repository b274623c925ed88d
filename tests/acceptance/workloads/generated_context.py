"""Drawn attention whose rows lie on several ranks: PyTorch's context parallel. In: a seed. Out: a JSON line.

A torchrun program. A case is one or two layers of attention on queries, keys and values that are sharded
along the sequence beside a table of positions. The gathered result and the gathered gradients are judged
beside float64 on whole tensors: they may be 4 times as far from it as the same program on one rank is. What
all ranks refuse is counted. PyTorch has no rule for a processor's attention: there its flash operator is made
of the processor's own, so that the ring itself (shards, order, exchange, merging) runs as it does on a GPU.
Repeat a case, in tests/acceptance:
`PYTHONPATH=. torchrun --nproc-per-node 2 workloads/generated_context.py --seed N --first K`.
"""

import argparse
import contextlib
import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads import generated_draws, generated_left
from workloads.collective_groups import Watch, goes_on, watched
from workloads.gates import unit_roundoff
from workloads.ranks import Ranks, joined
from workloads.time_limits import scaled

RING = "torch.distributed.tensor.experimental._attention"  # torch of before 2.5 has none
LIMIT_S = 60.0  # of one case
FACTOR = 4.0  # times as far from float64 as one rank
# Roundings of the largest number, which need no comparison: parts are merged in float32, more than once.
ENOUGH = {"float32": 16.0, "bfloat16": 4.0, "float16": 4.0}
# So many roundings are all that one rank may lend to the gate: its attention may be wrong as well.
MOST = {"float32": 1024.0, "bfloat16": 32.0, "float16": 32.0}
SEQUENCE = 2  # the dimension of rows
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """Sizes, types and how the ring works."""

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    dtype: str
    backend: str
    causal: bool
    rotate: str
    balanced: bool
    layers: int
    scale: float
    turned: bool
    seed: int


def draw(seed: int, number: int, ranks: int, kind: str) -> Case:
    """A case; the rows divide by twice the ranks, which a balanced order needs."""
    source = generated_draws.source("context", seed, number)
    backend = source.choice(("flash", "flash", "efficient", "cudnn")) if kind == "cuda" else "flash"
    halves = ("bfloat16", "float16")
    dtypes = (*halves, "float32") if kind == "cpu" or backend == "efficient" else halves
    causal = source.random() < 0.6
    # The sums of the efficient kernel have rows up to the next 32, and a ring does not cut them off: ranks
    # that merge parts raise, and the others wait for them.
    rows = source.choice((1, 2, 3, 8, 17, 32, 33, 64, 100))
    rows = 32 * (rows % 4 + 1) if backend == "efficient" else rows
    return Case(
        batch=source.choice((1, 1, 2, 3)),
        heads=source.choice((1, 2, 3, 8)),
        groups=source.choice((1, 1, 2, 4)),
        rows=2 * ranks * rows,
        columns=8 * source.randint(1, 16),
        dtype=source.choice(dtypes),
        backend=backend,
        causal=causal,
        rotate=source.choice(("allgather", "alltoall")),
        balanced=causal and source.random() < 0.5,
        layers=source.choice((1, 2)),
        scale=source.choice((0.5, 1.0, 4.0)),
        turned=source.random() < 0.5,
        seed=source.randrange(2**31),
    )


def operands(case: Case, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys, values and positions, the same on all ranks; queries to values may be turned views."""
    source = torch.Generator().manual_seed(case.seed)
    heads = (case.heads * case.groups, case.heads, case.heads)
    shapes = [(case.batch, one, case.rows, case.columns) for one in heads]
    found = [torch.randn(shape, generator=source) for shape in shapes]
    found[0] *= case.scale
    table = torch.rand(1, 1, case.rows, case.columns, generator=source) + 0.5
    given = [one.to(device, getattr(torch, case.dtype)) for one in (*found, table)]
    turned = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in given[:3]]
    return [*turned, given[3]] if case.turned else given


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, **_: bool
) -> torch.Tensor:
    """The plain formula, for float64."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return scores.softmax(-1) @ v


def program(case: Case, given: list[torch.Tensor], *, plain: bool = False) -> tuple[torch.Tensor, ...]:
    """The result of the layers, and what its gradients are of."""
    q, k, v, table = given
    for one in given[:3]:
        one.requires_grad_()
    attend = attention if plain else F.scaled_dot_product_attention
    out, more = v, {"enable_gqa": True} if case.groups > 1 else {}
    for _ in range(case.layers):
        out = attend(q * table, k * table, out[:, : case.heads], is_causal=case.causal, **more)
    return out, q, k, v


def gradients(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of half the sum of its squares."""
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def scaled_dot_product_attention(  # context parallel replaces torch's function by its name
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, **_: bool
) -> torch.Tensor:
    """Attention by the operator that context parallel knows."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return out


@contextlib.contextmanager
def flash_of_processors() -> Iterator[None]:
    """Give the flash operator a processor's kernels, and call it in place of the general function."""
    own = torch.ops.aten

    def forward(
        q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
    ) -> Any:
        out, sums = own._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)
        none = torch.zeros((), dtype=torch.int64)
        return out, sums, none, none, q.shape[2], k.shape[2], none.clone(), none.clone(), torch.empty(0)

    def backward(*given: Any, scale: Any = None) -> Any:
        grad, q, k, v, out, sums, *_ = given
        p, causal = given[10:12]
        return own._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, p, causal, scale=scale
        )

    library, before = torch.library.Library("aten", "IMPL"), F.scaled_dot_product_attention
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        library._destroy()


def parallel(case: Case, ranks: Ranks, mesh: Any) -> list[torch.Tensor]:
    """The program on shards; its results gathered, in the order of whole rows."""
    ring = importlib.import_module(RING)
    ring.set_rotate_method(case.rotate)
    ring._cp_options.enable_load_balance = case.balanced
    given = operands(case, ranks.device)
    with ring.context_parallel(
        mesh, buffers=given, buffer_seq_dims=[SEQUENCE] * len(given), no_restore_buffers=set(given)
    ):
        found = gradients(*program(case, given))
    whole: list[torch.Tensor] = ring.context_parallel_unshard(mesh, found, [SEQUENCE] * len(found))
    return whole


def judged(case: Case, got: list[torch.Tensor], device: torch.device) -> tuple[float, str]:
    """The largest share of a bound, and words."""
    exact = gradients(*program(case, [one.double() for one in operands(case, device)], plain=True))
    usual = gradients(*program(case, operands(case, device)))
    rounding = unit_roundoff(getattr(torch, case.dtype))
    enough, most = ENOUGH[case.dtype] * rounding, MOST[case.dtype] * rounding
    worst = (0.0, "")
    for name, right, one, other in zip(("out", "dq", "dk", "dv"), exact, usual, got, strict=True):
        if other.shape != right.shape:
            return math.inf, f"{name} has the shape {tuple(other.shape)}, expected {tuple(right.shape)}"
        size = right.abs().max()
        far, near = (float((each - right).abs().max() / size) for each in (other, one))
        bound = FACTOR * min(max(near, enough), most)
        share = far / bound if math.isfinite(far) else math.inf
        words = f"{name} is {far:.3g} of its largest number from float64, {bound:.3g} allowed"
        worst = max(worst, (share, words))
    return worst


def is_known(case: Case, words: str) -> bool:
    """Whether torch is known to be wrong so: the efficient kernel in halves and a balanced order.

    Its gradients of queries and keys are; docs/reference/trust.md has the figures.
    """
    halves = case.dtype != "float32" and case.balanced and case.backend == "efficient"
    return halves and words.startswith(("dq", "dk"))


def run(ranks: Ranks, report: dict[str, Any], asked: argparse.Namespace) -> None:
    """Judge cases of a seed: the least number in any case, then until the time is over."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    watch, ends = Watch(time.monotonic() + scaled(LIMIT_S), report), time.monotonic() + asked.seconds
    left: dict[str, int] = {}
    with watched(ranks, watch, report):
        for number in range(asked.first, asked.first + asked.most):
            late = number >= asked.first + asked.least and time.monotonic() > ends
            if not goes_on(ranks, f"case {number}", over=late):
                break
            watch.end = time.monotonic() + scaled(LIMIT_S)
            case = draw(report["seed"], number, ranks.size, ranks.device.type)
            report["drawn"] += 1
            report["hung"] = f"case {number}: {case}"
            print(report["hung"], file=sys.stderr, flush=True)  # it may end this process
            reason = _one(case, number, ranks, mesh, report)
            left[reason] = left.get(reason, 0) + 1
        report["hung"] = None
    report["left"] = {"case": left}


def _one(case: Case, number: int, ranks: Ranks, mesh: Any, report: dict[str, Any]) -> str:
    """Why a case is left, or that it is judged; rank 0 writes its failure into the report."""
    got, error = list[torch.Tensor](), ""
    try:
        with sdpa_kernel(BACKENDS[case.backend]):
            got = parallel(case, ranks, mesh)
    except generated_left.REFUSED as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
        print(f"rank {ranks.rank}: {error}", file=sys.stderr, flush=True)  # the others may wait for it
    said = ranks.collect(error, about=f"context {number}")
    if said is None:
        return ""
    if all(said):
        return f"refused: {said[0].splitlines()[0][:100]}"
    with sdpa_kernel(BACKENDS[case.backend]):
        share, words = (
            (math.inf, f"ranks refuse alone: {said}") if any(said) else judged(case, got, ranks.device)
        )
    report["judged"] += 1
    if share > 1 and is_known(case, words):
        report["known"] += 1
    elif share > 1:
        report["failed"].append(
            f"  {case}: {words}\n    again: torchrun --nproc-per-node {ranks.size} "
            f"workloads/generated_context.py --seed {report['seed']} --first {number}"
        )
    else:
        report["worst"] = max(report["worst"], share)
    return generated_left.JUDGED


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind, usual in (("seed", int, 0), ("first", int, 0), ("least", int, 1), ("most", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    report: dict[str, Any] = {"family": "context", "seed": options.seed, "least": options.least, "drawn": 0}
    report |= {"judged": 0, "known": 0, "worst": 0.0, "failed": [], "hung": "no case"}
    warnings.simplefilter("ignore")
    try:
        importlib.import_module(RING).context_parallel_unshard  # noqa: B018
    except (ImportError, AttributeError):
        report["lacks"] = {"package": "torch", "reason": "this torch has no context parallel"}
    with joined() as ranks:
        with flash_of_processors() if ranks.device.type == "cpu" else contextlib.nullcontext():
            if "lacks" not in report:
                run(ranks, report, options)
        if ranks.rank == 0:
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
