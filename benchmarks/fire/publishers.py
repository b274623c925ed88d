"""Publishers that are killed, disturbed and raced, and what must hold after each.

In: a registry, a folder, a seed, and how many of each. Out: figures, and in `Campaign.wrong` each wrong
outcome.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from fire.disturbed import disturbed

from referrers_proxy import referrers_proxy
from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet
from stackcheck.certificate import attachments, publish, verify
from stackcheck.errors import StackcheckError
from stackcheck.oci.distribution import Repository
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.certificate.statement import Envelope

KEY = new_key()
PUBLIC = KEY.public_key()
START = dt.datetime.now(dt.UTC)
CLIENT = {"timeout_s": (5.0, 0.4), "retry_delays_s": (0.01, 0.02)}


class WrongError(Exception):
    """An outcome that must never be."""


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
        """Publishers on hosts of their own, which share no lock: of one stack, and of different stacks.

        By turns on a registry without the referrers API, and on one with it.
        """
        with referrers_proxy(self.host) as referring:
            for number in range(count):
                host = referring if (number + number // 2) % 2 else self.host
                self.race(number, publishers, host, same=number % 2 == 0)
        return {"races": count, "publishers": publishers}

    def race(self, number: int, publishers: int, host: str, *, same: bool) -> None:
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
