"""Why an AMD GPU runs slower than it could. In: two readings of its metrics. Out: a `Throttle`.

MI300 and later count, per reason, for how long clocks were held down: growth of an unfit counter voids
figures. MI200 tells the reasons of the moment.
"""

from collections.abc import Mapping
from typing import Any

from vendors import Absence, Throttle, amd_kernel, is_known
from vendors.amd_library import field

UNFIT_ACCUMULATORS = {
    "prochot_residency_acc": "prochot",
    "socket_thm_residency_acc": "socket temperature",
    "vr_thm_residency_acc": "voltage regulator temperature",
    "hbm_thm_residency_acc": "HBM temperature",
}
NORMAL_ACCUMULATORS = {"ppt_residency_acc": "package power"}
Metrics = Mapping[str, Any] | Absence


def throttle(bdf: str, metrics: Metrics, earlier: Metrics) -> Throttle:
    """By accumulators that grew since `earlier`; on MI200 by the reasons of now; elsewhere nothing is known.

    MI300's driver before gpu_metrics v1.6 writes a zero that means nothing ("Throttle status is not reported
    through metrics now", smu_v13_0_6_ppt.c), so that zero is not read.
    """
    counters = {name: field(metrics, name) for name in UNFIT_ACCUMULATORS | NORMAL_ACCUMULATORS}
    if all(is_known(counter) for counter in counters.values()):
        return Throttle(
            unfit=_grown(UNFIT_ACCUMULATORS, metrics, earlier),
            normal=_grown(NORMAL_ACCUMULATORS, metrics, earlier),
            accumulators={UNFIT_ACCUMULATORS[name]: counters[name] for name in UNFIT_ACCUMULATORS},
            reading="accumulators",
        )
    reasons = amd_kernel.throttles(bdf)
    if reasons is None:
        failed = isinstance(metrics, Absence) and metrics.is_failure
        return Throttle(reading=metrics if failed else Absence.NOT_SUPPORTED)
    return Throttle(unfit=reasons[0], normal=reasons[1], reading="indep_throttle_status")


def _grown(names: Mapping[str, str], metrics: Metrics, earlier: Metrics) -> tuple[str, ...]:
    before = {name: field(earlier, name) for name in names}
    after = {name: field(metrics, name) for name in names}
    return tuple(
        words
        for name, words in names.items()
        if is_known(before[name]) and is_known(after[name]) and int(after[name]) > int(before[name])
    )
