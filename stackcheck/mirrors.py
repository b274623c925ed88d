"""What a site has in place of public hosts: package indexes, archives, image registries, signing keys.

In: a file, named by `--mirrors`, $STACKCHECK_MIRRORS or the user's configuration folder. Out: `Mirrors`,
which turns a public address into the site's. Addresses only: a login belongs to the client that uses it
(pip's and uv's .netrc, apt's auth.conf.d, `docker login`), so a file with one is refused.
"""

import dataclasses
import os
from collections.abc import Mapping  # pydantic reads annotations at run time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from stackcheck.files import users, yamlfile
from stackcheck.files.border import Closed

VARIABLE = "STACKCHECK_MIRRORS"
_ADDRESS = r"^https?://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9._~/+%-]*)?$"
_LINE = r"^deb( \[[A-Za-z0-9 =._/,:-]+\])? \S+ \S+( [a-z0-9-]+)*$"
DOCKER_HUB = "docker.io"


def _no_login(text: str) -> str:
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise PydanticCustomError("login", "a login belongs to the client: .netrc, auth.conf.d, docker login")
    return text.rstrip("/")


PublicAddress = Annotated[str, StringConstraints(max_length=500, pattern=_ADDRESS)]
# First the login: the pattern's message would not say what to do.
Address = Annotated[str, AfterValidator(_no_login), StringConstraints(max_length=500, pattern=_ADDRESS)]
SourceLine = Annotated[str, AfterValidator(_no_login), StringConstraints(max_length=500, pattern=_LINE)]
Place = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._:/-]*$", max_length=200)]


class _MirrorsFile(Closed):
    schema_: Literal["1"] = Field(alias="schema")
    urls: Mapping[PublicAddress, Address] = Field(default_factory=dict)
    registries: Mapping[Place, Place] = Field(default_factory=dict)
    apt: Mapping[str, tuple[SourceLine, ...]] = Field(default_factory=dict)
    keys: Mapping[PublicAddress, str] = Field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirrors:
    """The site's places.

    Attributes:
        urls: Beginning of a public address -> what the site has there.
        registries: A public registry -> the site's, with the folder below which it keeps the images.
        apt: `os` of a stack -> sources of the distribution, one line each.
        keys: Beginning of a public archive's address -> the file with the key that signs it.
    """

    urls: Mapping[str, str] = dataclasses.field(default_factory=dict)
    registries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apt: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def url(self, public: str) -> str:
        """The address to ask in place of a public one; the longest beginning that fits decides."""
        for begins in sorted(self.urls, key=len, reverse=True):
            if _below(public, begins):
                return self.urls[begins] + public.removeprefix(begins.rstrip("/"))
        return public

    def image(self, reference: str) -> str:
        """The image to ask for in place of `[HOST/]REPO:TAG`, with docker's own name of short ones."""
        host, slash, rest = reference.partition("/")
        if not (slash and ("." in host or ":" in host or host == "localhost")):
            host, rest = DOCKER_HUB, reference if slash else f"library/{reference}"
        if host not in self.registries:
            return reference
        return f"{self.registries[host]}/{rest}"

    def key(self, public: str, default: Path) -> Path:
        """The file with the key that signs an archive."""
        found = [begins for begins in self.keys if _below(public, begins)]
        return self.keys[max(found, key=len)] if found else default


NO_MIRRORS = Mirrors()


def load_mirrors(named: Path | None = None) -> Mirrors:
    """The mirrors of a file: the one that is named, else the environment's, else the user's; else none.

    Raises:
        ConfigurationError: A named file is not there, or a file is wrong; it has one line a problem.
    """
    path = named or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if path is None:
        path = default_file()
        if not path.is_file():
            return NO_MIRRORS
    content = yamlfile.load_yaml(path.expanduser())
    try:
        found = _MirrorsFile.model_validate(content)
    except ValidationError as error:
        next_step = "docs/guides/building.md, “Mirrors”, has an example"
        raise yamlfile.without_inputs(error, path, next_step) from None
    keys = {address: path.parent / Path(name).expanduser() for address, name in found.keys.items()}
    return Mirrors(urls=found.urls, registries=found.registries, apt=found.apt, keys=keys)


def default_file() -> Path:
    """The user's own file."""
    return users.folder("XDG_CONFIG_HOME") / "stackcheck" / "mirrors.yaml"


def _below(address: str, begins: str) -> bool:
    short = begins.rstrip("/")
    return address == short or address.startswith(f"{short}/")
