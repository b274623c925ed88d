"""Some 200 steps of training: what this process, and one that it talks to, hold on to. In: what a step does.

Out: for each way to run a block, what grew. A leak grows all the time: `quarters` tells it from a cache that
is filled once, and from a busy machine that disturbs a reading now and then.
"""

import contextlib
import ctypes
import gc
import itertools
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import multiprocessing, nn
from torch.utils.checkpoint import checkpoint

from workloads import device, operands, repeatability
from workloads.collective_groups import DESCRIPTORS, STATUS
from workloads.compiled_models import BACKEND
from workloads.quarters import QUARTERS, least_growth

WARM, WINDOWS, STEPS = 20, 12, 17  # one reading after each 17 steps
BATCH, TOKENS, HEADS = 2, 32, 4
WIDTH = {"cpu": 64, "cuda": 1024}
MODES = ("eager", "compiled", "recomputed", "autocast")
ACTIONS = ("steps", "lengths", "optimizers", "graphs", "processes")
# What may grow in a step; of anything else nothing may. Kernels round the host's memory to pages and Python's
# allocator to arenas, drivers round a device's to 2 MiB. A step may take 2 % of the first one's time longer.
FLOORS = {"host bytes": 4096.0, "device bytes": 65536.0}
# A driver keeps memory of the host for graphs: 8 kB for each of the first 200, then 3 kB, then none (H100).
CAPTURES = {"host bytes": 16384.0}
SLOWER, CLOCK = 0.02, {"cpu": time.process_time, "cuda": time.perf_counter}  # a processor has other users
MOST_GRAPHS = 4  # of one block: for fixed sizes, for any, and reserve. Dynamo gives up after 8 without a word
MEMORY, CHILDREN = Path("/proc/self/smaps_rollup"), Path("/proc/thread-self/children")
KEPT = ("Private_Dirty", "Shared_Dirty", "Swap")  # not pages of files, which the kernel drops and reads again
LIBC = ctypes.CDLL(None)
LONG_PATH = 60  # characters; with two names below it a socket's path may have 107
OTHER = "the other process's "
Pipe = Any
Tensors = tuple[torch.Tensor, ...]


def check(action: str) -> list[dict[str, Any]]:
    """One entry for each mode, as `judged` gives it."""
    with _other_process() if action == "processes" else contextlib.nullcontext() as pipe:
        return [_measured(mode, action, pipe) for mode in MODES]


def _measured(mode: str, action: str, pipe: Pipe) -> dict[str, Any]:
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]
    before, step = compiled["unique_graphs"], training(mode, action, pipe)
    readings: list[dict[str, float]] = []
    for _ in range(WARM):
        step()
    graphs = compiled["unique_graphs"] - before
    gc.collect()
    gc.freeze()  # so that counting is quick: what is here already does not grow
    try:
        for _ in range(WINDOWS):
            seconds = min(timeit.repeat(step, number=1, repeat=STEPS, timer=CLOCK[device().type]))
            found = {"seconds": seconds, "graphs": float(compiled["unique_graphs"]), **held()}
            if pipe is not None:
                pipe.send(None)
                found |= {OTHER + name: value for name, value in pipe.recv().items()}
            readings.append(found)
    finally:
        gc.unfreeze()
    captures = action == "graphs" and device().type == "cuda"
    floors = FLOORS | (CAPTURES if captures else {})
    return {"subject": f"{mode}, {action}", **judged(readings, graphs, floors)}


