"""Faults of an image: what it declares, what is installed and what loads drift apart."""

import json
import platform

import pytest

from planting import Fault

I = "test_image.py::"  # noqa: E741
LOADED = "workloads.image:loaded"


def release() -> str:
    found = platform.freedesktop_os_release()
    return found["ID"] + found.get("VERSION_ID", "")


def declaration(**changes: object) -> str:
    told = {
        "schema": 1,
        "stack_id": "cpu-test",
        "vendor": "cpu",
        "runtime": "cpu",
        "runtime_version": None,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "os": release(),
        "archs": [],
        "wheels": "upstream",
        "packages": {},
        "triton": None,
        "collective": None,
        "flash_attn": None,
        "env": {},
    }
    return json.dumps(told | changes)


@pytest.fixture
def stack(tmp_path, request) -> dict[str, str]:
    """The environment of an image that declares what the test asks for."""
    path = tmp_path / "stack.json"
    path.write_text(declaration(**getattr(request, "param", {})), encoding="utf-8")
    # The constraints of the image that these tests run in would hold, whatever the planted declaration says.
    return {"STACKCHECK_STACK_FILE": str(path), "PIP_CONSTRAINT": ""}


@pytest.mark.parametrize(
    ("stack", "check", "says"),
    [
        ({"packages": {"pytest": "1.0.0"}}, "test_declared_versions_are_installed", "pytest: declared 1.0.0"),
        ({"packages": {"no-such-thing": "1"}}, "test_declared_versions_are_installed", "not installed"),
        ({"python": "3.2"}, "test_the_image_is_the_stack_that_was_asked_for", "3.2"),
        ({"vendor": "amd"}, "test_the_image_is_the_stack_that_was_asked_for", "amd"),
        ({"packages": {"torch": "2.0.0"}}, "test_loaded_libraries_are_the_declared_ones", "2.0.0"),
        ({"archs": ["gfx942"]}, "test_every_architecture_is_compiled_in", "gfx942"),
        (
            {"env": {"HSA_NO_SCRATCH_RECLAIM": "1"}},
            "test_environment_is_as_declared",
            "HSA_NO_SCRATCH_RECLAIM",
        ),
        ({}, "test_torch_cannot_be_replaced", "would take torch 0.0.1"),
    ],
    indirect=["stack"],
)
def test_drift_from_the_declaration_is_caught(stack, check, says, plant) -> None:
    plant(Fault("drift", I + check, says=says, env=stack))


def test_torch_of_another_vendor_is_caught(plant) -> None:
    other = "lambda: {**original(), 'cuda': '13.0', 'torch': '2.12.0+cu130'}"
    plant(
        Fault(
            "a CUDA torch", I + "test_torch_is_built_for_the_vendor", says="nvidia", patches={LOADED: other}
        )
    )


def test_extension_with_an_undefined_symbol_is_caught(plant, tmp_path) -> None:
    broken = tmp_path / "broken.cpython-311-x86_64-linux-gnu.so"
    broken.write_bytes(b"\x7fELF not really")
    patch = {"workloads.image:load_errors": f"lambda paths: original([*paths[:2], {str(broken)!r}])"}
    plant(Fault("a broken extension", I + "test_every_extension_loads", says=broken.name, patches=patch))


def test_extension_that_kills_its_process_is_caught(plant) -> None:
    patch = {"workloads.image:load_errors": "lambda paths: os.abort()"}
    plant(Fault("a killing extension", I + "test_every_extension_loads", says="SIGABRT", patches=patch))


def test_second_copy_of_a_library_is_caught(plant) -> None:
    two = "lambda: {'libnccl.so': ['/a/libnccl.so.2', '/b/libnccl.so.2']}"
    fault = Fault("two NCCLs", I + "test_libraries_are_there_once", says="/b/libnccl.so.2")
    plant(Fault(**{**vars(fault), "patches": {"workloads.image:mapped": two}}))


def test_conflict_of_installed_packages_is_caught(plant, tmp_path) -> None:
    site = tmp_path / "needy-1.0.dist-info"
    site.mkdir()
    metadata = "Metadata-Version: 2.1\nName: needy\nVersion: 1.0\nRequires-Dist: torch<1\n"
    (site / "METADATA").write_text(metadata, encoding="utf-8")
    check = I + "test_pip_check_finds_no_conflict"
    plant(Fault("a conflict", check, says="needy", paths=(str(tmp_path),)))


def test_declared_image_without_its_declaration_is_caught(plant, tmp_path) -> None:
    told = tmp_path / "run.json"
    told.write_text(json.dumps({"run_id": "ab" * 8, "stack_id": "cpu-test"}), encoding="utf-8")
    env = {"STACKCHECK_STACK_FILE": str(tmp_path / "none")}
    fault = Fault("no declaration", I + "test_declared_versions_are_installed", says="has no", env=env)
    plant(Fault(**{**vars(fault), "arguments": ("--run-file", str(told))}))


def test_foreign_image_skips_what_it_does_not_declare(plant, tmp_path) -> None:
    env = {"STACKCHECK_STACK_FILE": str(tmp_path / "none")}
    check = I + "test_declared_versions_are_installed"
    plant(Fault("nothing declared", check, outcome="skipped", says="declares nothing", env=env))
