"""The jobs of the 8B model: how many ranks, how many samples, how much memory. In: devices. Out: numbers.

Pure: the list of gated figures uses it too.
"""

LARGE_PARAMETERS = 8.03e9
# Measured on H200s (docs/results/training-h200.md): activations of 8,192 tokens, and a constant part.
SAMPLE_GIB, FIXED_GIB = 23.3, 2.0
OUTSIDE_TORCH_GIB = 3.0  # contexts and NCCL's buffers
TWO_SAMPLES_FROM_GIB = 120  # device memory from which a rank takes two samples instead of one
LARGE_RANKS, LARGE_SAMPLES = (2, 4, 8), (1, 2)  # ranks of the job, and samples per rank
GIB = 2**30
# The FSDP2 job has eight of its layers at full width, so that one device with 80 GB can hold it.
FSDP2_RANKS, FSDP2_LAYERS, FSDP2_SAMPLES = (1, 2, 4, 8), 8, 2
FSDP2_PARAMETERS = 2.80e9  # of eight layers and both ends
FSDP2_BYTES, FSDP2_WORK_GIB = 16, 16.1  # per parameter: weights, gradients, moments; and what a rank works in


# The bf16 job of the smoke tier, two layers at full width: 24.2 GiB allocated on one H200, 15.0 on two. The
# pair of jobs that compares 8 with 16 bits: 39.5 (suites-h200-x1-standard.json, -x2-standard.json).
PROXY_STATE_GIB, PROXY_WORK_GIB = 18.4, 5.9
WIDE_GIB = 39.5 + OUTSIDE_TORCH_GIB


def proxy_gib(ranks: int) -> float:
    """The memory in GiB that the bf16 job needs on each device."""
    return PROXY_STATE_GIB / ranks + PROXY_WORK_GIB + OUTSIDE_TORCH_GIB


def ranks_of(devices: int) -> int:
    """The number of devices, rounded down to a power of two, and at least two: one cannot hold the job."""
    return max((ranks for ranks in LARGE_RANKS if ranks <= devices), default=min(LARGE_RANKS))


def samples_of(present_gib: float) -> int:
    """The samples of each rank on devices with this memory."""
    one, two = LARGE_SAMPLES
    return two if present_gib >= TWO_SAMPLES_FROM_GIB else one


def large_gib(ranks: int, samples: int) -> float:
    """The memory in GiB that the job needs on each device; within 0.1 GiB of docs/results/training-h200.md.

    Every rank has weights and gradients of two bytes per parameter each. The rest of the float32 weights and
    both moments are ten bytes per parameter over all ranks. Activations and memory outside torch come on top.
    """
    state = LARGE_PARAMETERS * (2 + 2 + 10 / ranks) / GIB
    return state + FIXED_GIB + SAMPLE_GIB * samples + OUTSIDE_TORCH_GIB


def fsdp2_ranks_of(devices: int) -> int:
    """The number of devices, rounded down to a power of two."""
    return max(ranks for ranks in FSDP2_RANKS if ranks <= max(1, devices))


def fsdp2_gib(ranks: int) -> float:
    """The memory in GiB that the FSDP2 job needs on each device, by its record on one H200."""
    return FSDP2_PARAMETERS * FSDP2_BYTES / ranks / GIB + FSDP2_WORK_GIB + OUTSIDE_TORCH_GIB


def is_run(present_gib: float, devices: int, ranks: int, samples: int) -> bool:
    """Whether these devices, with this memory each, run the job with these ranks and samples."""
    fits = large_gib(ranks, samples) <= present_gib
    return ranks <= devices and (ranks, samples) == (ranks_of(devices), samples_of(present_gib)) and fits


def is_fsdp2_run(present_gib: float, devices: int, ranks: int, samples: int) -> bool:
    """Whether these devices, with this memory each, run the FSDP2 job with these ranks and samples."""
    fits = fsdp2_gib(ranks) <= present_gib
    return (ranks, samples) == (fsdp2_ranks_of(devices), FSDP2_SAMPLES) and fits
