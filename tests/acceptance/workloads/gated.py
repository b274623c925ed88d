"""Which figures a run judges by bounds. In: a row of devices.json, a count, a tier. Out: metrics, conditions.

Pure: no device is needed to list them. The checks that record them take their formats, shapes and sizes from
the same tables, and tests hold this list to what real runs recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workloads import large_job, speed_conditions

Figure = tuple[str, dict[str, Any]]

# Metrics of one device, and the feature without which each is not measured.
FORMATS, ATTENTION = "gemm_tflops", ("attention_forward_tflops", "attention_backward_tflops")
# Metrics of a training job, and whether devices run it: memory in GiB, devices, ranks, samples -> yes or no.
JOBS: dict[str, Callable[[float, int, int, int], bool]] = {
    "train_tokens_per_s_per_gpu": large_job.is_run,
    "train_fsdp2_tokens_per_s_per_gpu": large_job.is_fsdp2_run,
}
HOST_LINK, PEER_LINK = ("h2d_gb_per_s", "d2h_gb_per_s"), "p2p_gb_per_s"


def figures(row: Mapping[str, Any], count: int, tier: str = "standard") -> list[Figure]:
    """The figures that `count` devices of a model are judged by, each with what selects its bound."""
    if row["vendor"] == "cpu" or tier in {"gate", "smoke"}:
        return []
    measured = (
        (metric, conditions)
        for metric, known in speed_conditions.CONDITIONS.items()
        for conditions in known
        if tier == "soak" or not speed_conditions.needs_soak(metric, conditions)
    )
    return [
        (metric, selecting)
        for metric, conditions in measured
        for selecting in _on(row, count, metric, conditions)
    ]


def _on(
    row: Mapping[str, Any], count: int, metric: str, conditions: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The conditions with the number of devices, where it selects a bound; nothing if it is not measured."""
    if not _has(row, metric, conditions):
        return
    if metric.endswith(("_busbw", "_latency_us")):
        if count > 1:
            yield {"devices": count, **conditions}
    elif metric in JOBS:
        present = row["memory_bytes"] / large_job.GIB
        if JOBS[metric](present, count, conditions["devices"], conditions["micro_batch"]):
            yield dict(conditions)
    elif metric != PEER_LINK or (count > 1 and row["link"]):
        yield dict(conditions)


def _has(row: Mapping[str, Any], metric: str, conditions: Mapping[str, Any]) -> bool:
    """Whether the model has what the figure is about; it may lack what its row lists."""
    if metric == FORMATS:
        return conditions["dtype"] not in row["lacks"]
    if metric in ATTENTION:
        return f"attention: {conditions['backend']}" not in row["lacks"]
    return metric not in HOST_LINK or bool(row["pcie"])
