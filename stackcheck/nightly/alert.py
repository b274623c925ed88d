"""Tell people of a night. In: a `Plan`, or the reason why the night stopped; addressees. Out: sent messages.

An alert that cannot be sent is reported. It changes neither a verdict nor the exit code of the night.
Addresses of webhooks are secrets, so no command line has one: alerts.yaml belongs to its user alone, and a
value `$NAME` in it is taken from the environment.
"""

from __future__ import annotations

import functools
import html
import os
import platform
import re
import smtplib
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import requests
from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from stackcheck.errors import ConfigurationError, NothingSelectedError, StackcheckError
from stackcheck.files import users, yamlfile
from stackcheck.files.border import Closed
from stackcheck.nightly import summary
from stackcheck.nightly.decide import GOOD
from stackcheck.nightly.state import Plan
from stackcheck.oci.addresses import is_loopback

TIMEOUT_S = 20.0
# Outcome of a night, the worst one -> what it is called, and its section in docs/guides/runbook.md.
OUTCOMES = {
    "revoke": ("an image was revoked", "revoked"),
    "warn": ("do not roll out", "failed-on-a-new-configuration"),
    "hold": ("not settled, a person has to look", "not-settled"),
    "error": ("no verdict was reached", "without-a-verdict"),
    "nothing": ("the machine is unfit", "the-machine-is-unfit-exit-9"),
    "reboot": ("a reboot is pending", "reboot-pending"),
    "nowhere": ("nothing was validated", "nothing-was-validated"),
    "stopped": ("the night stopped", "the-night-stopped"),
    "warned": ("passed with a warning", "passed-with-a-warning"),
    "passed": ("passed", "passed"),
    "trial": ("a trial, nothing is wrong", "passed"),
}
NOT_RUN = {"reboot", "nowhere", "stopped", "trial"}


@dataclass(frozen=True, kw_only=True)
class Alert:
    """The facts of one message."""

    outcome: str  # a key of `OUTCOMES`
    line: str
    exit_code: int  # that of `stackcheck nightly`
    night: Mapping[str, Any] | None = None  # the night as night.json has it; None if it stopped

    @property
    def title(self) -> str:
        """Host and outcome, for a subject."""
        return f"stackcheck on {platform.node()}: {OUTCOMES[self.outcome][0]}"


def of(plan: Plan) -> Alert:
    """The message about a night that came to its end. Pure."""
    return Alert(
        outcome=_outcome(plan),
        line=summary.line(plan),
        exit_code=summary.exit_code(plan),
        night=summary.as_json(plan),
    )


def stopped(why: str, exit_code: int) -> Alert:
    """The message about a night that did not come to its end."""
    return Alert(outcome="stopped", line=summary.one_line(why), exit_code=exit_code)


def _outcome(plan: Plan) -> str:
    if plan.reboot_pending:
        return "reboot"
    actions = {item.ended.action for item in plan.items if item.ended} - GOOD
    worst = next((action for action in summary.WORDS if action in actions), None)
    if worst:
        return worst
    if summary.exit_code(plan) == NothingSelectedError.exit_code:
        return "nowhere"
    # Notes of the host stand in each night; nobody is called for them.
    return "warned" if summary.warnings(plan.model_copy(update={"notes": ()})) else "passed"


def already_told(result: str, status: str) -> bool:
    """Whether a night that systemd saw fail has sent its message: its code is that of an outcome.

    `result` and `status` are systemd's $MONITOR_SERVICE_RESULT and $MONITOR_EXIT_STATUS. An error of the
    command line (2) and a defect (1) may come before the night knows whom to tell.
    """
    codes = {str(kind.exit_code) for kind in StackcheckError.__subclasses__()} - {"1", "2"}
    return result == "exit-code" and status in codes


