"""Gates that follow the architecture: what MI200 documents passes there, and fails everywhere else.

The matrix units of MI200 are simulated on a CPU: subnormal operands are zero, and fp16 is computed in bf16
in backward.
"""

import random

import pytest

from harness import models

torch = pytest.importorskip("torch", reason="the suites need torch")

from workloads import (  # noqa: E402
    arch,
    attention_masks,
    attention_refusals,
    convolution,
    flash_package,
    gemm,
    repeatability,
)

MM, LINEAR = torch.mm, torch.nn.functional.linear


def flush(tensor: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(tensor.dtype).tiny
    return torch.where(tensor.abs() < least, torch.zeros_like(tensor), tensor)


def flushing_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(flush(MM(flush(a).float(), flush(b).float()).to(a.dtype)))


class Alternate(torch.autograd.Function):
    """A linear layer whose backward rounds its operands to bf16."""

    @staticmethod
    def forward(context: object, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, w)  # type: ignore[attr-defined]
        return (x.float() @ w.float().t() + bias.float()).to(x.dtype)

    @staticmethod
    def backward(context: object, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = (tensor.bfloat16().float() for tensor in context.saved_tensors)  # type: ignore[attr-defined]
        rounded = g.bfloat16().float()
        dx, dw = (part.to(g.dtype) for part in (rounded @ w, rounded.t() @ x))
        return dx, dw, g.float().sum(0).to(g.dtype)


def on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "name", lambda: name)


def failures(readings: object) -> list[str]:
    return [str(reading) for reading in readings if not reading.passed]  # type: ignore[attr-defined]


ARCHS = pytest.mark.parametrize(("name", "fails"), [("gfx90a", False), ("gfx942", True), ("sm_90", True)])


@ARCHS
def test_flushed_subnormals_pass_where_they_are_documented(name, monkeypatch, *, fails):
    on(name, monkeypatch)
    monkeypatch.setattr(torch, "mm", flushing_mm)
    found = failures(gemm._mm(200_003, 7, 1, layout="NN", dtype="fp16"))
    assert bool(found) is fails, found


@ARCHS
def test_the_alternate_backward_passes_where_it_is_documented(name, monkeypatch, *, fails):
    on(name, monkeypatch)
    monkeypatch.setattr(gemm.F, "linear", Alternate.apply)
    found = failures(gemm._linear("fp16"))
    assert bool(found) is fails, found


def test_the_alternate_path_is_no_excuse_for_bf16_or_forward(monkeypatch):
    on("gfx90a", monkeypatch)
    assert arch.backward_roundoff(torch.bfloat16) == arch.backward_roundoff(torch.float32) == 0
    rounding = lambda x, w, bias: LINEAR(x.bfloat16().half(), w.bfloat16().half(), bias)  # noqa: E731
    monkeypatch.setattr(gemm.F, "linear", rounding)
    assert any(text.startswith("forward") for text in failures(gemm._linear("fp16")))


@ARCHS
def test_a_convolution_with_bf16_in_backward(name, monkeypatch, *, fails):
    on(name, monkeypatch)
    plain = convolution.step

    def step(problem: object, x: torch.Tensor, w: torch.Tensor, g: object = None) -> tuple[torch.Tensor, ...]:
        out, _, _, used = plain(
            problem, x.float().detach().requires_grad_(), w.float().detach().requires_grad_(), g
        )
        half = used.half()
        rounded = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
        _, dx, dw, _ = plain(problem, *rounded, half.bfloat16().double())
        return out.half(), dx.half(), dw.half(), half

    problem = convolution.PROBLEMS["3x3 stride 2"]
    monkeypatch.setattr(
        convolution, "step", lambda p, x, w, g=None: (step if x.dtype == torch.float16 else plain)(p, x, w, g)
    )
    found = failures(convolution._against_float64(problem, torch.float16, torch.contiguous_format))
    assert bool(found) is fails, found


def test_bits_are_promised_only_where_deterministic_algorithms_are_asked_for(monkeypatch):
    """A product that adds up with atomics unless it is asked not to, as hipBLAS on ROCm."""
    calls = 0

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += not torch.are_deterministic_algorithms_enabled()
        return MM(a, b) + calls

    monkeypatch.setattr(torch, "mm", mm)
    report = repeatability.deterministic("bf16", 3)
    assert not [case for case in report["cases"] if case["failures"]]
    assert report["default"] == 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_product_whose_bits_differ_in_deterministic_mode_fails(monkeypatch):
    numbers = iter(range(1000))
    monkeypatch.setattr(torch, "mm", lambda a, b: MM(a, b) + next(numbers))
    report = repeatability.deterministic("bf16", 3)
    assert [case["name"] for case in report["cases"] if case["failures"]] == ["product 3 times"]


def test_the_triton_backend_of_flash_attn_is_not_held_to_what_it_ignores(monkeypatch):
    monkeypatch.setattr(attention_masks.flash_package, "available", lambda: True)
    monkeypatch.setattr(attention_masks, "lacks", lambda _way: None)
    names = [[name for name, _ in flash_package._cases("bf16", ())]]
    found = [attention_masks.lacks_window("package")]
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    names.append([name for name, _ in flash_package._cases("bf16", ())])
    found.append(attention_masks.lacks_window("package"))
    assert [len(one) for one in names] == [1, 0]
    assert found[0] is None
    assert found[1] is not None
    assert found[1]["package"] == "flash-attn extension"
    assert attention_masks.lacks_window("mask") is None


FEATURES = {"fp8": arch.fp8, "tf32": arch.has_tf32}


@pytest.mark.parametrize("row", models.table(), ids=lambda row: row["model"])
def test_kernels_can_use_what_the_row_of_their_device_does_not_lack(row, monkeypatch):
    """Else a check is skipped without a reason that the judge accepts, or judged without one."""
    on(row["arch"] or "cpu", monkeypatch)
    lacks = {feature for feature, has in FEATURES.items() if not has()}
    works = arch.attention_backends()
    lacks |= {f"attention: {way}" for way in attention_refusals.MAY_REFUSE if way not in works}
    told = {word for word in row["lacks"] if word in FEATURES or word.startswith("attention: ")}
    assert lacks == told
    assert {"fp8", "tf32"} & row["peak_tflops"].keys() <= FEATURES.keys() - lacks


def test_an_architecture_that_nobody_named_is_refused(monkeypatch):
    """Drawn: whatever is asked of it, nothing is taken for absent."""
    drawn = random.Random(31)
    names = {f"sm_{drawn.randrange(20, 200)}" for _ in range(60)}
    names |= {f"gfx{drawn.randrange(700, 1400)}" for _ in range(60)}
    unknown = [name for name in sorted(names) if not name.startswith(tuple(arch.ROWS))]
    assert len(unknown) > 80
    for name in unknown:
        on(name, monkeypatch)
        for asked in (arch.attention_backends, arch.fp8, arch.has_tf32, arch.has_tma):
            with pytest.raises(LookupError, match=f"has no row for {name}"):
                asked()
