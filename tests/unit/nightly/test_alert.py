"""Alerts of nights arrive at real servers on this machine, and what does not arrive changes nothing."""

import base64
import contextlib
import email
import itertools
import json
import re
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest

import loopback
from made_plans import BROKEN, RENEWED, SKIP, UNFIT, WARNED, plan
from small_checkout import ROOT, call
from stackcheck.errors import ConfigurationError, EngineError, StackcheckError
from stackcheck.nightly import alert, summary
from stackcheck.nightly.alert import Addressees
from stackcheck.nightly.decide import GOOD, Action
from stackcheck.nightly.state import Ended, Plan

REVOKED = Ended(action="revoke", because="it failed twice\n<!channel> <b>&", failed=("a",), exit_code=6)
HELD = Ended(action="hold", because="3 runs do not agree", exit_code=6)
FLAKY = Ended(action="renew", because="passed again", failed=("a",), flaky=True)
PLANS: dict[str, Plan] = {
    "revoke": plan(RENEWED, REVOKED, WARNED),
    "warn": plan(WARNED, HELD),
    "hold": plan(HELD, BROKEN),
    "error": plan(BROKEN, UNFIT),
    "nothing": plan(UNFIT, RENEWED),
    "reboot": plan(reboot_pending="6.14 runs, 6.16 is installed"),
    "nowhere": plan(skipped=(SKIP,)),
    "warned": plan(FLAKY),
    "passed": plan(RENEWED, notes=("NVLink multicast is off",)),
}
SECRET = "T0123-secret-path"


class Web:
    """A real HTTP server on this machine: what it was asked, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.code = 200
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                web.asked.append((self.command, self.path, json.loads(body) if body else None))
                self.send_response(web.code)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


class Mail:
    """A real SMTP server on this machine: the envelopes and messages that it took, and who logged in."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], email.message.Message]] = []
        self.logins: list[str] = []
        self.refuses = b""
        self.tls: ssl.SSLContext | None = None
        mail = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                to: list[str] = []
                self.wfile.write(b"220 here\r\n")
                while line := self.rfile.readline():
                    word = line[:4].upper().strip()
                    if word == b"RCPT":
                        to.append(line.decode().partition("<")[2].partition(">")[0])
                    self.wfile.write(mail.answer(word))
                    self.wfile.flush()
                    if word == b"STAR" and mail.tls:
                        self.connection = mail.tls.wrap_socket(self.request, server_side=True)
                        self.rfile = self.connection.makefile("rb")
                        self.wfile = self.connection.makefile("wb")
                    if word == b"AUTH":
                        mail.logins.append(base64.b64decode(line.split()[-1]).decode())
                    if word == b"DATA" and mail.refuses != word:
                        lines = itertools.takewhile(lambda each: each != b".\r\n", self.rfile)
                        mail.taken.append((to, email.message_from_bytes(b"".join(lines))))
                        self.wfile.write(b"250 ok\r\n")
                    self.wfile.flush()

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)

    def answer(self, word: bytes) -> bytes:
        if word == self.refuses:
            return b"550 no\r\n"
        offers = b"250-here\r\n250-STARTTLS\r\n250 AUTH PLAIN\r\n" if self.tls else b"250 here\r\n"
        told = {b"EHLO": offers, b"STAR": b"220 go on\r\n", b"AUTH": b"235 ok\r\n"}
        told |= {b"DATA": b"354 go on\r\n", b"QUIT": b"221 bye\r\n"}
        return told.get(word, b"250 ok\r\n")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    with serving(made.server):
        yield made


@pytest.fixture
def mail() -> Iterator[Mail]:
    made = Mail()
    with serving(made.server):
        yield made


def everybody(web: Web, mail: Mail, **changes: Any) -> Addressees:
    hooks = [{"url": web.url, "form": form} for form in ("json", "slack", "teams")]
    post = {"server": mail.address, "tls": "none", "sender": "nights@example.org"}
    emails = [post | {"to": ["a@example.org", "b@example.org"]}]
    ping = web.url + "/ping"
    return Addressees.model_validate(
        {"schema": "1", "webhooks": hooks, "emails": emails, "ping": ping} | changes
    )


def refuse(message: str) -> None:
    pytest.fail(message)