def send(alert: Alert, to: Addressees, report: Callable[[str], None]) -> bool:
    """Tell everybody; whether each message was taken. What fails is reported, without a secret."""
    every = True
    for name, way in _ways(alert, to):
        try:
            way()
        except (requests.RequestException, smtplib.SMTPException, OSError, UnicodeError) as error:
            every = False
            report(f"NOT TOLD, {name}: {_why(error)}; the outcome stays: {alert.title}")
    return every


def _ways(alert: Alert, to: Addressees) -> Iterator[tuple[str, Callable[[], None]]]:
    link = f"{to.runbook}#{OUTCOMES[alert.outcome][1]}"
    if to.when == "always" or alert.outcome != "passed":
        for hook in to.webhooks:
            yield hook.name, functools.partial(_post, hook, alert, link)
        for email in to.emails:
            yield email.name, functools.partial(_mail, email, alert, link)
    if to.ping and alert.outcome not in NOT_RUN:
        yield (
            f"ping of {urlsplit(to.ping).netloc.rpartition('@')[2]}",
            functools.partial(_ask, "GET", to.ping),
        )


def _ask(method: str, url: str, body: Mapping[str, Any] | None = None) -> None:
    # A redirect would take the message where nobody named.
    with requests.request(method, url, json=body, timeout=TIMEOUT_S, allow_redirects=False) as answer:
        if not answer.ok or answer.is_redirect:
            raise requests.HTTPError(response=answer)


def _post(hook: Webhook, alert: Alert, link: str) -> None:
    text = f"{alert.title}. {alert.line} What to do: {link}"
    if hook.form != "json":  # reasons come from images: no mention of a channel, no link, no tag
        _ask("POST", hook.url, {"text": html.escape(text, quote=False)})
        return
    facts = {"schema": 1, "outcome": alert.outcome, "host": platform.node(), "exit_code": alert.exit_code}
    told = {"title": alert.title, "text": text, "runbook": link, "night": alert.night}
    _ask("POST", hook.url, facts | told)


def _mail(email: Email, alert: Alert, link: str) -> None:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = alert.title, email.sender, ", ".join(email.to)
    message.set_content(f"{alert.line}\n\nWhat to do: {link}\n")
    host, _, port = email.server.rpartition(":")
    secure = ssl.create_default_context()
    with (
        smtplib.SMTP_SSL(host, int(port), timeout=TIMEOUT_S, context=secure)
        if email.tls == "tls"
        else smtplib.SMTP(host, int(port), timeout=TIMEOUT_S)
    ) as server:
        if email.tls == "starttls":
            server.starttls(context=secure)
        if email.user:
            server.login(email.user, email.password or "")
        refused = server.send_message(message)
    if refused:
        raise smtplib.SMTPRecipientsRefused(refused)


def _why(error: Exception) -> str:
    """The kind of an error: its text may hold the address, and so the secret."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"the server answered {error.smtp_code}"
    return type(error).__name__


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
        """The form and the host of the address, without its path, which is secret."""
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
        ping: Asked for after each night that ran: a dead man's switch calls when it stops.
    """

    schema_: Literal["1"] = Field(alias="schema")  # YAML files are read as texts
    when: Literal["trouble", "always"] = "trouble"
    runbook: str = "docs/guides/runbook.md"  # address of docs/guides/runbook.md, for the links
    webhooks: tuple[Webhook, ...] = ()
    emails: tuple[Email, ...] = ()
    ping: Address | None = None


NOBODY = Addressees(schema="1")


def load_addressees(named: Path | None = None) -> Addressees:
    """The addressees of a file: the one that is named, else the environment's, else the user's; else nobody.

    Raises:
        ConfigurationError: A named file is not there, others can read it, or it is wrong.
    """
    path = named or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if path is None:
        path = users.folder("XDG_CONFIG_HOME") / "stackcheck" / "alerts.yaml"
        if not path.is_file():
            return NOBODY
    content = yamlfile.load_yaml(path)
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
        next_step = "docs/guides/nightly.md, “Alerts”, has an example"
        raise yamlfile.without_inputs(error, path, next_step) from None
