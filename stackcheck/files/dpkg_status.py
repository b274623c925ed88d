"""Read the status file of dpkg: deb-control(5). In: its text. Out: the installed packages."""

import re
from collections.abc import Iterator

INSTALLED = ("install ok installed", "hold ok installed")  # the second: apt may not upgrade it
_FIELD = re.compile(r"^([A-Za-z0-9-]+):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)


def installed(text: str) -> Iterator[tuple[dict[str, str], str]]:
    """The fields of each installed package that has a name, and its stanza as it stands there."""
    for stanza in re.split(r"\n\n+", text.strip()):
        fields = dict(_FIELD.findall(stanza))
        if fields.get("Status") in INSTALLED and fields.get("Package"):
            yield fields, stanza
