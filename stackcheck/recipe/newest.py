"""Which pins have a newer version that could take their place.

In: stacks, the rules, the versions that indexes list. Out: one `Behind` a pin. A version counts only if it is
built for the same thing (`+rocm7.2`) and the stack's Python, no rule refuses it beside the stack's torch and
runtime, and it is no pre-release, unless the pin is one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from packaging.version import Version

from stackcheck.matrix.explain import kindest_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stackcheck.matrix.rules import RuleSet
    from stackcheck.matrix.stack import Stack

# Packages whose versions torch decides, by the axis that the rules know them as.
_AXES = {
    **dict.fromkeys(("triton", "pytorch-triton-rocm", "triton-rocm"), "triton"),
    **{name: name for name in ("torch", "torchvision", "torchaudio")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behind:
    """A pin with something newer, or of which no index has any version: `newest` is `None`."""

    name: str
    pinned: str
    newest: str | None
    stacks: tuple[str, ...]


def behind(
    stacks: Sequence[Stack], rules: RuleSet, versions: Callable[[str, bool, Stack], Sequence[str]]
) -> tuple[Behind, ...]:
    """The pins that are behind, by name and version.

    Args:
        stacks: Whose pins.
        rules: Refuse versions that cannot be beside a stack's others.
        versions: Package, whether pre-releases count, stack -> every version that its indexes list.
    """
    found: dict[tuple[str, str, str | None], list[str]] = {}
    for stack in stacks:
        for name, pinned in _pins(stack):
            listed = versions(name, Version(pinned).is_prerelease, stack)
            same = [one for one in map(Version, listed) if one.local == Version(pinned).local]
            fitting = [one for one in same if _fits(stack, name, one, pinned, rules)]
            newest = max(fitting, default=None)
            if newest is None or newest > Version(pinned):
                found.setdefault((name, pinned, str(newest) if newest else None), []).append(stack.id)
    return tuple(
        Behind(name=name, pinned=pinned, newest=newest, stacks=tuple(ids))
        for (name, pinned, newest), ids in sorted(found.items(), key=lambda item: item[0][:2])
    )


def _pins(stack: Stack) -> Iterator[tuple[str, str]]:
    flash = [f"{stack.flash_attn.package}=={stack.flash_attn.version}"] if stack.flash_attn else []
    for requirement in dict.fromkeys((*stack.requirements, *flash)):
        name, _, version = requirement.partition("==")
        yield name, version


def _fits(stack: Stack, name: str, version: Version, pinned: str, rules: RuleSet) -> bool:
    if version <= Version(pinned):
        return True
    if version.is_prerelease and not Version(pinned).is_prerelease:
        return False
    axis = _AXES.get(name)
    if axis is None:
        return True
    runtime: dict[str, str] = {stack.runtime: stack.runtime_version} if stack.runtime_version else {}
    asked = {**runtime, "vendor": stack.vendor, "torch": str(stack.torch), axis: version.public}
    if stack.wheels != "none":
        asked["wheels"] = stack.wheels
    return kindest_first(asked, rules)[0].answer != "refused"