def judged(
    readings: Sequence[Mapping[str, float]], graphs: int, floors: Mapping[str, float] = FLOORS
) -> dict[str, Any]:
    """What grew in a step and what is wrong with it, in words; the step's time, and its peak on a GPU."""
    grown = {name: growth([one[name] for one in readings]) for name in readings[0]}
    times = [one["seconds"] for one in readings]
    first, last = (min(some) for some in (times[: WINDOWS // QUARTERS], times[-WINDOWS // QUARTERS :]))
    allowed = {**floors, "seconds": SLOWER * first}
    problems = [
        f"{name} grow by {value:.3g} a step, allowed are {most:.3g}"
        for name, value in grown.items()
        if value > (most := allowed.get(name.removeprefix(OTHER), 0.0))
    ]
    if graphs > MOST_GRAPHS:
        problems.append(f"{graphs} graphs were compiled in {WARM} steps, allowed are {MOST_GRAPHS}")
    peak = max(one.get("peak bytes", 0.0) for one in readings)
    return {"problems": problems, "grown": grown, "first_s": first, "last_s": last, "peak_bytes": peak}


def growth(readings: Sequence[float]) -> float:
    """The least growth from the median of a quarter of the readings to that of the next, for one step."""
    return least_growth(readings) / (len(readings) // QUARTERS * STEPS)


def held() -> dict[str, float]:
    """What this process holds, and what the device has given to anybody."""
    gc.collect()
    LIBC.malloc_trim(0)  # free memory that is kept for later would hide as much of a leak
    memory, status = (
        dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        for path in (MEMORY, STATUS)
    )
    found = {
        "host bytes": 1024.0 * sum(int(memory[name].split()[0]) for name in KEPT),
        "threads": float(status["Threads"]),
        "descriptors": float(sum(1 for _ in DESCRIPTORS.iterdir())),
        "children": float(len(CHILDREN.read_text().split())),
        "tensors": float(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())),
    }
    if device().type == "cuda":
        found["allocated bytes"] = float(torch.cuda.memory_allocated())
        found["peak bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found["device bytes"] = float(total - free)
    return found


def training(mode: str, action: str, pipe: Pipe) -> Callable[[], object]:
    """A step: forward, backward and optimizer of a block, and what the action adds. A fault replaces it."""
    width = WIDTH[device().type]
    block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True, device=device())
    weights = list(block.parameters())
    call = torch.compile(block, backend=BACKEND[device().type]) if mode == "compiled" else block
    x = operands.normal(BATCH, TOKENS, width, dtype=torch.float32, seed=1)
    lengths = itertools.cycle(range(3, TOKENS, 3) if action == "lengths" else (TOKENS,))
    optimizer = torch.optim.AdamW(weights)

    def gradients() -> Tensors:
        data = x[:, : next(lengths)]
        with torch.autocast(device().type, torch.bfloat16, enabled=mode == "autocast", cache_enabled=False):
            again = {"use_reentrant": False, "preserve_rng_state": False}  # a capture cannot save its state
            out = checkpoint(call, data, **again) if mode == "recomputed" else call(data)
        loss = out.float().square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, weights))

    def step() -> float:
        nonlocal optimizer
        loss, *grads = _replayed(gradients) if action == "graphs" else gradients()
        if action == "processes":
            pipe.send(grads[0])
            grads[0] = pipe.recv().clone()
        if action == "optimizers":
            optimizer = torch.optim.AdamW(weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)  # waits for the device

    return step


def _replayed(gradients: Callable[[], Tensors]) -> Tensors:
    outputs, replay = repeatability.capture(gradients)
    replay()
    return tuple(output.clone() for output in outputs)  # the graph's own memory ends with it


@contextlib.contextmanager
def _other_process() -> Iterator[Pipe]:
    """A new process that runs `echo`, and the pipe to it."""
    context = multiprocessing.get_context("spawn")  # a device cannot be used after a fork
    config = multiprocessing.current_process()._config  # of the other process too
    short = None if len(tempfile.gettempdir()) < LONG_PATH else "/tmp"
    with tempfile.TemporaryDirectory(dir=short) as folder, mock.patch.dict(config, tempdir=folder):
        mine, theirs = context.Pipe()
        other = context.Process(target=echo, args=(theirs,), daemon=True)
        other.start()
        theirs.close()
        try:
            yield mine
        finally:
            mine.close()
            other.join()
            resource_sharer.stop()  # its socket is in the folder


def echo(pipe: Pipe) -> None:
    """Send back a copy of each tensor, and for `None` what this process holds. A fault replaces it."""
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            got = pipe.recv()
            answer = held() if got is None else got.clone()
            del got
            pipe.send(answer)  # the answer lives until the next message: a device's memory is not copied
