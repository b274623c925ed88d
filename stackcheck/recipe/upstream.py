"""Digests of base images from registries, and checksums of official wheels from release pages.

In: an image's name and tag, a wheel's name. Out: the digest or checksum that is published now, or an
`OutOfReachError` that names the host. A host that did not answer is not asked again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from stackcheck.errors import ConfigurationError
from stackcheck.files.pip_settings import certificates, pip_settings
from stackcheck.matrix.stack import TORCH_INDEX, Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.oci.documents import TIMEOUT_S, RegistryError

if TYPE_CHECKING:
    import requests  # imported where it is used: most verbs ask nobody, and it takes a third of their time


AMD_WHEELS = "https://repo.radeon.com/rocm/manylinux/rocm-rel-{version}/"
_Answer = TypeVar("_Answer")
DEFAULT_REGISTRY = "docker.io"
FLASH_ATTN_RELEASES = "https://api.github.com/repos/Dao-AILab/flash-attention/releases/tags"


class OutOfReachError(ConfigurationError):
    """A host did not answer, or does not have what was asked for."""


class Upstream:
    """Registries and release pages, as far as this machine reaches them; addresses are the public ones.

    Args:
        releases: Where the releases of flash-attn are listed, in the form of GitHub's API.
        mirrors: What this site has in place of public hosts.
        timeout_s: To connect, and between two bytes of an answer.
    """

    def __init__(
        self,
        *,
        releases: str = FLASH_ATTN_RELEASES,
        mirrors: Mirrors = NO_MIRRORS,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> None:
        self.mirrors = mirrors
        self._releases = releases
        self._timeout_s = timeout_s
        self._silent: dict[str, str] = {}

    @functools.cached_property
    def _session(self) -> requests.Session:
        """Asks as the host's pip does."""
        import requests

        settings, session = pip_settings(), requests.Session()
        if proxy := settings.get("proxy"):
            session.proxies, session.trust_env = dict.fromkeys(("http", "https"), proxy[-1]), False
        if trusted := certificates(settings):
            session.verify = str(trusted)
        return session

    def base_digest(self, reference: str) -> str:
        """The digest that a tag names now: of the index where an image has several platforms.

        Raises:
            OutOfReachError: The registry does not answer, refuses, or has no such tag.
        """
        from stackcheck.oci.distribution import Repository

        public = split_reference(reference)[0]
        host, repository, tag = split_reference(self.mirrors.image(reference))
        store = Repository(host, repository, timeout_s=self._timeout_s)
        return self._ask(
            _named(public, host), lambda: store.head_manifest(tag) or store.read_manifest(tag).digest
        )

    def wheel_sha256(self, version: str, wheel: str) -> str:
        """The checksum of an official wheel of flash-attn: as its release states it, or of its bytes.

        Raises:
            OutOfReachError: The release page does not answer, or lists no such wheel.
        """
        url = f"{self._releases}/v{version}"
        host = self._host(url)
        listed = self._ask(host, lambda: self._json(url))
        asset = next((entry for entry in listed.get("assets", ()) if entry.get("name") == wheel), None)
        if asset is None:
            raise OutOfReachError(f"the release {version} of flash-attn has no {wheel}")
        # Stated for what was uploaded since the middle of 2025; None before.
        digest = asset.get("digest") or ""
        if digest.startswith("sha256:"):
            return str(digest).removeprefix("sha256:")
        return self._ask(host, lambda: self._sha256(str(asset["browser_download_url"])))

    def answers(self, url: str) -> str | None:
        """None if an address answers; else the reason why it does not."""
        host = self._host(url)
        try:
            self._ask(host, lambda: self._get(url).close())
        except OutOfReachError as error:
            return str(error)
        return None

    def beside(self, stack: Stack, *, alone: bool = False) -> tuple[tuple[str, str], ...]:
        """The indexes to ask for a package that pip's own lack, each as (option of uv and pip, address).

        `lock` and `build` both ask this, or one would find what the other cannot install. The site's mirror
        of a place is always asked; a public place that this machine does not reach would only delay pip.
        Where pip is to ask no index (`alone`), pages of links are asked only.
        """
        return tuple(
            (option, self.mirrors.url(place))
            for option, place in torch_places(stack)
            if not (alone and option == "--extra-index-url")
            if self.mirrors.url(place) != place or self.answers(f"{place.rstrip('/')}/") is None
        )

    def reach(self, url: str) -> None:
        """Check that a host can be connected to; any answer is enough.

        Raises:
            OutOfReachError: It cannot be reached.
        """
        self._ask(
            self._host(url),
            lambda: self._session.head(self.mirrors.url(url), timeout=self._timeout_s).close(),
        )

    def _ask(self, host: str, question: Callable[[], _Answer]) -> _Answer:
        import requests

        if host not in self._silent:
            try:
                return question()
            except requests.HTTPError as error:
                answer = f"{error.response.status_code} {error.response.reason}"
                raise OutOfReachError(f"{host} answers {answer}") from error
            except requests.RequestException:
                pass
            except RegistryError as error:
                if not isinstance(error.__cause__, requests.RequestException):
                    raise OutOfReachError(f"{host}: {error.what}") from error
            self._silent[host] = f"{host} is out of reach of this machine"
        raise OutOfReachError(self._silent[host])

    def _host(self, url: str) -> str:
        """The host of a public address, for messages: no address of this site gets into a lock."""
        return _named(url.split("/")[2], self.mirrors.url(url).split("/")[2])

    def _get(self, url: str) -> requests.Response:
        response = self._session.get(self.mirrors.url(url), timeout=self._timeout_s, stream=True)
        response.raise_for_status()
        return response

    def _json(self, url: str) -> Any:
        return self._get(url).json()

    def _sha256(self, url: str) -> str:
        digest = hashlib.sha256()
        for chunk in self._get(url).iter_content(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def torch_places(stack: Stack) -> tuple[tuple[str, str], ...]:
    """Where the makers of a stack's torch put their wheels: uv's option and the address.
    The index has the default one.
    """
    if stack.wheels == "amd":
        return (("--find-links", AMD_WHEELS.format(version=stack.runtime_version)),)
    return (("--extra-index-url", f"{TORCH_INDEX}/{stack.wheel_tag}"),) if stack.wheel_tag else ()


def split_reference(reference: str) -> tuple[str, str, str]:
    """Registry, repository and tag of `[HOST/]REPO:TAG`, read as docker reads it."""
    name, _, tag = reference.rpartition(":")
    host, slash, repository = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return host, repository, tag
    return DEFAULT_REGISTRY, name, tag


def _named(public: str, asked: str) -> str:
    return public if asked == public else f"the mirror of {public}"
