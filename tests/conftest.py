"""Which half of tests/ runs: with --gpu-vendor the acceptance suites, without it the tool's own tests."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ACCEPTANCE = TESTS / "acceptance"
OWN_TESTS = ("unit", "faults", "integration", "trainers")

# The suites are mounted read-only, and a stale .pyc beside a changed check would be a lie.
sys.dont_write_bytecode = True


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stackcheck", "acceptance suites")
    group.addoption("--gpu-vendor", choices=("amd", "nvidia", "cpu"), help="run the acceptance suites on it")
    group.addoption("--tier", choices=("smoke", "standard", "soak"), default="standard", help="how long")
    group.addoption("--gpus", type=int, metavar="N", help="use only the first N devices")
    group.addoption("--run-file", type=Path, metavar="FILE", help="run.json: what the run is about")
    group.addoption("--result-dir", type=Path, metavar="DIR", help="where result.json and evidence go")
    group.addoption("--lease-dir", type=Path, metavar="DIR", help="device locks; share it between containers")
    group.addoption(
        "--skip-budget",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="largest share of checks that may skip",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    named = [_path(config, argument) for argument in config.args]
    if not config.getoption("gpu_vendor"):
        if any(path.is_relative_to(ACCEPTANCE) for path in named):
            raise pytest.UsageError("tests/acceptance needs --gpu-vendor amd, nvidia or cpu")
        return
    if any(path.is_relative_to(TESTS / half) for path in named for half in OWN_TESTS):
        raise pytest.UsageError(
            "--gpu-vendor runs tests/acceptance; leave it out to run the tool's own tests"
        )
    from harness.session import AcceptanceSession

    config.pluginmanager.register(AcceptanceSession(config), "stackcheck-acceptance")


def pytest_report_header(config: pytest.Config) -> str:
    vendor = config.getoption("gpu_vendor")
    return f"stackcheck: acceptance suites on {vendor}" if vendor else "stackcheck: the tool's own tests"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    own = any(collection_path.is_relative_to(TESTS / half) for half in OWN_TESTS)
    acceptance = collection_path.is_relative_to(ACCEPTANCE)
    return True if (own if config.getoption("gpu_vendor") else acceptance) else None


def _path(config: pytest.Config, argument: str) -> Path:
    return (config.invocation_params.dir / argument.split("::", maxsplit=1)[0]).resolve()
