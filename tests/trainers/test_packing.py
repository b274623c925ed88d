"""Documents that share a sample do not see each other with --pack masked, and do without.

The dense mask is the reference: attention by documents has its values and gradients, and not its memory.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agree import different, same_sums
from torch import Tensor

import data
import options
import presets
from layouts import prepare
from models import layers

SEQ = 40
NUMBERS = {
    "one document": [[0] * SEQ],
    "documents of one token": [list(range(SEQ))],
    "padding of one token each at the end": [[0] * 30 + list(range(1, 11))],
    "two samples that begin with document 0": [[0] * SEQ, [0] * 7 + [1] * 33],
    "a document ends with the sample": [[0] * 39 + [1], [0] + [1] * 39],
}


def drawn(seed: int) -> list[list[int]]:
    """Samples with documents of 1 to SEQ tokens."""
    random_ = random.Random(seed)
    chance = random_.choice((0.02, 0.2, 0.7))
    samples = []
    for _ in range(random_.choice((1, 2, 3))):
        steps = [0] + [int(random_.random() < chance) for _ in range(SEQ - 1)]
        samples.append([sum(steps[: at + 1]) for at in range(SEQ)])
    return samples


def dense(numbers: Tensor) -> Tensor:
    """The mask by its definition, a pair of positions at a time."""
    batch, length = numbers.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for sample in range(batch):
        for query in range(length):
            for key in range(query + 1):
                mask[sample, 0, query, key] = numbers[sample, query] == numbers[sample, key]
    return mask


def differentiated(run, *inputs: Tensor) -> Tensor:
    """The value and its gradients, of a weighted sum of it, in one tensor: of a document of one token the
    gradients of q and k are zero but for rounding, as differences of parts that are as large as the others.
    """
    leaves = [each.clone().requires_grad_() for each in inputs]
    out = run(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (out * weight.to(out.dtype)).sum().backward()
    return torch.cat([each.flatten() for each in (out.detach(), *(leaf.grad for leaf in leaves))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["as many", "shared"])
@pytest.mark.parametrize("case", [*NUMBERS, *range(12)])
def test_attention_by_documents_has_the_values_and_gradients_of_the_dense_mask(case, heads, dtype):
    numbers = torch.tensor(drawn(case) if isinstance(case, int) else NUMBERS[case])
    bounds, random_ = data.bounds(numbers), torch.Generator().manual_seed(1)
    mask = dense(numbers)
    shapes = [(len(numbers), count, SEQ, 16) for count in (heads[0], heads[1], heads[1])]
    exact = [torch.randn(shape, generator=random_, dtype=torch.float64) for shape in shapes]
    assert torch.equal(layers.document_mask(numbers, bounds), mask)
    want = differentiated(lambda q, k, v: layers.attention(q, k, v, bias=mask), *exact)
    got = differentiated(
        lambda q, k, v: layers.document_attention(q, k, v, bounds), *(each.to(dtype) for each in exact)
    )
    # Products over 16, softmax, its sum and products with values over at most SEQ; twice for the way back.
    same_sums(got, want, dtype=dtype, terms=2 * (2 * 16 + 3 * SEQ))
    if numbers.any():
        crossing = layers.attention(*exact)
        assert different(crossing.flatten(), want[: crossing.numel()]), "the control"


def test_what_is_compiled_takes_the_bounds_too():
    numbers = torch.tensor(drawn(3))
    bounds = data.bounds(numbers)
    q, k, v = (
        torch.randn(len(numbers), 2, SEQ, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    compiled = torch.compile(layers.document_attention, fullgraph=True, backend="aot_eager")
    same_sums(compiled(q, k, v, bounds), layers.attention(q, k, v, bias=dense(numbers)))
    assert layers.document_context(q.transpose(1, 2), bounds) is bounds


@pytest.mark.parametrize(("family", "size"), [("llama", "tiny"), ("mpt", "tiny-released"), ("gpt", "tiny")])
def test_a_document_in_a_packed_sample_has_the_logits_that_it_has_alone(family, size):
    parsed = options.parse(["--model", family, "--size", size])
    preset = presets.find(family, size)
    model = prepare.skeleton(presets.MODELS[family], preset.config, loss_chunks=1)
    prepare.give_weights(model, model, "", parsed, torch.device("cpu"))
    first, second = torch.randint(256, (2, 1, 20), generator=torch.Generator().manual_seed(1))
    packed = torch.cat((first, second), 1)
    documents = torch.tensor([0, 20, 40], dtype=torch.int32)
    if getattr(model, "position", None) is not None:
        with torch.no_grad():
            model.position.weight.zero_()  # a learned position is that in the sample, not in the document
    with torch.inference_mode():
        alone = model.head.logits(model.hidden(second))
        masked = model.head.logits(model.hidden(packed, documents))[:, 20:]
        crossing = model.head.logits(model.hidden(packed))[:, 20:]
        loss = model(packed, packed, documents)
    same_sums(masked, alone)
    assert different(crossing, alone)
    assert torch.isfinite(loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention by bounds is of GPUs")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["as many", "shared"])
@pytest.mark.parametrize("case", NUMBERS)
def test_the_kernel_of_a_gpu_has_the_values_and_gradients_too(case, heads):
    numbers = torch.tensor(NUMBERS[case])
    bounds, random_ = data.bounds(numbers).cuda(), torch.Generator().manual_seed(1)
    shapes = [(len(numbers), count, SEQ, 64) for count in (heads[0], heads[1], heads[1])]
    halves = [torch.randn(shape, generator=random_).bfloat16() for shape in shapes]
    mask = dense(numbers)
    want = differentiated(lambda q, k, v: layers.attention(q, k, v, bias=mask), *(x.double() for x in halves))
    assert layers.document_context(halves[0].cuda().transpose(1, 2), bounds) is bounds
    got = differentiated(
        lambda q, k, v: layers.document_attention(q.cuda(), k.cuda(), v.cuda(), bounds).cpu(), *halves
    )
    # The weights of the sum are rounded, then probabilities, their gradients and each result.
    same_sums(got, want, dtype=torch.bfloat16, terms=8)


PEAK = """
import re, sys
sys.path.insert(0, sys.argv[1])
import torch
from models import layers

def most():  # of this process alone: what getrusage says holds that of its parent
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024

length = int(sys.argv[2])
bounds = torch.arange(0, length + 1, 256, dtype=torch.int32)
q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
for context_of in (lambda: bounds, lambda: layers.document_mask(q.transpose(1, 2), bounds)):
    before = most()
    layers.document_attention(q, k, v, context_of()).sum().backward()
    print(most() - before)
"""


def test_memory_does_not_grow_with_the_square_of_the_sequence():
    trainers = str(Path(layers.__file__).parents[1])
    command = [sys.executable, "-c", PEAK, trainers, "8192"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    by_bounds, by_mask = map(int, run.stdout.split())
    square = 8192**2  # bytes of the mask, a byte for each pair
    assert by_mask > square, "the control"
    assert by_bounds < square / 4
