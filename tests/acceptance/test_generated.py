"""Generated cases: operators, sizes, masks and compiled programs that nobody named, judged by float64.

In: one device. Out: the cases that failed, each as small as it gets. In soak, `--case-seed` draws others.
"""

import pytest

from harness import skips, unloaded
from harness.asked import of_image
from harness.calls import OnDevice, RecordMetric
from workloads import generated, generated_compiled, generated_report, generated_sizes

SOAK_S, STANDARD_S = 2400, 600
# The least share of the drawn cases that float64 can judge; of huge ones, that there is memory for too.
LEAST = {"operators": 0.85, "optimizers": 0.9, "sizes": 0.9, "huge": 0.6, "attention": 0.5, "compiled": 0.75,
         "jagged": 0.6, "modules": 0.85, "noise": 0.75, "triton": 0.8, "transformers": 0.6,
         "torchao": 0.8}  # fmt: skip


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.long
@pytest.mark.parametrize("family", ["optimizers", "sizes"])
def test_generated_once(family: str, on_device: OnDevice, record_metric: RecordMetric) -> None:
    """Cases of a seed that stays are as near to float64 as their inputs' precision allows."""
    report = on_device(generated.of_standard, family=family, timeout_s=STANDARD_S)
    generated_report.require(report, record_metric, LEAST[family])


# No tier that certifies has it: three of five fresh seeds of drawn operators had false alarms on a GPU
# (docs/reference/trust.md).
@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
def test_each_operator(on_device: OnDevice, record_metric: RecordMetric) -> None:
    """One drawn case of each operator is as near to float64 as its inputs' precision allows."""
    report = on_device(generated.of_standard, family="operators", timeout_s=STANDARD_S)
    generated_report.require(report, record_metric, LEAST["operators"])


@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    "family", ["operators", "optimizers", "sizes", "attention", "jagged", "modules", "noise", "compiled"]
)
def test_generated(
    family: str, on_device: OnDevice, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Drawn cases of this family are as near to float64 as their inputs' precision allows.

    Two runs with one seed draw the same cases; the one on a slower machine ends earlier, but never before the
    least number of them.
    """
    seed = pytestconfig.getoption("case_seed")
    if family == "compiled":
        report = on_device(generated_compiled.of_soak, seed=seed, timeout_s=SOAK_S)
    else:
        report = on_device(generated.of_soak, family=family, seed=seed, timeout_s=SOAK_S)
    generated_report.require(report, record_metric, LEAST[family])


@pytest.mark.tier("soak")
@pytest.mark.gpus(1, whole=True)
def test_generated_huge(
    on_device: OnDevice, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Operators and optimizers with more than 2^31 and 2^32 elements are as near to float64 as small ones."""
    skips.if_lacking(on_device(generated_sizes.lacks))
    seed = pytestconfig.getoption("case_seed")
    report = on_device(generated.of_soak, family="huge", seed=seed, timeout_s=SOAK_S)
    generated_report.require(report, record_metric, LEAST["huge"])


@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
def test_generated_triton(
    on_device: OnDevice, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Drawn Triton programs do what their tree says, exactly or within the bound of their operations.

    They write nothing else, and give the same bits each time. A processor only compiles them.
    """
    if not of_image(unloaded.is_installed, module="triton"):
        skips.without_package("triton", "Triton is not part of this stack")
    seed = pytestconfig.getoption("case_seed")
    report = on_device(generated.of_soak, family="triton", seed=seed, timeout_s=SOAK_S)
    generated_report.require(report, record_metric, LEAST["triton"])


@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("package", ["torchao", "transformers"])
def test_generated_packages(
    package: str, on_device: OnDevice, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Drawn models of transformers and options of torchao do what float64 or their documents say.

    Padding, packing, a cache, a checkpoint or a compiler change nothing. Only packages that the image has are
    tried; what a package refuses is counted.
    """
    if not of_image(unloaded.is_installed, module=package):
        skips.without_package(package, f"the package {package} is not part of this stack")
    seed = pytestconfig.getoption("case_seed")
    report = on_device(generated.of_soak, family=package, seed=seed, timeout_s=SOAK_S)
    generated_report.require(report, record_metric, LEAST[package])
