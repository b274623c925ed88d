"""Whether a machine can certify a stack. In: its devices, the stack, a checkout. Out: reasons against it.

A machine can certify if its devices are of one model that the stack's code runs on, if `tested_on` names it
where the stack has such a list, and if every figure that the suites judge there has a bound. Which figures
those are is known to the suites alone (`harness.bounds.missing`, which the lint uses too). `stackcheck list`,
the early warning of a run and the verdict all ask here, so they cannot differ.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stackcheck import vendors
from stackcheck.matrix.matrix import TestTarget
from stackcheck.policy import Tier
from stackcheck.suite import bounds
from stackcheck.suite.subject import Subject
from stackcheck.vendors import Host

MISSING = "bounds missing:"  # in the reason against a machine that only lacks bounds
SHOWN_BOUNDS = 3  # of the missing ones; a model without any has sixty


def before_a_run(subject: Subject, host: Host, tier: Tier, root: Path) -> tuple[str, ...]:
    """The reasons why a run of an image on this host cannot end PASSED, in the verdict's words."""
    models = [device.model for device in host.devices]
    archs = subject.stack.archs if subject.stack else ()
    missing = missing_of(models, root, tier)
    return tuple(reasons_against(models, machines=subject.machines, archs=archs, missing=missing))


def missing_of(models: Sequence[str], root: Path, tier: Tier) -> tuple[str, ...]:
    """The bounds that GPUs of one known model lack; of others, the models themselves are the reason."""
    gpus = {str(row["model"]) for row in vendors.device_table() if row["vendor"] != "cpu"}
    (model, *others) = set(models) or {""}
    return () if others or model not in gpus else missing_bounds(root, model, len(models), tier)


def reasons_against(
    models: Iterable[str],
    *,
    machines: Sequence[TestTarget] | None,
    archs: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> Iterator[str]:
    """Why a machine with devices of these models cannot certify; nothing if it can. Pure.

    Additional devices make a different machine too, because bounds are per model and count.

    Args:
        models: The model of each device.
        machines: The machines that the stack names (`tested_on`); None: it names none in particular.
        archs: The architectures that the stack holds code for; empty: not declared.
        missing: The bounds that the checkout lacks for this model and count.
    """
    found = Counter(models)
    got = " and ".join(f"{model} x{count}" for model, count in sorted(found.items())) or "no device"
    if machines is not None and not any(found == Counter({one.device: one.count}) for one in machines):
        named = " or ".join(f"{machine.device} x{machine.count}" for machine in machines) or "none"
        yield f"the machine has {got}, and the stack names {named} (tested_on in matrix.yaml)"
        return
    if len(found) > 1:
        yield f"the machine has {got}, and a bound is for devices of one model"
        return
    table = {str(row["model"]): str(row["arch"]) for row in vendors.device_table()}
    arch = next((table[model] for model in found if model in table), "")
    if archs and arch and not any(serves(one, arch) for one in archs):
        yield f"the machine has {got} ({arch}), and the stack holds code for {', '.join(archs)}"
    if missing:
        yield f"{got} is known, and cannot be certified yet: {_words(missing)}"


def serves(built: str, arch: str) -> bool:
    """Whether code for one architecture runs on another.

    NVIDIA's runs on a later minor of its major too (CUDA C++ programming guide, binary compatibility).
    """
    if not (built.startswith("sm_") and arch.startswith("sm_")):
        return built == arch
    (major, minor), (have, least) = ((int(name[3:-1]), int(name[-1])) for name in (arch, built))
    return major == have and minor >= least


@functools.cache
def missing_bounds(root: Path, model: str, count: int, tier: Tier = "standard") -> tuple[str, ...]:
    """The figures without a bound that a run of the tier judges on `count` devices of a model."""
    return bounds.missing(root, model, count, tier)


def _words(missing: Sequence[str]) -> str:
    shown, hidden = missing[:SHOWN_BOUNDS], len(missing) - SHOWN_BOUNDS
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"{MISSING} {'; '.join(shown)}{more}; next: stackcheck baseline"
