"""--lean and --no-flat-gradients train the same model: the same values, gradients and weights."""

import dataclasses
import os
from unittest import mock

import pytest
import torch

import data
import options as cli
import plan as plans
import presets
import world
from layouts import job as layouts
from models import flux, moe

STEPS = 3
FP32, BF16 = ("--precision", "fp32"), ("--precision", "bf16", "--reduce", "bf16")


def trained(*flags: str) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, norms and weights after a few steps of one rank. The last microbatch runs twice, as for a
    profile: the gradients of the run before a step must not count.
    """
    options = cli.parse([*flags, "--parallel", "zero1", "--device", "cpu", "--lr", "1e-2"])
    preset = presets.find(options.model, "tiny", lean=options.lean)
    with mock.patch.dict(os.environ), mock.patch("signal.signal"), world.joined_ranks(options) as ranks:
        plan = plans.settle(options, preset, ranks)
        job, feed = layouts.create(options, preset, plan, ranks), data.Feed(options, preset, plan)
        losses, norms, share = [], [], 1 / plan.accumulate
        for step in range(STEPS):
            if step == 1:
                job.microbatch(feed.batch(plan.numbers(9, 0, job), ranks.device), last=True, share=1.0)
            for micro in range(plan.accumulate):
                batch = feed.batch(plan.numbers(step, micro, job), ranks.device)
                losses.append(job.microbatch(batch, last=micro == plan.accumulate - 1, share=share))
            norms.append(job.step(1e-2))
        return losses, norms, job.weights()


def same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_lean_experts_change_no_bit(precision: tuple[str, ...]) -> None:
    losses, norms, weights = trained("--model", "moe", *precision)
    lean = trained("--model", "moe", *precision, "--lean")
    assert torch.equal(torch.stack(lean[0]), torch.stack(losses))
    assert torch.equal(torch.stack(lean[1]), torch.stack(norms))
    assert same_bits(lean[2], weights)


def test_lean_positions_train_the_same() -> None:
    # Sums over tokens have another order in memory: the last bit of a norm's weight may differ.
    losses, norms, weights = trained("--model", "flux", *FP32)
    lean = trained("--model", "flux", *FP32, "--lean")
    torch.testing.assert_close(torch.stack(lean[0]), torch.stack(losses), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.stack(lean[1]), torch.stack(norms), rtol=1e-6, atol=0)
    torch.testing.assert_close(lean[2], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(), ("--global-batch", "8")], ids=["one", "accumulated"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", ["moe", "flux", "llama"])
def test_gradients_left_in_place_train_the_same(
    model: str, precision: tuple[str, ...], batch: tuple[str, ...]
) -> None:
    # Only the sum of the norm has another order. A limit that no norm reaches takes it out of the weights.
    flags = ("--model", model, *precision, *batch, "--clip", "1e6")
    losses, norms, weights = trained(*flags)
    apart = trained(*flags, "--no-flat-gradients")
    assert torch.equal(torch.stack(apart[0]), torch.stack(losses))
    assert torch.allclose(torch.stack(apart[1]), torch.stack(norms), rtol=1e-4)
    assert same_bits(apart[2], weights)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_experts_give_the_same_values_and_gradients_in_float64(active: int) -> None:
    config = dataclasses.replace(presets.find("moe", "tiny").config, active_experts=active)
    torch.manual_seed(5)
    plain, lean = (moe.Experts(dataclasses.replace(config, lean=lean)).double() for lean in (False, True))
    for weight in plain.parameters():
        torch.nn.init.normal_(weight)
    lean.load_state_dict(plain.state_dict())
    x, upstream = (torch.randn(2, 24, config.width, dtype=torch.float64) for _ in range(2))
    found = []
    for experts in (plain, lean):
        inputs = x.clone().requires_grad_()
        out = experts(inputs)
        assert experts.penalty is not None
        ((out * upstream).sum() + experts.penalty).backward()
        found.append((out, inputs.grad, *(weight.grad for weight in experts.parameters())))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_orders_sort_by_expert_and_lead_back() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    for experts in (4, 300):
        order, back = moe.orders(chosen, experts)
        assert order.tolist() == [1, 2, 3, 5, 0, 4]
        assert order[back].tolist() == list(range(6))


def test_tables_of_coordinates_turn_as_tables_of_pairs() -> None:
    config = presets.find("flux", "tiny").config
    cpu, grads = torch.device("cpu"), []
    x = torch.randn(2, config.heads, config.text_tokens + config.side**2, sum(config.axes))
    for lean in (False, True):
        table = flux.rotary(dataclasses.replace(config, lean=lean), cpu)
        inputs = x.clone().requires_grad_()
        out = flux.turn(inputs, table)
        out.square().sum().backward()
        grads.append((out, inputs.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--no-flat-gradients", "--no-flat-gradients needs --parallel zero1"),
        ("--no-flat-gradients --parallel zero1 --precision bf16", "--reduce bf16"),
        ("--lean --model llama", "--lean works with --model moe and flux only"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(flags.split())
    assert says in capsys.readouterr().err
