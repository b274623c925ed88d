"""Publishers that are killed, disturbed and raced, and what must hold after each.

In: a registry and its files, a folder, a seed, and the number of one schedule. Out: what it did, and in
`Campaign.wrong` each wrong outcome.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from fire.disturbed import GIVES_UP_S, disturbed, many_faults, one_fault

from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet
from stackcheck.certificate import attachments, for_host, publish, verify
from stackcheck.errors import StackcheckError
from stackcheck.oci.distribution import Repository
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stackcheck.certificate.statement import Envelope

KEY = new_key()
PUBLIC = KEY.public_key()
START = dt.datetime.now(dt.UTC)
CLIENT = {"timeout_s": (30.0, GIVES_UP_S), "retry_delays_s": (0.01, 0.02)}


class WrongError(Exception):
    """An outcome that must never be."""


def repository(host: str, name: str, **changes: Any) -> Repository:
    return Repository(host, name, **changes)


def release(store: Any, image: SmallImage, envelopes: tuple[Envelope, ...], tag: str = STACK_ID) -> None:
    source = OciLayout(image.layout)
    publish.copy_and_tag(
        *(source, source.only_manifest(), envelopes, store), tag=tag, public_key=PUBLIC, report=quiet, key=KEY
    )


def verified(store: Repository, name: str) -> str:
    wanted = for_host.Wanted(device_model="CPU", driver=None)
    return verify.verify(
        f"{store.target}{name}", wanted, public_key=PUBLIC, now=START + dt.timedelta(hours=1)
    ).digest


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
    """The images and statements that all parts use, and one repository that every schedule starts from."""

    def __init__(self, host: str, folder: Path, seed: int, files: Path, referring: str = "") -> None:
        self.host, self.folder, self.seed, self.referring = host, folder, seed, referring
        self.repositories = files / "docker/registry/v2/repositories/campaign"
        self.images = {name: make_image(folder / name, name.encode() * 9000) for name in ("first", "second")}
        self.signed = {name: certify(image, KEY, now=START) for name, image in self.images.items()}
        self.wrong: list[str] = []
        release(repository(host, "campaign/start"), self.images["first"], self.signed["first"])
        self.calls, self.requests, first_s = self.one_publication()
        self.usual_s = [first_s]

    @contextlib.contextmanager
    def target(self, name: str) -> Iterator[Repository]:
        """A new repository that has the first image: a copy of the registry's own files of one."""
        shutil.copytree(self.repositories / "start", self.repositories / name)
        yield repository(self.host, f"campaign/{name}")
        shutil.rmtree(self.repositories / name)

    def one_publication(self) -> tuple[int, int, float]:
        """Of one that nothing disturbs: calls to the store, requests to the registry, seconds."""
        with (
            self.target("counted") as store,
            disturbed(self.host, lambda _number, _method: "") as (host, seen),
        ):
            counting = Counting(repository(host, store.repository), 0)
            begin = time.monotonic()
            release(counting, self.images["second"], self.signed["second"])
            return counting.count, seen["requests"], time.monotonic() - begin

    def judged(self, what: str, check: Callable[[], object]) -> None:
        try:
            check()
        except (StackcheckError, WrongError) as error:
            self.wrong.append(f"{what}: {error}")
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            self.wrong.append(f"{what}: {traceback.format_exc()}")

    def recover(self, store: Repository) -> float:
        """Judge a repository after a disturbance, run the same command again, and judge again."""
        self.judged("before", lambda: consistent(store, self.images))
        begin = time.monotonic()
        self.judged("again", lambda: release(store, self.images["second"], self.signed["second"]))
        seconds = time.monotonic() - begin
        self.judged("after", lambda: self.complete(store))
        self.usual_s.append(seconds)
        return seconds

    def complete(self, store: Repository) -> None:
        if verified(store, f":{STACK_ID}") != self.images["second"].manifest_digest:
            raise WrongError("the second run did not move the tag")
        verified(store, f"@{self.images['first'].manifest_digest}")
        no_orphans(store, self.images["second"])

    def undisturbed(self, number: int) -> dict[str, Any]:
        """A publication that nothing disturbs: what the other times are to be compared with."""
        with self.target(f"undisturbed-{number}") as store:
            begin = time.monotonic()
            release(store, self.images["second"], self.signed["second"])
            return {"publication_s": time.monotonic() - begin}

    # kill -9

    def boundary(self, number: int) -> dict[str, Any]:
        """Kill at a call to the store."""
        with self.target(f"boundary-{number}") as store:
            self.in_child(lambda: self.publish_until(store, number))
            return {"recovery_s": self.recover(store)}

    def instant(self, number: int) -> dict[str, Any]:
        """Kill at a random moment of a publication."""
        after_s = random.Random(f"{self.seed} instant {number}").random() * statistics.median(self.usual_s)
        with self.target(f"instant-{number}") as store:
            killed = self.in_child(lambda: self.publish_until(store, 0), after_s=after_s)
            return {"outcome": "killed" if killed else "had ended", "recovery_s": self.recover(store)}

    def publish_until(self, store: Repository, number: int) -> None:
        release(Counting(store, number), self.images["second"], self.signed["second"])

    def in_child(self, work: Callable[[], object], after_s: float | None = None) -> bool:
        """Do the work in a process that is killed, by itself or after some seconds; whether it was."""
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                work()
            os._exit(0)
        if after_s is not None:
            time.sleep(after_s)
            os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    # a proxy that disturbs

    def fault(self, number: int) -> dict[str, Any]:
        """By turns one fault at one request, wherever in the publication, and many at random."""
        chooser = random.Random(f"{self.seed} fault {number}")
        plan = one_fault(chooser, self.requests) if number % 2 else many_faults(chooser)
        with self.target(f"fault-{number}") as store:
            with disturbed(self.host, plan) as (host, seen):
                client = repository(host, store.repository, patience=Patience(120.0), **CLIENT)
                outcome = self.disturbed_release(client)
            planted = {name: count for name, count in seen.items() if name != "requests"}
            return {"outcome": outcome, "planted": planted, "recovery_s": self.recover(store)}

    def disturbed_release(self, client: Repository) -> str:
        try:
            release(client, self.images["second"], self.signed["second"])
        except StackcheckError as error:
            return f"refused: {error.what}"
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            self.wrong.append(traceback.format_exc())
            return "traceback"
        return "published"

    # races

    def race(self, number: int, publishers: int = 8) -> dict[str, Any]:
        """Publishers on hosts of their own, which share no lock: of one stack, and of different stacks.

        By turns on a registry without the referrers API, and on one with it.
        """
        host = self.referring if (number + number // 2) % 2 else self.host
        same = number % 2 == 0
        ids = [STACK_ID if same else f"{STACK_ID}-{n}" for n in range(publishers)]
        folder = self.folder / f"race-{number}"
        images = {
            str(n): make_image(folder / str(n), b"%d %d" % (number, n), stack_id=name)
            for n, name in enumerate(ids)
        }
        signed = {n: certify(image, KEY, now=START) for n, image in images.items()}
        store = repository(host, f"campaign/race-{number}")
        children = [
            self.start(lambda n=n, i=i: release(store, images[n], signed[n], ids[i]), folder, n)
            for i, n in enumerate(images)
        ]
        for child in children:
            if os.waitpid(child, 0)[1]:
                self.wrong.append("a publisher failed")
        for i, image in enumerate(images.values()):
            what = f"publisher {i}"
            self.judged(what, lambda image=image: verified(store, f"@{image.manifest_digest}"))
            self.judged(what, lambda image=image: no_orphans(store, image))
            self.judged(what, lambda i=i: consistent(store, images, ids[i]))
        api = "with" if host == self.referring else "without"
        return {"outcome": f"{'one stack' if same else 'different stacks'}, {api} the referrers API"}

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

        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.dies_at and self.count % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = found(*arguments, **options)
            if self.count == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call
