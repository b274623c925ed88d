"""Faults of training: a job that does not learn, resumes wrongly or runs slow code never passes."""

# ruff: noqa: E501 - a table of faults reads in rows

import pytest

from planting import Fault

SUITE = "test_training.py::"
NO_NUMBER = (
    "lambda run, step: original(run, step) * (float('nan') if run.options.precision == 'bf16' else 1.0)"
)
# Jobs that end soon after their checkpoint (at step 23 of 60, and at step 9 of 20), and a second launch that
# is forked like the first. The healthy run resumes in new processes; what these faults break shows in a few
# steps.
SHORT = {
    "harness.training_jobs:launched": "lambda launch, flags, *a, fresh=False, **k: original(launch, "
    "{name: [{60: 26, 20: 12}.get(word, word) for word in words] for name, words in flags.items()}, *a, **k)"
}


def with_flash_attn_4(factor: float) -> dict[str, str]:
    """torch's attention times a factor in the place of FlashAttention 4, and under its name."""
    named = (
        "{'backend': 'fa4' if flash4._chosen else 'flash', 'by': 'kernels', 'operators': [], 'kernels': []}"
    )
    return {
        "harness.about:has_flash_attn_4": "lambda: True",
        "attention_backend:order": "lambda options, world: "
        "flash4.chosen() if options.attention == 'fa4' else contextlib.nullcontext()",
        "attention_backend:chosen": f"lambda *a, **k: {named}",
        "flash4:attend": f"lambda q, k, v, **o: {factor} * torch.nn.functional.scaled_dot_product_attention("
        "q, k, v, is_causal=o['causal'], enable_gqa=True)",
    }


FAULTS = (
    Fault(
        "a trainer that ignores the choice of FlashAttention 4",
        SUITE + "test_trains_with_flash_attn_4",
        patches={"harness.about:has_flash_attn_4": "lambda: True"},
        says="expected fa4",
        another=True,
    ),
    Fault("a FlashAttention 4 that trains otherwise than torch", SUITE + "test_trains_with_flash_attn_4", patches=with_flash_attn_4(2.0), says="with torch's attention"),
    Fault("a learning rate of zero", SUITE + "test_loss_falls", patches={"train:learning_rate": "lambda *a: 0.0"}),
    Fault(
        "a learning rate a tenth too large",
        SUITE + "test_loss_lies_in_the_reference_band",
        patches={"train:learning_rate": "lambda *a: 1.1 * original(*a)"},
        says="outside the band",
    ),
    Fault(
        "ranks with other weights",
        SUITE + "test_ranks_agree",
        patches={
            **SHORT,
            "metrics:digest": "lambda w: original(w)[:-1] + str(torch.distributed.get_rank())",
        },
        says="the ranks ended with different losses",
    ),
    Fault(
        "a checkpoint that is not loaded",
        SUITE + "test_resume_is_bit_equal",
        patches={**SHORT, "checkpoint:Checkpoints.load": "lambda self, folder, state, **k: None"},
        says="losses differ after resuming",
    ),
    Fault(
        "an uneven shard that loses its last row",
        SUITE + "test_resume_with_uneven_shards",
        patches={
            **SHORT,
            "checkpoint:Checkpoints.load": "lambda self, folder, state, **k: "
            "(original(self, folder, state, **k), "
            "[v.to_local()[-1:].zero_() for v in state['job']['model'].values() if v.shape[0] % 2])[0]",
        },
        says="differ after resuming",
    ),
    Fault("a fast bf16 job whose losses are no numbers", SUITE + "test_throughput[2]", patches={"train:accumulate": NO_NUMBER}, says="a loss is not finite", another=True),
    Fault(
        "a bf16 job that does not learn",
        SUITE + "test_bf16_job_learns",
        patches={
            "train:learning_rate": "lambda step, peak, options: "
            "original(step, peak, options) * (options.precision != 'bf16')"
        },
        says="the mean of the last losses is",
    ),
    Fault(
        "attention in plain operations",
        SUITE + "test_attention_that_ran_is_fused",
        patches={"attention_backend:order": "lambda *a: sdpa_kernel([SDPBackend.MATH])"},
        says="math ran",
    ),
    Fault(
        "a preflight that is slow on a machine with clean telemetry",
        SUITE + "test_throughput",
        tier="smoke",
        patches={"preflight:problems": "lambda *a: ['rank 1 is slow']"},
        says="rank 1 is slow",
    ),
    Fault(
        "every second sample read twice",
        SUITE + "test_loss_lies_in_the_reference_band",
        patches={"data:Text.sample": "lambda self, number: original(self, number // 2)"},
        says="outside the band",
        another=True,
    ),
    Fault("a bf16 job whose losses are no numbers", SUITE + "test_bf16_job_learns", patches={"train:accumulate": NO_NUMBER}, says="a loss is not finite", another=True),
)  # fmt: skip
HANG = Fault(
    "a first step that never ends",
    SUITE + "test_loss_falls",
    patches={
        "train:train": "lambda run: __import__('time').sleep(600)",
        "harness.launch:launch": "lambda *a, **k: original(*a, **{**k, 'timeout_s': 60})",
    },
    says="did not end in 60 s, last: [",
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow  # test_hang_faults.py and test_process_faults.py end a job and its ranks by a limit
def test_a_hang_is_named_by_its_phase_with_the_stacks_of_every_rank(plant):
    (check,) = plant(HANG)["checks"]
    assert check["cause"] == "time_limit"
    assert "] build; stacks in" in check["reason"]
    assert "--- rank-000" in check["reason"]
    assert "--- rank-001" in check["reason"]


@pytest.mark.slow
def test_a_healthy_flash_attn_4_passes(plant):
    plant(
        Fault(
            "nothing",
            SUITE + "test_trains_with_flash_attn_4",
            outcome="passed",
            patches=with_flash_attn_4(1.0),
        )
    )


@pytest.mark.slow
def test_a_healthy_job_passes(plant):
    plant(Fault("nothing", "test_training.py", outcome="passed", tier="smoke"))
