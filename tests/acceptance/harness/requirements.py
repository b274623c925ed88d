"""Requirements of installed packages that are not met. In: distributions. Out: sentences, as of `pip check`.

For images without pip. The package `packaging` comes with pytest, so it is there also if the image has none.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator


def problems(distributions: Iterable[importlib.metadata.Distribution]) -> list[str]:
    """The unmet requirements of these distributions among themselves, sorted."""
    from packaging.utils import canonicalize_name

    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in distributions:  # of two with one name, the import path has the first
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    versions = {name: distribution.version for name, distribution in found.items()}
    return sorted(problem for distribution in found.values() for problem in _unmet(distribution, versions))


def _unmet(distribution: importlib.metadata.Distribution, versions: dict[str, str]) -> Iterator[str]:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    name = f"{distribution.metadata['Name']} {distribution.version}"
    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            yield f"{name} has a requirement that is not valid: {text}"
            continue
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        has = versions.get(canonicalize_name(wanted.name))
        if has is None:
            yield f"{name} requires {wanted.name}, which is not installed"
        elif not wanted.specifier.contains(has, prereleases=True):
            yield f"{name} has requirement {wanted}, but you have {wanted.name} {has}"
