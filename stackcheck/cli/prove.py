"""The verb `prove`. In: a checkout. Out: a table of faults and the checks that caught them."""

import dataclasses
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, counted, print_json, print_table
from stackcheck.errors import ChecksFailedError, NothingSelectedError
from stackcheck.proof import prove

app = opt.new_app()

MAX_AGE = dt.timedelta(days=365)  # the image only has to be genuine and undamaged to run the proof
TIMEOUT_S = 24 * 3600.0
COLUMNS = ("FAULT", "EXPECTED CATCHER", "VENDOR", "STATE")
REASON_LINES = 3
Runner = Callable[[tuple[str, ...], Path, Progress], prove.FaultRun]


@app.command("prove")
def prove_checks(
    *,
    here: Annotated[
        bool, opt.option("--here", "Use this host's torch (Python: $STACKCHECK_SUITE_PYTHON), not an image.")
    ] = False,
    image: Annotated[
        str | None,
        opt.option("--image REF", "The certified cpu image to run in.", "the matrix's cpu stack in oci:dist"),
    ] = None,
    workers: Annotated[int, opt.option("--workers N", "How many faults run at a time.", min=1)] = 2,
    quick: Annotated[
        bool, opt.option("--quick", "Leave out long healthy runs, which a run of the suites repeats.")
    ] = False,
    only: Annotated[
        str | None,
        opt.option(
            "--only PATTERN",
            "Plant only faults whose check, name or test has this in it; * and ? are wildcards.",
            "every fault",
        ),
    ] = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Plant every fault and show which check catches it; exit 6 unless every check catches its faults."""
    root = root.resolve()
    report = Progress()
    # Refuse an image before the run over fabricated hosts, which takes minutes.
    run_in_torch = _on_this_host() if here else _in_image(image or _cpu_image(root), report)
    with prove.beside(prove.on_fabricated_hosts(workers, only=only), root=root, report=report) as hosts:
        parts = [run_in_torch(prove.in_torch(workers, quick=quick, only=only), root, report), hosts()]
    proof = prove.join(parts, only)
    if only and not (proof.faults or proof.healthy or proof.failed):
        raise NothingSelectedError(
            "no planted fault has this in its check, name or test",
            where="--only",
            got=only,
            next_step="plant one: docs/guides/write-a-check.md",
        )
    print_json(_document(proof)) if as_json else _print(proof)
    if not proof.holds:
        raise typer.Exit(ChecksFailedError.exit_code)


def _on_this_host() -> Runner:
    python = prove.suite_python()
    return lambda arguments, root, report: prove.here(arguments, root=root, report=report, python=python)


def _in_image(reference: str, report: Progress) -> Runner:
    """Verify and fetch a certified image; return what runs a proof in it, with the checkout mounted."""
    from stackcheck import vendors
    from stackcheck.certificate import job, keys, pull, verify
    from stackcheck.certificate.for_host import Wanted
    from stackcheck.engine.client import Engine

    verified = verify.verify(
        reference, Wanted(device_model="CPU", driver=None), public_key=keys.load_public(None), max_age=MAX_AGE
    )
    engine = Engine.connect()
    name = pull.pull(verified, engine, report=report)

    def run(arguments: tuple[str, ...], root: Path, report: Progress) -> prove.FaultRun:
        reader = prove.FaultRunReader(report)
        needs = vendors.module("cpu").container_needs()
        spec = job.container(name, ("python", *arguments), needs, root)
        engine.run(dataclasses.replace(spec, on_line=reader, timeout_s=TIMEOUT_S))
        return reader.finished(f"{name}: python {' '.join(arguments)}")

    return run


def _cpu_image(root: Path) -> str:
    """Where `stackcheck images` publishes the stack that needs no GPU."""
    from stackcheck.matrix import resolve

    for stack in resolve.usable(root):
        if stack.vendor == "cpu":
            return f"oci:{root / 'dist'}:{stack.id}"
    raise NothingSelectedError("the matrix has no cpu stack to run the faults in", next_step="use --here")


def _print(proof: prove.Proof) -> None:
    rows = [(fault.name, fault.check, fault.vendor, _word(fault)) for fault in proof.faults]
    healthy = [(f"healthy: {run.name}", run.check, run.vendor, run.state) for run in proof.healthy]
    print_table(COLUMNS, [*rows, *healthy])
    for fault in proof.faults:
        if fault.state != "caught":
            _print_reason(fault, fault.state)
    for run in proof.healthy:
        if run.state != "passed":
            _print_reason(run, run.state)
    for test in proof.failed:
        print(f"failed: {test}")
    for check in proof.unproven:
        print(f"no fault is planted for {check}: add one to tests/faults (see planting.py)")
    print(
        f"{counted(len(proof.faults), 'fault')} planted, {proof.caught} caught;"
        f" {counted(len(proof.healthy), 'healthy run')},"
        f" {proof.false_alarms} false alarms; {len(proof.checks) - len(proof.unproven)} of"
        f" {counted(len(proof.checks), 'check')} shown to fail"
    )


def _print_reason(planted: prove.Planted, state: str) -> None:
    lines = (planted.reason or "no reason given").splitlines()[:REASON_LINES]
    print(f"{state}: {planted.name} ({planted.test})", *(f"    {line}" for line in lines), sep="\n")


def _word(fault: prove.Fault) -> str:
    return fault.state if fault.expected == "failed" else f"{fault.state} ({fault.expected})"


def _document(proof: prove.Proof) -> dict[str, object]:
    return {
        "planted": len(proof.faults),
        "caught": proof.caught,
        "healthy_runs": len(proof.healthy),
        "false_alarms": proof.false_alarms,
        "faults": [fault.model_dump() for fault in proof.faults],
        "healthy": [run.model_dump() for run in proof.healthy],
        "failed": list(proof.failed),
        "checks": len(proof.checks),
        "checks_without_a_fault": list(proof.unproven),
    }
