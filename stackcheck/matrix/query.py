"""What a user types after `explain` -> a combination.

In: texts such as `rocm=7.2`, `rocm7.2.4` or a stack id. Out: axis -> value. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

from stackcheck.errors import ConfigurationError, did_you_mean
from stackcheck.matrix.explain import kindest_first, kindness
from stackcheck.matrix.rules import Axis
from stackcheck.versions import VERSION_AXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stackcheck.matrix.rules import RuleSet

AXES: frozenset[str] = frozenset(get_args(Axis))
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,5}((a|b|rc|\.post|\.dev)\d{1,9})?(\+[A-Za-z0-9.]{1,40})?")
# The parts of a stack id, without `=`: the name of an axis there, and its name here.
_NAMED = {"rocm": "rocm", "cuda": "cuda", "torch": "torch", "fa": "flash_attn", "py": "python"}
_PART = re.compile(rf"({'|'.join(_NAMED)})([0-9][0-9A-Za-z.]*)")


def parse_question(texts: Sequence[str], rules: RuleSet, stacks: Iterable[str] = ()) -> dict[str, str]:
    """`rocm=7.2`, or `rocm7.2.4`, as axis -> value; a short version is its newest patch that fits.

    A text in the form of a stack id (`rocm7.2.4-torch2.6.0-py3.12-ubuntu24.04`) is all that it names.
    `stacks` are the ids of the matrix: a wrong text may be meant as one of them.

    Raises:
        ConfigurationError: A text is not `axis=value`, or its axis is not known.
    """
    asked: dict[str, str] = {}
    for text in (part for whole in texts for part in _parts(whole, rules)):
        axis, _, value = text.partition("=")
        axis = axis.replace("-", "_")
        if axis not in AXES:
            raise ConfigurationError(
                "no such axis" if "=" in text else "no such stack, and no such axis",
                got=text[:80],
                expected=_meant(texts, axis, stacks) or "axis=value with one of " + ", ".join(sorted(AXES)),
                next_step=None if "=" in text else "stackcheck list",
            )
        if not (_VERSION if axis in VERSION_AXES else _VALUE).fullmatch(value):
            raise ConfigurationError(
                f"invalid value for {axis}",
                got=text[:80],
                expected=_meant(texts, axis, stacks) or f"{axis}=VALUE",
            )
        if axis in asked and asked[axis] != value:
            raise ConfigurationError(f"{axis} was given twice", got=text[:80])
        asked[axis] = value
    return _newest(_with_vendor(asked), rules)


def _meant(texts: Sequence[str], axis: str, stacks: Iterable[str]) -> str | None:
    near_axis = did_you_mean(axis, AXES) if axis not in {*texts, *AXES} else None
    return near_axis or (did_you_mean(texts[0], stacks) if len(texts) == 1 else None)


def _newest(asked: Mapping[str, str], rules: RuleSet) -> dict[str, str]:
    """Each short version as the newest known one that it means; of ROCm, as the one that fits best.

    torch's wheels bring a ROCm of their own, and not the newest patch.
    """
    whole = {
        axis: rules.newest(axis, value) if axis in VERSION_AXES else value for axis, value in asked.items()
    }
    patches = rules.meant("rocm", asked["rocm"]) if "rocm" in asked else []
    return min(
        [{**whole, "rocm": patch} for patch in patches],
        key=lambda one: kindness(kindest_first(one, rules)[0]),
        default=whole,
    )


def _parts(text: str, rules: RuleSet) -> Iterator[str]:
    """The `axis=value` texts that a part of a stack id, or the whole of it, stands for."""
    if "=" in text:
        yield text
        return
    for part in text.split("-"):
        named = _PART.fullmatch(part)
        if named:
            yield f"{_NAMED[named[1]]}={named[2]}"
        elif part in rules.versions.get("os", ()):
            yield f"os={part}"
        elif part == "cpu":
            yield "vendor=cpu"
        else:
            yield "wheels=amd" if part == "amd" else part


def _with_vendor(asked: dict[str, str]) -> dict[str, str]:
    """The combination with the vendor that its runtime or architecture belongs to."""
    found = {
        vendor
        for vendor, holds in (
            ("amd", "rocm" in asked or asked.get("arch", "").startswith("gfx") or "rccl" in asked),
            ("nvidia", "cuda" in asked or asked.get("arch", "").startswith("sm_") or "nccl" in asked),
        )
        if holds
    }
    if "vendor" not in asked and found:
        # If both are named, the runtime decides; the other one then breaks a rule.
        asked["vendor"] = "amd" if "rocm" in asked or found == {"amd"} else "nvidia"
    if asked.get("rocm") and asked.get("cuda"):
        raise ConfigurationError("rocm and cuda were both given", expected="one of them")
    return asked