def sections() -> set[str]:
    """The anchors of the runbook's headings."""
    text = (ROOT / "docs" / "guides" / "runbook.md").read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_each_outcome_has_a_part_of_the_runbook():
    actions = {*get_args(Action), "error"} - GOOD - {"repeat"}
    assert actions <= alert.OUTCOMES.keys()
    assert {section for _, section in alert.OUTCOMES.values()} <= sections()


@pytest.mark.parametrize("outcome", PLANS)
def test_an_alert_has_the_worst_outcome_and_arrives_everywhere(outcome, web, mail):
    found = alert.of(PLANS[outcome])
    assert found.outcome == outcome
    assert alert.send(found, everybody(web, mail, when="always"), refuse)
    link = f"docs/guides/runbook.md#{alert.OUTCOMES[outcome][1]}"
    posts = [body for method, _, body in web.asked if method == "POST"]
    assert len(posts) == 3
    assert all(link in body["text"] for body in posts)
    assert [set(body) == {"text"} for body in posts] == [False, True, True]
    assert posts[0]["outcome"] == outcome
    assert posts[0]["night"] == summary.as_json(PLANS[outcome])
    assert not re.search(r"[<>\n]", posts[1]["text"])
    ((to, message),) = mail.taken
    assert to == ["a@example.org", "b@example.org"]
    assert alert.OUTCOMES[outcome][0] in message["Subject"]
    assert link in message.get_payload()


@pytest.mark.parametrize("outcome", [*PLANS, "stopped"])
def test_the_ping_is_only_for_a_night_that_ran(outcome, web, mail):
    found = alert.of(PLANS[outcome]) if outcome in PLANS else alert.stopped("the engine is gone", 4)
    assert alert.send(found, everybody(web, mail), refuse)
    pinged = [path for method, path, _ in web.asked if method == "GET"]
    assert bool(pinged) == (outcome not in {"reboot", "nowhere", "stopped"})
    assert bool(mail.taken) == (outcome != "passed"), "nobody is called for a night that passed"


@pytest.mark.parametrize("code", [301, 302, 307, 400, 404, 429, 500, 503])
def test_a_message_that_is_not_taken_is_reported_without_the_secret(code, web, mail):
    web.code, mail.refuses = code, b"MAIL"
    lines: list[str] = []
    assert not alert.send(alert.of(PLANS["revoke"]), everybody(web, mail), lines.append)
    assert len(lines) == 5
    assert all(SECRET not in line for line in lines)
    assert sum(f"answered {code}" in line for line in lines) == 4
    assert "answered 550" in lines[3]
    assert all("elsewhere" not in path for _, path, _ in web.asked), "no redirect is followed"


def test_servers_that_are_not_there_are_reported(web, mail):
    lines: list[str] = []
    people = everybody(web, mail)
    for made in (web, mail):
        made.server.shutdown()
        made.server.server_close()
    assert not alert.send(alert.stopped("x", 4), people, lines.append)
    assert len(lines) == 4
    assert SECRET not in "".join(lines)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("offered", [True, False])
def test_a_password_goes_to_a_trusted_encrypted_server_alone(
    tmp_path, mail, monkeypatch, *, trusted, offered
):
    certificate = loopback.certificate(tmp_path)
    if offered:
        mail.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        mail.tls.load_cert_chain(certificate)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = mail.address.replace("127.0.0.1", "localhost")
    post = {"server": server, "sender": "a@b", "to": ["c@d"], "user": "nights", "password": SECRET}
    people = Addressees.model_validate({"schema": "1", "emails": [post]})
    lines: list[str] = []
    sent = alert.send(alert.stopped("x", 4), people, lines.append)
    assert sent == (trusted and offered)
    assert mail.logins == [f"\0nights\0{SECRET}"] * sent
    assert len(mail.taken) == sent
    assert SECRET not in "".join(lines)


def test_the_example_of_the_page_is_a_file_that_is_taken(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "nightly.md").read_text(encoding="utf-8")
    path = write(tmp_path)
    path.write_text(page.partition("## Alerts")[2].split("```")[1])
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.example.org/x")
    monkeypatch.setenv("SMTP_PASSWORD", SECRET)
    found = alert.load_addressees(path)
    assert found.webhooks
    assert found.ping
    assert found.emails[0].password == SECRET


def write(folder: Path, **content: Any) -> Path:
    path = folder / "alerts.yaml"
    path.write_text(json.dumps({"schema": 1} | content))
    path.chmod(0o600)
    return path


