"""Modules whose state, masks, statistics or weights are wrong are seen; and what is passed over is there."""

import sys

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch
from torch.nn import functional
from torch.nn.utils import rnn

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_elsewhere, generated_known, generated_modules
from workloads.generated_judge import Call
from workloads.generated_modules import Case

NET = {
    "input_size": 5,
    "hidden_size": 7,
    "num_layers": 2,
    "bias": True,
    "batch_first": False,
    "bidirectional": True,
}
ROWS = {"batch": 3, "length": 4, "rows": "", "states": True, "lengths": ()}
PACKED = {**ROWS, "rows": "unsorted", "lengths": (2, 4, 3)}
PLACES = {"rows": "", "batch": 2, "length": 9, "mask": "", "padding": ""}
ATTENTION = {"embed_dim": 16, "num_heads": 2, "bias": True, "add_bias_kv": False, "add_zero_attn": False,
             "batch_first": True}  # fmt: skip
ASKED = {**PLACES, "inputs": 1, "other": 9, "weights": True, "averaged": True}
LAYER = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "activation": "relu", "batch_first": True,
         "norm_first": False, "bias": True, "dropout": 0.0}  # fmt: skip
STACK = {**PLACES, "padding": "scattered", "layers": 2, "norm": True, "nested": False, "other": 9}
NORM = {"num_features": 5, "eps": 1e-3, "momentum": 0.1, "affine": True, "track_running_stats": True}
TRAIN, EVAL = (True,), (False,)


def case(name, made, given, modes=TRAIN, dtype="float32"):
    return Case(name, dtype, 1, modes, tuple(made.items()), tuple(given.items()))


CASES = {
    "LSTM": case("LSTM", NET, ROWS),
    "GRU": case("GRU", NET, ROWS),
    "packed": case("LSTM", NET, PACKED),
    "attention": case("MultiheadAttention", ATTENTION, ASKED),
    "masked": case("MultiheadAttention", ATTENTION, {**ASKED, "mask": "bool"}, EVAL),
    "encoder": case("TransformerEncoder", LAYER, STACK, EVAL),
    "dropping": case("TransformerEncoder", {**LAYER, "dropout": 0.5}, STACK, EVAL),
    "norm": case("BatchNorm2d", NORM, {"batch": 3, "rest": (2, 3)}, (True, True)),
    "conv": Case("nn.Conv2d", "float32", 1, sample=1),
    "wrapped": Case("nn.Linear", "float32", 2, wrapped="weight_norm"),
}


def share(name):
    """How far a form of a case is from float64, as a share of its gate: the first beyond it, or the worst."""
    one, worst = CASES[name] if isinstance(name, str) else name, []
    forms = generated_modules.forms_of(one)
    with generated._plain():
        reference = generated._reference(forms[0][1])
        for _, call in forms:
            said = generated._judged(call, generated_modules.needed(one), reference)
            worst += [said[0]] if said else []
            if worst and worst[-1] > 1:
                break
    return max(worst)


def first_state(healthy):
    def lstm(x, states, *rest):
        return healthy(x, tuple(one[:1].expand_as(one).contiguous() for one in states), *rest)

    return lstm


def swapped(healthy):
    def gru(*given):
        out, state = healthy(*given)
        if out.requires_grad:
            out.register_hook(lambda grad: torch.cat(grad.chunk(2, -1)[::-1], -1))
        return out, state

    return gru


def other_gates(healthy):
    def gru(x, state, weights, *rest):
        return healthy(x, state, [one.roll(7) if one.dim() < 2 else one for one in weights], *rest)

    return gru


def one_more(healthy):
    def pack(x, lengths, **given):
        least = min(lengths)
        return healthy(x, [one + (one == least) for one in lengths], **given)

    return pack


def unmasked(healthy):
    return lambda *given: healthy(*given[:-2], None, None)


def over_rows(healthy):
    def attention(*given, average_attn_weights, **more):
        out, weights = healthy(*given, average_attn_weights=False, **more)
        return out, weights.mean(0) if average_attn_weights else weights

    return attention


def biased(healthy):
    def norm(x, mean, var, weight, bias, training, momentum, eps):  # noqa: PLR0917 as torch has it
        before = var.clone()
        out = healthy(x, mean, var, weight, bias, training, momentum, eps)
        count = x.numel() // x.shape[1]
        if training:
            var.copy_(before + (var - before) * (count - 1) / count - before * momentum / count)
        return out

    return norm


def once(healthy):
    calls = []

    def norm(x, mean, var, *rest):
        calls.append(x)
        return (
            healthy(x, mean, var, *rest) if len(calls) % 2 else healthy(x, mean.clone(), var.clone(), *rest)
        )

    return norm


def channels_last(healthy):
    def conv(x, *rest):
        out = healthy(x, *rest)
        turned = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        judged = x.dtype is not torch.float64  # of the table, float64 is the same module
        return out * (torch.arange(out.shape[-1]) > 0) if turned and judged else out

    return conv


def not_loaded(healthy):
    def load(self, state, *given, **more):
        return healthy(self, {key: one * ("bias" not in key) for key, one in state.items()}, *given, **more)

    return load


def wrong_norm(healthy):
    def norm(v, g, dim):
        return healthy(v, g, dim) * (1.0 if v.dtype is torch.float64 else 1 + 2**-9)

    return norm


def dropping(healthy):
    return lambda x, p, *_: healthy(x, p, training=True)


