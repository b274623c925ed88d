"""Whether a stack can be certified on a machine, said before anything is built.

In: stacks, a machine (this one or any that devices.json knows), this checkout. Out: an `Outlook` for each
stack: it can be certified there, or every known reason why not. `outlook` is pure, and agrees with the
verdict that a run would end with: without a reason, no required check is known to fail without a waiver.
"""

import datetime as dt
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stackcheck import vendors
from stackcheck.errors import (
    BuildError,
    ChecksFailedError,
    ConfigurationError,
    MachineUnfitError,
    StackcheckError,
)
from stackcheck.matrix import known_issues
from stackcheck.matrix.known_issues import KnownIssue, KnownIssues
from stackcheck.matrix.stack import Stack
from stackcheck.policy import Policy, is_advisory, names
from stackcheck.suite import bounds, certifiable, expected
from stackcheck.suite.bounds import DriverSupport
from stackcheck.vendors import Host, Vendor

Kind = Literal["lock", "vendor", "machine", "driver", "fault"]
# In the order in which the flow would meet them: the error that it would end with.
ERRORS: Mapping[Kind, type[StackcheckError]] = {
    "lock": BuildError,
    "vendor": MachineUnfitError,
    "machine": MachineUnfitError,
    "driver": MachineUnfitError,
    "fault": ChecksFailedError,
}
SHOWN_CHECKS = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides of a machine: the model and the architecture of each device, and the driver."""

    vendor: Vendor
    models: tuple[str, ...]
    archs: tuple[str, ...]
    driver: str | None = None  # None: not asked for, or a host without one
    named: bool = False  # whether the user named it; else it is this host

    def words(self) -> str:
        """Models, counts and driver: `MI300X x8, driver 30.30.3`."""
        return f"{self.device_words()}, driver {self.driver}" if self.driver else self.device_words()

    def device_words(self) -> str:
        """Models and counts: `MI300X x8`."""
        counts = Counter(self.models)
        return " and ".join(f"{model} x{count}" for model, count in sorted(counts.items())) or "no device"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a stack cannot be certified on a machine."""

    kind: Kind
    short: str
    says: str
    next_step: str  # the command to type, or what to change


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known of a stack on a machine before it is built; without a reason it can be certified."""

    stack_id: str
    reasons: tuple[Reason, ...] = ()

    @property
    def words(self) -> str:
        """`yes`, or the reasons in short."""
        return "no: " + "; ".join(reason.short for reason in self.reasons) if self.reasons else "yes"

    def error(self) -> StackcheckError:
        """The error for a stack that is not built for these reasons."""
        first = self.reasons[0]
        return ERRORS[first.kind](
            "this stack cannot be certified here, so it is not built",
            where=self.stack_id,
            got="\n    ".join(reason.says for reason in self.reasons),
            expected="a locked stack, a machine that it names, and no known fault without a waiver",
            next_step=f"{first.next_step}; or build and test it all the same: --anyway",
        )

    def as_json(self) -> dict[str, Any]:
        """What `--json` says."""
        told = [{"kind": reason.kind, "says": reason.says} for reason in self.reasons]
        return {"can_be_certified": not self.reasons, "reasons": told}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What this checkout knows of a machine.

    Attributes:
        drivers: Runtime -> what the documents say of the machine's driver with it.
    """

    policy: Policy  # waivers and advisory checks
    today: dt.date  # decides which waivers hold
    issues: KnownIssues
    checks: tuple[str, ...] = ()  # the ids that a certifying run on this machine must hold
    missing_bounds: tuple[str, ...] = ()  # the figures of such a run that have no bound
    no_checks: str | None = None  # why there is no such list; None if there is
    drivers: Mapping[str, DriverSupport] = field(default_factory=dict)
    site_locks: bool = False  # whether a folder of wheels will lock the stacks


def here() -> Machine:
    """This host as a machine."""
    return of_host(vendors.host())


