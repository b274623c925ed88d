"""Who hears of the nights. In: alerts.yaml. Out: `Addressees`: webhooks, e-mail and a ping.

Addresses of webhooks are secrets, so no command line has one: the file belongs to its user alone, and a value
`$NAME` in it is taken from the environment.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.oci.addresses import is_loopback

VARIABLE = "STACKCHECK_ALERTS"
_NAME = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def _value(text: str) -> str:
    named = _NAME.fullmatch(text)
    if named is None:
        return text
    if not os.environ.get(named[1]):
        raise PydanticCustomError("variable", "the environment has no {name}", {"name": named[1]})
    return os.environ[named[1]]


def _encrypted(url: str) -> str:
    parts = urlsplit(url)
    if not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.netloc))):
        raise PydanticCustomError("address", "expected https://…, or http:// on this machine")
    return url


Secret = Annotated[str, AfterValidator(_value)]
Address = Annotated[Secret, AfterValidator(_encrypted)]
Mailbox = Annotated[str, StringConstraints(pattern=r"^[!-?A-~]+@[!-?A-~]+$")]


class Webhook(Closed):
    """An address that takes a POST: `json` has every fact, `slack` and `teams` a text alone."""

    url: Address
    form: Literal["json", "slack", "teams"] = "json"

    @property
    def name(self) -> str:
        """Its host: the path is the secret."""
        return f"{self.form} webhook at {urlsplit(self.url).netloc.rpartition('@')[2]}"


class Email(Closed):
    """Mailboxes behind one SMTP server; `tls: none` is for a server on this machine."""

    server: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$")]
    tls: Literal["starttls", "tls", "none"] = "starttls"
    sender: Mailbox
    to: Annotated[tuple[Mailbox, ...], Field(min_length=1)]
    user: Secret | None = None
    password: Secret | None = None

    @property
    def name(self) -> str:
        """The server that takes it."""
        return f"e-mail by {self.server}"


class Addressees(Closed):
    """What alerts.yaml says.

    Attributes:
        when: `trouble`: only if somebody has to act; `always`: after each night.
        runbook: Address of docs/guides/runbook.md, for the links.
        ping: Asked for after each night that ran: a dead man's switch calls when it stops.
    """

    schema_: Literal["1"] = Field(alias="schema")  # YAML files are read as texts
    when: Literal["trouble", "always"] = "trouble"
    runbook: str = "docs/guides/runbook.md"
    webhooks: tuple[Webhook, ...] = ()
    emails: tuple[Email, ...] = ()
    ping: Address | None = None


NOBODY = Addressees(schema="1")


def load(named: Path | None = None) -> Addressees:
    """The addressees of a file: the one that is named, else the environment's, else the user's; else nobody.

    Raises:
        ConfigurationError: A named file is not there, others can read it, or it is wrong.
    """
    path = named or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if path is None:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "stackcheck" / "alerts.yaml"
        if not path.is_file():
            return NOBODY
    content = yamlfile.load(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigurationError(
            "the addresses of alerts can be read by others",
            where=str(path),
            got=f"mode {stat.S_IMODE(path.stat().st_mode):04o}",
            expected="mode 0600",
            next_step=f"chmod 600 {path}",
        )
    try:
        return Addressees.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise ConfigurationError(  # without what was given: it may be a password
            "\n".join(f"{path.name}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found),
            where=str(path),
            next_step="docs/guides/nightly.md, “Alerts”, has an example",
        ) from None