FAULTS = {
    "the second layer begins with the first one's state": ("LSTM", torch._VF, "lstm", first_state),
    "a short row has one element more": ("packed", rnn, "pack_padded_sequence", one_more),
    "a gradient's directions are swapped": ("GRU", torch._VF, "gru", swapped),
    "a bias belongs to another gate": ("GRU", torch._VF, "gru", other_gates),
    "the fast path forgets the padding": ("encoder", torch, "_transformer_encoder_layer_fwd", unmasked),
    "weights are a mean over rows": ("attention", functional, "multi_head_attention_forward", over_rows),
    "the variance that is kept is biased": ("norm", functional, "batch_norm", biased),
    "the second step keeps no statistics": ("norm", functional, "batch_norm", once),
    "a column is lost with channels last": ("conv", functional, "conv2d", channels_last),
    "a bias is not loaded": ("LSTM", torch.nn.Module, "load_state_dict", not_loaded),
    "eval mode drops": ("dropping", functional, "dropout", dropping),
    "a weight's norm is off by 2^-9": ("wrapped", torch, "_weight_norm", wrong_norm),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_module_is_found(fault, monkeypatch):
    name, owner, attribute, change = FAULTS[fault]
    assert share(name) <= 1
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert share(name) > 1


def test_an_unsorted_row_that_is_first_is_found(monkeypatch):
    """The last states come back in the order of lengths."""
    assert share("packed") <= 1
    monkeypatch.setattr(torch.nn.LSTM, "permute_hidden", lambda _, states, __: states)
    assert share("packed") > 1


@pytest.mark.parametrize("added", ["add_bias_kv", "add_zero_attn"])
def test_a_forgotten_mask_is_passed_over_and_there(added):
    """So this fails when torch keeps the mask where keys are added behind."""
    made, given = {**ATTENTION, added: True}, {**ASKED, "mask": "causal"}
    broken = case("MultiheadAttention", made, {**given, "weights": False})
    assert generated_modules.known(broken)
    assert share(broken) > 1
    for healthy in (
        case("MultiheadAttention", made, given),
        case("MultiheadAttention", made, {**given, "weights": False, "mask": "bool"}),
        case("MultiheadAttention", made, {**given, "weights": False, "padding": "right"}),
        case("MultiheadAttention", ATTENTION, {**given, "weights": False}),
    ):
        assert not generated_modules.known(healthy)
        assert share(healthy) <= 1


@pytest.mark.parametrize(
    ("changed", "here", "on_device"),
    [
        ({}, True, True),
        ({"activation": "gelu"}, True, False),
        ({"activation": "gelu", "nhead": 1}, True, True),
        ({"mask": "float"}, False, False),
        ({"mask": "float", "nhead": 1}, True, True),
        ({"mask": "float", "batch_first": False}, True, True),
    ],
)
def test_the_fast_path_of_encoders_is_passed_over_where_it_is_wrong(changed, here, on_device, monkeypatch):
    """Forms without gradients are judged, or they are not."""
    made, given = ({**one, **{k: v for k, v in changed.items() if k in one}} for one in (LAYER, STACK))
    encoder, fast = case("TransformerEncoder", made, given, EVAL), set(generated_modules.NO_GRADIENT)
    assert (fast <= dict(generated_modules.forms_of(encoder)).keys()) == here
    monkeypatch.setattr(generated_elsewhere, "place", lambda: torch.device("cpu"))
    assert (fast <= dict(generated_modules.forms_of(encoder)).keys()) == on_device


@pytest.mark.parametrize("heads", [1, 2])
def test_a_mask_of_numbers_is_nan_by_the_fast_path(heads):
    """So this fails when torch has mended pytorch#118628."""
    layer = torch.nn.TransformerEncoderLayer(8, heads, 8, batch_first=True)
    encoder, x = torch.nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        assert encoder(x, mask=torch.randn(5, 5)).isnan().any() == (heads == 2)
    assert not encoder(x, mask=torch.randn(5, 5)).isnan().any()


@pytest.mark.parametrize(("size", "passed"), [(1e6, True), (1.0, False)])
def test_backward_of_scores_beyond_float32_is_not_judged_by_itself(size, passed):
    """Of a processor's flash kernel, whose sum of float32 is one of its operands."""
    q, k, v = (torch.randn(1, 1, 33, 32, generator=torch.Generator().manual_seed(n)) for n in range(3))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    call = Call(kernel, (v, q * size, k, v, v, v[..., 0], 0.0, False), {}, torch.float32)
    got, some = generated_known.passed_over(kernel, call, [q + 1, k, v], [q.double(), k, v])
    assert some == passed
    assert torch.equal(got[0], q) == passed


@pytest.mark.parametrize("exponent", [2 / 3, -1 / 3, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_exponent_is_rounded_to_halves_and_nothing_else_is_passed_over(exponent, dtype):
    kernel = torch.ops.aten.pow.Tensor_Scalar
    x = torch.linspace(0.01, 1000, 129).to(dtype)
    call = Call(kernel, (x, exponent), {}, dtype)
    right, got = x.double() ** exponent, x**exponent
    off = ((got.double() - right) / right).abs().max() / torch.finfo(dtype).eps
    assert (off > 0.51) == (exponent != 1.5)
    (shown,), some = generated_known.passed_over(kernel, call, [got], [right])
    assert some == (exponent != 1.5)
    assert torch.equal(shown, right.to(dtype))
    wrong = got * (1 + 4 * torch.finfo(dtype).eps)
    (shown,), _ = generated_known.passed_over(kernel, call, [wrong], [right])
    assert torch.equal(shown, wrong)
