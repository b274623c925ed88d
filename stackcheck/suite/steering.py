"""Which variables of an image may not reach its acceptance run. In: the image's ENV. Out: changes to it.

A variable that steers the interpreter, the loader or pytest could choose what runs instead of the checks, and
one that hides devices could make the test of one device count for eight. They are recognised by how their
names begin, so that unknown ones are removed too. Everything else stays: users of the image get it.
"""

from collections.abc import Iterable, Mapping

from stackcheck import vendors

# Python: https://docs.python.org/3/using/cmdline.html#environment-variables. pytest imports argcomplete for
# `_ARGCOMPLETE`. The loader and libc: ld.so(8). A shell that something starts reads BASH_ENV and ENV.
STEERING = (
    *("PYTHON", "PYTEST", "_PYTEST", "_ARGCOMPLETE", "ARGCOMPLETE", "COVERAGE_", "COV_CORE_", "STACKCHECK"),
    *("LD_", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "BASH_ENV", "BASH_FUNC_"),
)
STEERING_NAMES = ("ENV",)
# CUDA's and ROCm's images need it to find their libraries; it is recorded in the result.
KEPT = ("LD_LIBRARY_PATH",)

# What the tool itself sets. Children of the suites inherit it.
OURS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    # No plug-in of the image, and the two that the suites use, by the names of their modules. A variable and
    # not `-p`, so that the workers of pytest-xdist have them too.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_timeout,xdist.plugin",
}


def environment(
    image: Iterable[str], vendor: vendors.Vendor, *given: Mapping[str, str]
) -> dict[str, str | None]:
    """The variables of an acceptance run; None removes one of the image's."""
    removed: dict[str, str | None] = dict.fromkeys(name for name in image if is_neutralised(name))
    host = {name: value for part in given for name, value in part.items()}
    return {**removed, **host, **vendors.visibility(vendor), **OURS}


def is_neutralised(name: str) -> bool:
    """Whether a variable of an image can choose what runs, or hide devices."""
    steers = name not in KEPT and (name.startswith(STEERING) or name in STEERING_NAMES)
    return steers or vendors.hides_devices(name)