def test_a_value_may_come_from_the_environment(tmp_path, monkeypatch):
    path = write(tmp_path, ping="$PING_URL")
    monkeypatch.delenv("PING_URL", raising=False)
    with pytest.raises(ConfigurationError, match="has no PING_URL"):
        alert.load_addressees(path)
    monkeypatch.setenv("PING_URL", "https://ping.example.org/x")
    assert alert.load_addressees(path).ping == "https://ping.example.org/x"


@pytest.mark.parametrize(
    "content",
    [
        {"ping": f"http://ping.example.org/{SECRET}"},
        {"ping": f"ftp://127.0.0.1/{SECRET}"},
        {"webhooks": [{"url": f"https://x/{SECRET}", "form": SECRET}]},
        {"webhooks": SECRET},
        {"emails": [{"server": "x:25", "sender": "a@b", "to": [], "password": SECRET}]},
        {"emails": [{"server": "x", "sender": "a@b", "to": ["a@b"], "password": SECRET}]},
        {"emails": [{"server": "x:25", "sender": "a@b\nBcc: c@d", "to": ["a@b"], "password": SECRET}]},
        {SECRET[-4:]: SECRET},
        {"schema": 2, "ping": f"https://x/{SECRET}"},
    ],
)
def test_a_wrong_file_is_refused_without_its_secrets(content, tmp_path):
    with pytest.raises(ConfigurationError) as refused:
        alert.load_addressees(write(tmp_path, **content))
    assert SECRET not in str(refused.value)
    assert refused.value.next_step


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o660, 0o666])
def test_a_file_that_others_can_read_is_refused(mode, tmp_path):
    path = write(tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="read by others"):
        alert.load_addressees(path)


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.usefixtures("own_home", "no_disk_flushes")
def test_a_night_tells_people_and_nothing_that_they_do_changes_it(small_checkout, capsys, web, monkeypatch):
    assert call(capsys, "images").code == 0
    path = write(small_checkout, webhooks=[{"url": web.url}], ping=web.url + "/ping", when="always")
    words = ("nightly", "--force", "--alerts", path)
    assert call(capsys, *words, "--dry-run").code == 0
    assert not web.asked
    assert call(capsys, *words).code == 0
    assert [method for method, _, _ in web.asked] == ["POST", "GET"]
    web.code = 500
    done = call(capsys, *words)
    assert done.code == 0
    assert "NOT TOLD" in done.err
    assert SECRET not in done.out + done.err
    web.asked.clear()
    monkeypatch.setattr("stackcheck.cli.nightly._run_night", raising(EngineError("the engine is gone")))
    assert call(capsys, *words).code == 4
    assert [(method, body["outcome"]) for method, _, body in web.asked] == [("POST", "stopped")]


def raising(error: StackcheckError) -> Any:
    def fail(*_arguments: object) -> None:
        raise error

    return fail


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize(
    "case",
    [
        *(("exit-code", status, False) for status in ("3", "4", "6", "7", "8", "9", "10")),
        *(("exit-code", status, True) for status in ("1", "2", "130", "203")),
        *(("signal", "KILL", True), ("oom-kill", "9", True), ("timeout", "TERM", True), ("", "", True)),
    ],
)
def test_a_unit_that_failed_is_told_once(case, tmp_path, web, capsys, monkeypatch):
    result, status, tells = case
    monkeypatch.setenv("MONITOR_SERVICE_RESULT", result)
    monkeypatch.setenv("MONITOR_EXIT_STATUS", status)
    path = write(tmp_path, webhooks=[{"url": web.url}])
    assert call(capsys, "nightly", "alert", "--alerts", path).code == 0
    assert [body["outcome"] for _, _, body in web.asked] == ["stopped"] * tells


@pytest.mark.usefixtures("own_home")
def test_a_trial_says_whether_everybody_was_told(tmp_path, web, capsys):
    path = write(tmp_path, webhooks=[{"url": web.url}], ping=web.url)
    assert call(capsys, "nightly", "alert", "--trial", "--alerts", path).code == 0
    assert [body["outcome"] for _, _, body in web.asked] == ["trial"]
    web.code = 404
    assert call(capsys, "nightly", "alert", "--trial", "--alerts", path).code == 2
    assert call(capsys, "nightly", "alert", "--trial").code == 2, "nobody is named"