def of_host(host: Host) -> Machine:
    """A host's devices and driver."""
    return Machine(
        vendor=host.vendor,
        models=tuple(device.model for device in host.devices),
        archs=tuple(device.arch for device in host.devices),
        driver=host.driver,
    )


def named(text: str, driver: str | None = None) -> Machine:
    """The machine that a user names as `MODEL` or `MODEL:COUNT`.

    Raises:
        ConfigurationError: devices.json has no such model, or the count is no number from 1 on.
    """
    model, colon, number = text.partition(":")
    rows = {str(row["model"]).lower(): row for row in vendors.device_table()}
    models = ", ".join(str(row["model"]) for row in rows.values())
    row = rows.get(model.lower())
    count = int(number) if number.isascii() and number.isdecimal() else 0
    if row is None or (colon and count < 1):
        raise ConfigurationError(
            f"{text} is not a machine",
            got=text,
            expected=f"MODEL or MODEL:COUNT, with one of the models {models}",
            next_step="stackcheck list --machine H100:8",
        )
    count = max(count, 1)
    return Machine(
        vendor=row["vendor"],
        models=(str(row["model"]),) * count,
        archs=(str(row["arch"]),) * count,
        driver=driver,
        named=True,
    )


def of_all(
    stacks: Sequence[Stack], machine: Machine, root: Path, policy: Policy, *, site_locks: bool = False
) -> tuple[Outlook, ...]:
    """What this checkout says of each stack on a machine.

    Raises:
        ConfigurationError: A file of the checkout is wrong.
    """
    known = known_of(stacks, machine, root, policy, site_locks=site_locks)
    return tuple(outlook(stack, machine, known) for stack in stacks)


def known_of(
    stacks: Sequence[Stack], machine: Machine, root: Path, policy: Policy, *, site_locks: bool = False
) -> Known:
    """Everything that `outlook` needs of the checkout, read once for all stacks."""
    checks: tuple[str, ...] = ()
    no_checks = None
    count = max(1, len(machine.models))
    try:
        tier = policy.certifies[machine.vendor]
        checks = expected.check_ids(root, vendor=machine.vendor, tier=tier, count=count)
    except ConfigurationError as error:
        no_checks = f"{error.what}: {error.got}"
    return Known(
        policy=policy,
        today=dt.datetime.now(dt.UTC).date(),
        missing_bounds=certifiable.missing_of(machine.models, root, policy.certifies[machine.vendor]),
        issues=known_issues.load_known_issues(root / "images" / "known-issues.yaml"),
        checks=checks,
        no_checks=no_checks,
        drivers=_drivers(stacks, machine, root),
        site_locks=site_locks,
    )


def outlook(stack: Stack, machine: Machine, known: Known) -> Outlook:
    """Whether a stack can be certified on a machine, and every reason why not."""
    reasons = [] if known.site_locks else [*_lock(stack)]
    if stack.vendor != machine.vendor:
        reasons.append(_vendor(stack, machine))
    else:
        reasons += [*_machine(stack, machine, known), *_driver(stack, machine, known)]
        reasons += _faults(stack, machine, known)
    return Outlook(stack_id=stack.id, reasons=tuple(reasons))


def _lock(stack: Stack) -> Iterator[Reason]:
    if stack.missing:
        yield Reason(
            kind="lock",
            short="not locked",
            says=f"not locked: {'; '.join(stack.missing)}",
            next_step=f"stackcheck lock {stack.id}, on a machine that reaches what is named above",
        )


def _vendor(stack: Stack, machine: Machine) -> Reason:
    wanted = {"amd": "AMD GPUs", "nvidia": "NVIDIA GPUs", "cpu": "a host without GPUs"}[stack.vendor]
    return Reason(
        kind="vendor",
        short=f"it is for {wanted}",
        says=f"it is for {wanted}, and the machine has {machine.words()}",
        next_step=f"run it on a machine with {wanted}: stackcheck list {stack.id} --machine MODEL:COUNT",
    )


