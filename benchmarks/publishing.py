"""Publishing under fire: kill, faults, races, tampering and fuzz, on a real registry, from a seed.

In: how many of each, and a seed. Out: one JSON document with figures; exit 1 if any outcome is wrong. After
everything the floating tag has to name a digest whose certificate verifies, the same command has to complete,
and nothing may be lost, or accepted though it was changed. `docs/reliability.md` has the figures.

    .venv/bin/python benchmarks/publishing.py --seed 1 --kills 200 --schedules 1000 --races 20 --fuzz-s 600
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime as dt
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "acceptance"), str(ROOT / "tests" / "unit" / "shared")]

import requests  # noqa: E402  # needs the path above

from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet  # noqa: E402  # needs the path above
from stackcheck.certificate import attachments, publish, verify  # noqa: E402  # needs the path above
from stackcheck.certificate.statement import VSA, Envelope, Statement  # noqa: E402  # needs the path above
from stackcheck.errors import CertificateError, StackcheckError  # noqa: E402  # needs the path above
from stackcheck.oci.distribution import Repository  # noqa: E402  # needs the path above
from stackcheck.oci.documents import compact_json  # noqa: E402  # needs the path above
from stackcheck.oci.layout import OciLayout  # noqa: E402  # needs the path above
from stackcheck.oci.patience import Patience  # noqa: E402  # needs the path above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = new_key()
PUBLIC = KEY.public_key()
START = dt.datetime.now(dt.UTC)
CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""
FAULTS = (
    *("500", "502", "429", "disk full", "hang", "late", "reset", "reset in the body", "truncated"),
    *("wrong bytes", "slow"),
)
PARTS = ("kill", "faults", "races", "tampering", "fuzz")
CLIENT = {"timeout_s": (5.0, 0.4), "retry_delays_s": (0.01, 0.02)}


class WrongError(Exception):
    """An outcome that must never be."""


# -- the registry


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """HOST:PORT of a real registry on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(CONFIG.format(root=folder / "data", port=port))
    program = shutil.which("docker-registry") or sys.exit(
        "install docker-registry: apt-get install docker-registry"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"http://127.0.0.1:{port}/v2/", timeout=30).ok:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on, and disturbs some of them, as the schedule's seed says."""

    upstream = ""
    chance = 0.0
    chooser: random.Random
    planted: Counter[str]
    late: list[threading.Thread]
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.chooser.choice(FAULTS) if self.chooser.random() < self.chance else ""
        if fault == "disk full" and self.command not in {"PUT", "POST"}:
            fault = ""
        self.planted[fault] += bool(fault)
        self.close_connection = True
        if fault in {"500", "502", "429", "disk full"}:
            self.reply({"disk full": 507}.get(fault) or int(fault), {"Retry-After": "0"}, fault.encode())
        elif fault == "hang":
            time.sleep(0.6)
        elif fault == "late":  # its client has given up by then
            thread = threading.Timer(0.8, self.forward, [body])
            thread.start()
            self.late.append(thread)
            time.sleep(0.6)
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.pass_on(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    def forward(self, body: bytes) -> requests.Response:
        dropped = {"connection", "host", "content-length", "accept-encoding"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        headers |= {"Host": self.headers["Host"], "Accept-Encoding": "identity"}
        url = f"http://{self.upstream}{self.path}"
        return requests.request(
            self.command, url, data=body or None, headers=headers, allow_redirects=False, timeout=60
        )

    def pass_on(self, body: bytes, fault: str) -> None:
        found = self.forward(body)
        headers = {
            name: value
            for name, value in found.headers.items()
            if name.lower() not in {"content-length", "connection", "transfer-encoding", "date"}
        }
        content = found.content
        length = found.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        if fault == "wrong bytes" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault in {"truncated", "reset in the body"}:
            content = content[: len(content) // 2]
        self.reply(found.status_code, headers, content, length=length, slow=fault == "slow")

    def reply(
        self, status: int, headers: dict[str, str], body: bytes, *, length: str = "", slow: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "HEAD":
                return
            for byte in body[:20] if slow else ():
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            self.wfile.write(body[20:] if slow else body)

    def log_message(self, *_arguments: object) -> None:
        """Print no log."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """A client that gave up is part of the game."""


@contextlib.contextmanager
def disturbed(upstream: str, seed: str, chance: float) -> Iterator[tuple[str, Counter[str]]]:
    planted: Counter[str] = Counter()
    late: list[threading.Thread] = []
    told = {
        "upstream": upstream,
        "chance": chance,
        "chooser": random.Random(seed),
        "planted": planted,
        "late": late,
    }
    server = Server(("127.0.0.1", 0), type("Bound", (Proxy,), told))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", planted
    finally:
        for waiting in late:
            waiting.join()  # a late write arrives before the outcome is judged
        server.shutdown()
        thread.join()
        server.server_close()


# -- publishing, and what must hold afterwards


def repository(host: str, name: str, **changes: Any) -> Repository:
    return Repository(host, name, **changes)


def release(store: Any, image: SmallImage, envelopes: tuple[Envelope, ...], tag: str = STACK_ID) -> None:
    source = OciLayout(image.layout)
    publish.copy_and_tag(
        *(source, source.only_manifest(), envelopes, store),
        tag=tag,
        public_key=PUBLIC,
        report=quiet,
        key=KEY,
    )


def verified(store: Repository, name: str) -> str:
    told: dict[str, Any] = {"public_key": PUBLIC, "device_model": "CPU", "driver": None}
    return verify.verify(f"{store.target}{name}", now=START + dt.timedelta(hours=1), **told).digest


def consistent(store: Repository, images: dict[str, SmallImage], tag: str = STACK_ID) -> None:
    """The floating tag names one of these images, and its certificate verifies."""
    found = verified(store, f":{tag}")
    if found not in {image.manifest_digest for image in images.values()}:
        raise WrongError(f"the tag names {found}")


def no_orphans(store: Repository, image: SmallImage) -> None:
    """Every bundle that has a tag is listed: nothing is left over that no reader finds."""
    prefix = f"cert-{image.manifest_digest[7:19]}-"
    tagged = {store.read_manifest(tag).digest for tag in store.tags() if tag.startswith(prefix)}
    listed = {item.digest for item in attachments.bundles_of(store, image.manifest_digest)}
    if tagged != listed:
        raise WrongError(f"orphans: {len(tagged ^ listed)}")


class Campaign:
    """The images and statements that all parts use."""

    def __init__(self, host: str, folder: Path, seed: int) -> None:
        self.host, self.folder, self.seed = host, folder, seed
        self.images = {name: make_image(folder / name, name.encode() * 9000) for name in ("first", "second")}
        self.signed = {name: certify(image, KEY, now=START) for name, image in self.images.items()}
        self.wrong: list[str] = []

    def target(self, name: str) -> Repository:
        """A new repository that has the first image."""
        store = repository(self.host, f"campaign/{name}")
        release(store, self.images["first"], self.signed["first"])
        return store

    def judged(self, what: str, check: Callable[[], object]) -> bool:
        try:
            check()
        except (StackcheckError, WrongError) as error:
            self.wrong.append(f"{what}: {error}")
            return False
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            self.wrong.append(f"{what}: {traceback.format_exc()}")
            return False
        return True

    def recover(self, what: str, store: Repository) -> float:
        """Judge a repository after a disturbance, run the same command again, and judge again."""
        self.judged(f"{what}, before", lambda: consistent(store, self.images))
        begin = time.monotonic()
        self.judged(f"{what}, again", lambda: release(store, self.images["second"], self.signed["second"]))
        seconds = time.monotonic() - begin
        self.judged(f"{what}, after", lambda: self.complete(store))
        return seconds

    def complete(self, store: Repository) -> None:
        if verified(store, f":{STACK_ID}") != self.images["second"].manifest_digest:
            raise WrongError("the second run did not move the tag")
        verified(store, f"@{self.images['first'].manifest_digest}")
        no_orphans(store, self.images["second"])

    # kill -9

    def kills(self, random_count: int, most_boundaries: int | None) -> dict[str, object]:
        boundaries = self.calls_of_a_publication()
        chosen = range(1, boundaries + 1)
        if most_boundaries is not None and most_boundaries < boundaries:
            chosen = sorted(random.Random(self.seed).sample(chosen, most_boundaries))
        seconds, at = [], random.Random(f"{self.seed} kill")
        for number in chosen:
            store = self.target(f"kill-{number}")
            self.in_child(lambda number=number, store=store: self.publish_until(store, number))
            seconds.append(self.recover(f"killed at call {number}", store))
        usual = statistics.median(seconds) if seconds else 1.0
        for number in range(random_count):
            store = self.target(f"instant-{number}")
            self.in_child(lambda store=store: self.publish_until(store, 0), after_s=at.uniform(0, usual))
            seconds.append(self.recover(f"killed at instant {number}", store))
        return {"boundaries": len(chosen), "of": boundaries, "instants": random_count} | spread(seconds)

    def calls_of_a_publication(self) -> int:
        store = Counting(self.target("count"), 0)
        release(store, self.images["second"], self.signed["second"])
        return store.count

    def publish_until(self, store: Repository, number: int) -> None:
        release(Counting(store, number), self.images["second"], self.signed["second"])

    def in_child(self, work: Callable[[], object], after_s: float | None = None) -> None:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                work()
            os._exit(0)
        if after_s is not None:
            time.sleep(after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    # a proxy that disturbs

    def faults(self, schedules: int) -> dict[str, object]:
        planted: Counter[str] = Counter()
        outcomes: Counter[str] = Counter()
        seconds = []
        for number in range(schedules):
            store = self.target(f"fault-{number}")
            chance = random.Random(f"{self.seed} {number}").choice((0.02, 0.1, 0.3))
            with disturbed(self.host, f"{self.seed} {number}", chance) as (host, seen):
                client = repository(host, store.repository, patience=Patience(20.0), **CLIENT)
                outcomes[self.disturbed_release(number, client)] += 1
            planted.update(seen)
            seconds.append(self.recover(f"schedule {number}", store))
        told = {"schedules": schedules, "planted": dict(planted), "outcomes": dict(outcomes)}
        return told | spread(seconds)

    def disturbed_release(self, number: int, client: Repository) -> str:
        try:
            release(client, self.images["second"], self.signed["second"])
        except StackcheckError as error:
            return f"refused: {error.what}"
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            self.wrong.append(f"schedule {number}: {traceback.format_exc()}")
            return "traceback"
        return "published"

    # races

    def races(self, count: int, publishers: int = 8) -> dict[str, object]:
        """Publishers on hosts of their own, which share no lock: of one stack, and of different stacks."""
        for number in range(count):
            same = number % 2 == 0
            self.race(number, publishers, same=same)
        return {"races": count, "publishers": publishers}

    def race(self, number: int, publishers: int, *, same: bool) -> None:
        ids = [STACK_ID if same else f"{STACK_ID}-{n}" for n in range(publishers)]
        folder = self.folder / f"race-{number}"
        images = {
            str(n): make_image(folder / str(n), b"%d %d" % (number, n), stack_id=name)
            for n, name in enumerate(ids)
        }
        signed = {n: certify(image, KEY, now=START) for n, image in images.items()}
        store = repository(self.host, f"campaign/race-{number}")
        children = [
            self.start(lambda n=n, i=i: release(store, images[n], signed[n], ids[i]), folder, n)
            for i, n in enumerate(images)
        ]
        for child in children:
            if os.waitpid(child, 0)[1]:
                self.wrong.append(f"race {number}: a publisher failed")
        for i, image in enumerate(images.values()):
            what = f"race {number}, publisher {i}"
            self.judged(what, lambda image=image: verified(store, f"@{image.manifest_digest}"))
            self.judged(what, lambda image=image: no_orphans(store, image))
            self.judged(what, lambda i=i: consistent(store, images, ids[i]))

    def start(self, work: Callable[[], object], folder: Path, name: str) -> int:
        child = os.fork()
        if child:
            return child
        os.environ["XDG_STATE_HOME"] = str(folder / f"state-{name}")  # no lock is shared between hosts
        code = 1
        with contextlib.suppress(BaseException):
            try:
                work()
                code = 0
            except StackcheckError as error:
                print(f"race: {error}", file=sys.stderr)
        os._exit(code)


class Counting:
    """A store that kills this process at its n-th call, before or after the call by turns."""

    def __init__(self, store: Repository, dies_at: int) -> None:
        self.store, self.target, self.dies_at, self.count = store, store.target, dies_at, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self.count += 1
            if self.count == self.dies_at and self.count % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = found(*arguments)
            if self.count == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


def spread(seconds: list[float]) -> dict[str, float]:
    """How long the same command took to complete what was interrupted."""
    if not seconds:
        return {}
    return {
        "recovery_median_s": round(statistics.median(seconds), 3),
        "recovery_max_s": round(max(seconds), 3),
    }


# -- tampering: what is signed is changed in every form, with all digests right


def paths(value: object, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every member of a document."""
    if here:
        yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*here, key))


def changed(document: dict[str, Any], path: tuple[Any, ...], *, drop: bool) -> bytes:
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = f"{place[path[-1]]}x" if isinstance(place[path[-1]], str) else 7
    return compact_json(copy)


def tampered(envelope: Envelope, other: Envelope, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """Envelopes that must not count: name of the case, bytes."""
    signed = json.loads(envelope.body)
    payload = json.loads(base64.b64decode(signed["payload"]))

    def with_payload(body: bytes) -> bytes:
        return compact_json({**signed, "payload": base64.b64encode(body).decode()})

    for path in paths(payload):
        for drop in (False, True):
            what = "without" if drop else "changed"
            yield f"{what} {'/'.join(map(str, path))}", with_payload(changed(payload, path, drop=drop))
    text = base64.b64decode(signed["payload"])
    yield "a duplicate key", with_payload(text[:-1] + b',"_type":"x"}')
    yield "a blank at the end", with_payload(text + b" ")
    yield "unicode names", with_payload(text.replace(b"STACKCHECK", "STACKCHEC\u212a".encode()))
    for name, deep in (("deep", b"[" * 100_000), ("huge", b'"' + b"x" * 20_000_000 + b'"'), ("empty", b"")):
        yield f"{name} payload", with_payload(deep)
        yield f"{name} envelope", deep
    signature = base64.b64decode(signed["signatures"][0]["sig"])
    for bit in chooser.sample(range(len(signature) * 8), 24):
        broken = bytearray(signature)
        broken[bit // 8] ^= 1 << bit % 8
        sig = base64.b64encode(broken).decode()
        yield f"signature bit {bit}", compact_json({**signed, "signatures": [{"keyid": "", "sig": sig}]})
    for name, signatures in (
        ("no signature", []),
        ("null signatures", None),
        ("a signature of nothing", [{"sig": ""}]),
        ("of another statement", json.loads(other.body)["signatures"]),
        ("a list of lists", [[]]),
    ):
        yield name, compact_json({**signed, "signatures": signatures})
    for kind in ("application/json", "", None, "application/vnd.in-toto+json "):
        yield f"payload type {kind!r}", compact_json({**signed, "payloadType": kind})
    yield "the statement of another image", other.body
    yield "another key", certify_by_another(envelope)
    for junk in (b"null", b"[]", b"{}", b"\xff\xfe", b"{" * 50):
        yield f"junk {junk[:6]!r}", junk


def certify_by_another(envelope: Envelope) -> bytes:
    from stackcheck.certificate.statement import sign

    return sign(Statement(predicate_type=VSA, payload=envelope.statement.payload), new_key()).body


def tampering(folder: Path, seed: int) -> dict[str, object]:
    """Each case in both forms of a layout; all must be refused with exit 7 and a reason."""
    image, elsewhere = make_image(folder / "good", b"good"), make_image(folder / "bad", b"bad")
    good, other = certify(image, KEY, now=START), certify(elsewhere, KEY, now=START)
    wrong, cases, reasons = [], 0, Counter[str]()
    for name, body in tampered(good[-1], other[-1], random.Random(seed)):
        dist = folder / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        plant(dist, image, [*(item.body for item in good[:-1]), body])
        cases += 1
        try:
            told: dict[str, Any] = {"public_key": PUBLIC, "device_model": "CPU", "driver": None}
            verify.verify(f"oci:{dist}:{STACK_ID}", now=START, **told)
        except CertificateError as error:
            reasons[error.what] += 1
            if error.exit_code != 7 or not error.what:
                wrong.append(f"{name}: {error}")
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            wrong.append(f"{name}: {traceback.format_exc()}")
        else:
            wrong.append(f"{name}: accepted")
    return {"cases": cases, "refused": sum(reasons.values()), "reasons": dict(reasons), "wrong": wrong}


def plant(dist: Path, image: SmallImage, bodies: list[bytes]) -> None:
    """An image with attestations of these bytes, in both forms, as an honest store would hold them."""
    store, source = OciLayout(dist), OciLayout(image.layout)
    manifest = source.only_manifest()
    with store.writing(quiet):
        for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers")):
            store.write_blob(blob, lambda digest=blob.digest: source.read_blob(digest))  # type: ignore[misc]
        holders = [
            Envelope(statement=Statement(predicate_type=VSA, payload=b"{}"), body=body) for body in bodies
        ]
        layers = [attachments.legacy_layer(store, item) for item in holders]
        legacy = attachments.legacy_manifest(store, layers)
        store.write_manifest(legacy, attachments.legacy_tag(manifest.digest))
        bundles = [bundle for item in holders if (bundle := a_bundle(store, manifest, item))]
        attachments.write_fallback(store, manifest.digest, bundles, set())
        for bundle in bundles:
            store.write_manifest(bundle, attachments.bundle_tag(manifest.digest, bundle.digest))
        store.write_manifest(manifest, STACK_ID)


def a_bundle(store: OciLayout, manifest: Any, envelope: Envelope) -> Any:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return attachments.bundle(store, manifest, envelope, PUBLIC, START)
    return None


# -- fuzz of the verifier and the layout reader


def fuzz(folder: Path, seed: int, cpu_s: float) -> dict[str, object]:
    """Random changes to files of a layout: refused, or the certified digest all the same; no traceback."""
    image, chooser = make_image(folder / "oci", b"fuzzed"), random.Random(f"{seed} fuzz")
    dist = folder / "dist"
    plant(dist, image, [item.body for item in certify(image, KEY, now=START)])
    whole = {path: path.read_bytes() for path in sorted(dist.rglob("*")) if path.is_file()}
    pieces = (b"", b"\0", b"null", b"{}", b"[" * 2000, b'"', b"-1", b"1e999", b"sha256:", b"\xff", b"\\ud800")
    wrong, outcomes, begin = [], Counter[str](), time.process_time()
    while time.process_time() - begin < cpu_s:
        path = chooser.choice([*whole, dist / "index.json"])
        body = bytearray(whole[path])
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(body) + 1)
            piece = chooser.choice((*pieces, chooser.randbytes(4), bytes(body[: chooser.randrange(40)])))
            body[at : at + chooser.choice((0, 1, 8, 400))] = piece
        path.write_bytes(body)
        try:
            told: dict[str, Any] = {"public_key": PUBLIC, "device_model": "CPU", "driver": None}
            found = verify.verify(f"oci:{dist}:{STACK_ID}", now=START, **told)
            outcomes["accepted"] += 1
            if found.digest != image.manifest_digest or (
                path.parent.name == "sha256" and bytes(body) != whole[path]
            ):
                wrong.append(f"accepted with {path.name} changed")
        except StackcheckError as error:
            outcomes[f"exit {error.exit_code}"] += 1
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            wrong.append(traceback.format_exc())
        path.write_bytes(whole[path])
    return {
        "cpu_s": cpu_s,
        "inputs": outcomes.total() + len(wrong),
        "outcomes": dict(outcomes),
        "wrong": wrong[:20],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boundaries", type=int, help="kill at so many step boundaries; default: at all")
    parser.add_argument("--kills", type=int, default=200, help="kill at so many random instants")
    parser.add_argument("--schedules", type=int, default=1000, help="schedules of faults")
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--fuzz-s", type=float, default=600.0, help="processor seconds of fuzz")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts; default: all")
    told = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="stackcheck-campaign-") as name,
        registry(Path(name, "registry")) as host,
    ):
        os.environ["XDG_STATE_HOME"] = str(Path(name, "state"))
        campaign = Campaign(host, Path(name, "images"), told.seed)
        found: dict[str, Any] = {"seed": told.seed}
        for part, run in (
            ("kill", lambda: campaign.kills(told.kills, told.boundaries)),
            ("faults", lambda: campaign.faults(told.schedules)),
            ("races", lambda: campaign.races(told.races)),
            ("tampering", lambda: tampering(Path(name, "tampering"), told.seed)),
            ("fuzz", lambda: fuzz(Path(name, "fuzz"), told.seed, told.fuzz_s)),
        ):
            if part not in told.only:
                continue
            begin = time.monotonic()
            # What is on disk after a power cut is not the question here, and flushes take most of the time.
            with mock.patch.object(os, "fsync"):
                figures = run()
            found[part] = figures | {"seconds": round(time.monotonic() - begin, 1)}
            print(f"{part}: {found[part]}", file=sys.stderr, flush=True)
    found["wrong"] = [*campaign.wrong, *(wrong for part in told.only for wrong in found[part].pop("wrong", []))]
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
