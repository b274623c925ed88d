"""HTTP to one registry: timeouts, a few retries, and the answer to its authentication challenge.

In: method and URL. Out: a response with a status that the caller expects, or a `RegistryError` with the
registry's answer. Challenges follow https://distribution.github.io/distribution/spec/auth/token/.
"""

import email.utils
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping  # a named tuple's annotations are read at run time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from stackcheck import __version__
from stackcheck.errors import ConfigurationError
from stackcheck.files import users
from stackcheck.oci import credentials
from stackcheck.oci.addresses import is_loopback, origin
from stackcheck.oci.documents import CHUNK_BYTES, TIMEOUT_S, MissingError, RegistryError
from stackcheck.oci.patience import Adapter, Patience

RETRY_DELAYS_S = (0.5, 2.0)
LONGEST_WAIT_S = 30.0  # if a busy registry asks for a longer wait, the request fails at once
RETRIED = frozenset({429, 500, 502, 503, 504})
READING = frozenset({"GET", "HEAD"})  # sent again when the connection breaks; a write may have happened
IGNORED_LIMIT_BYTES = 2**16
TOKEN_LIMIT_BYTES = 2**20
_TOKEN = re.compile(r"[\x21-\x7e]+")
CERTIFICATES = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class _Authorization(requests.auth.AuthBase):
    """A header that requests neither overwrites from ~/.netrc nor sends on to another host."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request


class Transport:
    """A session with one registry host."""

    def __init__(
        self,
        host: str,
        *,
        plain_http: bool = False,
        timeout_s: tuple[float, float] = TIMEOUT_S,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
        patience: Patience | None = None,
    ) -> None:
        self.host = host
        api_host = "registry-1.docker.io" if host == "docker.io" else host
        self.base = f"{'http' if plain_http or is_loopback(host) else 'https'}://{api_host}"
        self._timeout_s = timeout_s
        self._retry_delays_s = retry_delays_s
        self._authorization: str | None = None
        self._patience = patience or Patience()
        self._session = requests.Session()
        context = _tls(host)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, Adapter(self._patience, context))
        self._session.headers["User-Agent"] = f"stackcheck/{__version__}"
        self._session.trust_env = not is_loopback(host)  # a proxy cannot reach this host's loopback

    def request(
        self,
        method: str,
        url: str,
        *,
        expected: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Any] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """One request, repeated when the registry is busy or asks for credentials.
        A read is also repeated when its connection is reset before the answer.

        Raises:
            MissingError: 404, and the caller did not expect it.
            RegistryError: No answer, or another status.
        """
        challenged = False
        delays = iter((*self._retry_delays_s, None))
        while True:
            try:
                response = self._send(method, url, headers, body)
            except RegistryError as error:
                delay = next(delays) if method in READING and _was_reset(error) else None
                if delay is None:
                    raise
                time.sleep(delay)
                continue
            if response.status_code in expected:
                if not stream:
                    self.head(
                        response, IGNORED_LIMIT_BYTES
                    )  # a connection is reused only if its answer was read
                return response
            if response.status_code == requests.codes.unauthorized and not challenged:
                challenged = True
                try:
                    self._answer_challenge(response)  # its error may quote the body
                finally:
                    response.close()
                continue
            delay = next(delays) if response.status_code in RETRIED else None
            if delay is None:
                raise self._refused(method, url, response)
            response.close()
            time.sleep(max(delay, _asked_for(response)))

    def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None, body: Callable[[], Any] | None
    ) -> requests.Response:
        aim, home = (origin(address, self.base) for address in (url, self.base))
        own = aim == home
        if not own and home[0] == "https" and aim[0] != "https":
            raise RegistryError("the registry redirects to insecure HTTP", where=self.base, got=url)
        self._patience.begin()
        try:
            return self._session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **(headers or {})},
                data=body() if body else None,
                auth=_Authorization(self._authorization if own else None),
                timeout=self._timeout_s,
                stream=True,
                allow_redirects=method in {"GET", "HEAD"},
            )
        except (
            requests.RequestException,
            ValueError,
        ) as error:  # ValueError: a redirect to an invalid address
            raise self.unreachable(error) from error

    def next_address(self, response: requests.Response, following: str) -> str:
        """The absolute form of an address that the registry sent; `RegistryError` if it is not valid."""
        try:
            found = urljoin(response.url, following)
        except ValueError as error:
            raise RegistryError(
                "the registry sent an invalid address", where=self.base, got=following[:200]
            ) from error
        origin(found, self.base)
        return found

    def body(self, response: requests.Response, limit: int) -> bytes:
        """The body of a streamed answer; `RegistryError` where it is longer than `limit`, or broke off."""
        found = self.head(response, limit + 1)
        if len(found) > limit:
            raise RegistryError(
                "the registry's answer is too long", where=response.url, expected=f"at most {limit} bytes"
            )
        return found

    def head(self, response: requests.Response, limit: int) -> bytes:
        """The first bytes of a streamed answer; what follows is never fetched."""
        found = b""
        try:
            for chunk in response.iter_content(min(limit, CHUNK_BYTES)):
                found += chunk
                if len(found) >= limit:
                    break
        except requests.RequestException as error:
            raise self.unreachable(error) from error
        finally:
            response.close()
        return found[:limit]

    def unreachable(self, error: Exception) -> RegistryError:
        """The error for a registry that does not answer, or stops in the middle of an answer."""
        hangs = isinstance(error, requests.Timeout) or "timed out" in str(error)
        return RegistryError(
            "the registry does not answer" if hangs else "the registry cannot be reached",
            where=self.base,
            got=self._patience.reason or f"no answer within {self._timeout_s[1]:g} s"
            if hangs
            else _innermost(error),
            next_step=f"check that {self.base}/v2/ answers, then run the same command again",
        )

    def _answer_challenge(self, response: requests.Response) -> None:
        scheme, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
        known = credentials.find(self.host)
        if scheme.lower() == "basic" and known:
            self._authorization = requests.auth._basic_auth_str(known.username, known.password)  # noqa: SLF001
        elif scheme.lower() == "bearer":
            self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(rest)), known)}"
        else:
            raise self._refused(response.request.method or "", response.url, response)

    def _token(self, challenge: Mapping[str, str], known: credentials.Credentials | None) -> str:
        realm = challenge.get("realm", "")
        scheme, host, _ = origin(realm, self.base)
        if scheme != "https" and not is_loopback(host):
            raise RegistryError(
                "the registry names a token service over insecure HTTP", where=self.base, got=realm
            )
        fields = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        try:
            if known and known.identity_token:
                form = {"grant_type": "refresh_token", "refresh_token": known.identity_token, **fields}
                form["client_id"] = "stackcheck"
                answer = self._session.post(realm, data=form, timeout=self._timeout_s, stream=True)
            else:
                auth = (known.username, known.password) if known else _Authorization(None)
                answer = self._session.get(
                    realm, params=fields, auth=auth, timeout=self._timeout_s, stream=True
                )
            answer.raise_for_status()
            document = json.loads(self.body(answer, TOKEN_LIMIT_BYTES))
            return _header_safe(str(document.get("token") or document["access_token"]))
        except (requests.RequestException, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise RegistryError(
                "the registry's token service gave no token",
                where=realm,
                got=_innermost(error),
                next_step=f"docker login {self.host}",
            ) from error

    def _refused(self, method: str, url: str, response: requests.Response) -> RegistryError:
        text = "" if method == "HEAD" else self.head(response, 300).decode(errors="replace").strip()
        got = "".join(filter(str.isprintable, f"{response.status_code} {response.reason} {text}".strip()))
        where = f"{method} {urlsplit(url)._replace(query='').geturl()}"
        if response.status_code == requests.codes.not_found:
            return MissingError("not found in the registry", where=where, got=got)
        if response.status_code in {401, 403}:
            return RegistryError(
                "the registry refused access", where=where, got=got, next_step=f"docker login {self.host}"
            )
        return RegistryError(
            "the registry failed", where=where, got=got, next_step="run the same command again"
        )


def _asked_for(response: requests.Response) -> float:
    """The seconds that a busy registry asks to wait, as far as we wait at all."""
    text = response.headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return min(float(text), LONGEST_WAIT_S)
    try:
        until = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    wait = until.timestamp() - time.time()
    return min(max(wait, 0.0), LONGEST_WAIT_S)


def _header_safe(token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise ValueError("the token contains a character that a header must not contain")
    return token


def _was_reset(error: RegistryError) -> bool:
    """Whether the other end closed the connection without an answer; no answer in time is no reset."""
    return isinstance(_cause(error), ConnectionResetError | ConnectionAbortedError | BrokenPipeError)


def _innermost(error: BaseException) -> str:
    """The operating system's own error, in words."""
    found = _cause(error)
    return f"{type(found).__name__}: {found}"[:300]