def _machine(stack: Stack, machine: Machine, known: Known) -> Iterator[Reason]:
    """The reasons against the devices of a machine."""
    told = certifiable.reasons_against(
        machine.models, machines=stack.tested_on, archs=stack.archs, missing=known.missing_bounds
    )
    reasons = [*told]
    if stack.vendor != "cpu" and stack.torch is None:
        reasons.append("the stack has no torch, and is never certified for training")
    if known.no_checks:
        reasons.append(known.no_checks)
    for says in reasons:
        yield Reason(
            kind="machine",
            short=says.partition(",")[0] if stack.torch is None else f"not for {machine.device_words()}",
            says=says,
            next_step="run the same command on such a machine, or see tested_on in docs/reference/matrix.md",
        )


def _driver(stack: Stack, machine: Machine, known: Known) -> Iterator[Reason]:
    found = known.drivers.get(stack.runtime_version or "")
    if found and found.state == "refused":
        yield Reason(
            kind="driver",
            short=f"driver {machine.driver} is refused",
            says=found.says,
            next_step="install a driver that the documents list for this runtime (docs/reference/matrix.md)",
        )


def _faults(stack: Stack, machine: Machine, known: Known) -> Iterator[Reason]:
    waivers = known.policy.waivers_for(stack.id, known.today)
    required = [name for name in known.checks if not is_advisory(name, known.policy.advisory)]
    for issue in faults_on(stack, machine, known.issues):
        failing = [name for name in required if any(names(check, name) for check in issue.checks)]
        open_ = [name for name in failing if not any(waiver.covers(name) for waiver in waivers)]
        if issue.severity == "refuse" or open_:
            declared = [one for one in known.policy.expects_failures if one.is_for(stack.id)]
            said = all(any(one.covers(name) for one in declared) for name in open_)
            yield _fault(issue, open_, said=said)


def faults_on(stack: Stack, machine: Machine, issues: KnownIssues) -> tuple[KnownIssue, ...]:
    """The reported faults of a stack on the architecture and with the driver of a machine."""
    return issues.of(stack.values, dict.fromkeys(machine.archs), (machine.driver,))


def _fault(issue: KnownIssue, failing: Sequence[str], *, said: bool) -> Reason:
    shown = ", ".join(failing[:SHOWN_CHECKS]) + (
        f" and {len(failing) - SHOWN_CHECKS} more" if len(failing) > SHOWN_CHECKS else ""
    )
    why = "which matrix.yaml expects" if said else "and no waiver covers that"
    then = f"expected to fail {shown}, {why}" if failing else "it is refused"
    return Reason(
        kind="fault",
        short=issue.issue.removeprefix("https://github.com/").partition("/blob/")[0],
        says=f"{issue.id} ({issue.issue}; {issue.fix}): {issue.symptom.rstrip('.')}; {then}",
        next_step="take a stack without this fault, or waive it in matrix.yaml until a date",
    )


def _drivers(stacks: Sequence[Stack], machine: Machine, root: Path) -> dict[str, DriverSupport]:
    """What the suites' table of drivers says of the machine's driver with each runtime of these stacks."""
    asked = {stack.runtime_version for stack in stacks if stack.vendor == machine.vendor}
    runtimes = sorted(runtime for runtime in asked if runtime)
    known = {str(row["model"]) for row in vendors.device_table()}
    if not runtimes or not {*machine.models} <= known or not machine.models or not _says_driver(machine):
        return {}
    each = {"vendor": machine.vendor, "driver": machine.driver, "serves": None}
    question = {
        "model": machine.models[0],
        "entries": [],
        "figures": [],
        "drivers": [{**each, "runtime": runtime} for runtime in runtimes],
    }
    told = json.loads(bounds.ask_suites(root, question))["drivers"]
    return {
        runtime: DriverSupport.model_validate(support)
        for runtime, support in zip(runtimes, told, strict=True)
    }


def _says_driver(machine: Machine) -> bool:
    """A machine that the user names without a driver may have any; a host without one has none."""
    return machine.driver is not None or not machine.named