def _cause(error: BaseException) -> BaseException:
    """The operating system's own error, without the layers of libraries around it."""
    inner: BaseException | None = error
    # Not the last of the chain: that may be an exception that was being handled somewhere outside.
    while inner and (isinstance(inner, requests.RequestException) or not isinstance(inner, OSError)):
        inner = inner.__cause__ or inner.__context__
    return inner or error


def _tls(host: str) -> ssl.SSLContext | None:
    """Trust the authorities in `certs.d/HOST[:PORT]/*.crt` as docker and podman do; None if there are none.

    A client certificate there is used too: `NAME.cert` with `NAME.key`.

    Raises:
        ConfigurationError: A file there is not a certificate, or a client certificate has no key.
    """
    files = [file for folder in _folders(host) for file in sorted(folder.glob("*")) if file.is_file()]
    if not any(file.suffix in {".crt", ".cert"} for file in files):
        return None
    found = ssl.create_default_context()
    for file in files:
        try:
            if file.suffix == ".crt":
                found.load_verify_locations(file)
            elif file.suffix == ".cert":
                found.load_cert_chain(file, file.with_suffix(".key"))
        except OSError as error:  # also ssl.SSLError
            raise ConfigurationError(
                "a certificate for a registry cannot be used",
                where=str(file),
                got=str(error),
                expected="PEM; for NAME.cert also NAME.key beside it",
            ) from error
    return found


def _folders(host: str) -> list[Path]:
    home = users.folder("XDG_CONFIG_HOME")
    places = (*CERTIFICATES, home / "docker" / "certs.d", home / "containers" / "certs.d")
    return [place / host for place in places if (place / host).is_dir()]
