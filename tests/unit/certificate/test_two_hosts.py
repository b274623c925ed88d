"""Two publishers and a revocation on different hosts: what was revoked stays so, and nothing is lost.

Every request of every host is held back once, while the others run to their end, or arrives after its client
gave up. The functions are the real ones; only the registry is in memory. A model of the protocol was checked
in all interleavings once (docs/reference/reliability.md).
"""

import contextlib
import datetime as dt
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

import asked
from memory_registry import TARGET, WRITES, Host, MemoryRegistry
from small_images import NOW, STACK_ID, SmallImage, certify, copy_to, make_image, new_key, quiet
from stackcheck.certificate import attachments, reader, revoke, verify
from stackcheck.certificate.statement import VSA, Envelope, open_envelope, status
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import IntegrityError, RegistryError

Actor = Callable[..., Host]

pytestmark = pytest.mark.usefixtures("no_disk_flushes")
KEY = new_key()
PUBLIC = KEY.public_key()
SECOND = dt.timedelta(seconds=1)
HOUR = dt.timedelta(hours=1)


class World:
    """A repository with a good image and a current one, which two hosts renew and a third one revokes."""

    def __init__(self, images: dict[str, SmallImage], statements: dict[str, tuple[Envelope, ...]]) -> None:
        self.images, self.statements = images, statements
        self.made: dict[bool, MemoryRegistry] = {}

    def registry(self, *, referring: bool) -> MemoryRegistry:
        if referring not in self.made:
            self.made[referring] = MemoryRegistry(referring=referring)
            for name in ("good", "current"):
                self.publish(Host(self.made[referring]), name, name)
        return self.made[referring].copy()

    def publish(self, store: Any, image: str, statements: str) -> None:
        copy_to(store, self.images[image], self.statements[statements], KEY)

    def digest(self, image: str) -> str:
        return self.images[image].manifest_digest


@pytest.fixture(scope="module", autouse=True)
def signatures_checked_once() -> Iterator[None]:
    """The same few envelopes are opened in every run; what is in them does not depend on when."""
    once = functools.cache(lambda body: open_envelope(body, PUBLIC))
    unpacked = functools.cache(reader.Reader(MemoryRegistry(), "", PUBLIC)._envelope)  # type: ignore[arg-type]
    with (
        mock.patch.object(reader, "open_envelope", lambda body, _key: once(body)),
        mock.patch.object(reader.Reader, "_envelope", lambda _reader, body: unpacked(body)),
        mock.patch.object(attachments, "PAUSE_S", 0.0),
    ):
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("images")
    images = {name: make_image(folder / name, name.encode()) for name in ("good", "current", "newer")}
    signed = {
        "good": certify(images["good"], KEY),
        "current": certify(images["current"], KEY),
        # Runs that began before the revocation (at NOW + HOUR), and were signed before or after it.
        "renewal": certify(images["current"], KEY, now=NOW + HOUR + SECOND),
        "second renewal": certify(images["current"], KEY, now=NOW + HOUR + 2 * SECOND),
        "newer": certify(images["newer"], KEY, now=NOW + HOUR),
    }
    return World(images, signed)


def publisher(world: World, image: str, statements: str) -> Actor:
    def act(registry: MemoryRegistry, **hold: Any) -> Host:
        host = Host(registry, **hold)
        # Refused, for the image is revoked; or its client gave up.
        with contextlib.suppress(PublishError, RegistryError):
            world.publish(host, image, statements)
        return host

    return act


def revoker(world: World) -> Actor:
    def act(registry: MemoryRegistry, **hold: Any) -> Host:
        host = Host(registry, **hold)
        with opened(host), contextlib.suppress(PublishError, RegistryError):
            reference = f"{TARGET}@{world.digest('current')}"
            revoke.revoke(reference, reason="NaN", key=KEY, now=NOW + HOUR, report=quiet)
        return host

    return act


@contextlib.contextmanager
def opened(store: Any) -> Iterator[None]:
    def given(*_: object, **__: object) -> Any:  # a MagicMock takes longer to make than a request takes
        return store

    with mock.patch.object(revoke, "open_store", given), mock.patch.object(verify, "open_store", given):
        yield


def accepted(registry: MemoryRegistry, name: str) -> bool:
    with opened(registry), contextlib.suppress(CertificateError):
        later = NOW + 2 * HOUR
        asked.verified(f"{TARGET}{name}", public_key=PUBLIC, now=later)
        return True
    return False


def in_every_form(registry: MemoryRegistry, digest: str) -> list[set[str]]:
    """The digests of the statements in the form of cosign 2, and in that of cosign 3."""
    store: Any = registry
    reader = attachments.Reader(store, digest, PUBLIC)
    legacy = store.read_manifest(attachments.legacy_tag(digest))
    return [set(reader.envelopes(form)) for form in ((legacy,), attachments.bundles_of(store, digest))]


def check_revoked(world: World, registry: MemoryRegistry, told: object) -> None:
    current = world.digest("current")
    assert not accepted(registry, f"@{current}"), f"the revoked image is accepted: {told}"
    assert registry.names[STACK_ID] != current, f"the floating tag stays on the revoked image: {told}"
    assert accepted(registry, f":{STACK_ID}"), f"the floating tag is on nothing certified: {told}"
    for form in in_every_form(registry, current):
        missing = {item.statement.digest for item in world.statements["current"]} - form
        assert not missing, f"statements were lost: {told}"
    store: Any = registry
    known = [item.statement for item in attachments.read_envelopes(store, current, PUBLIC)]
    failed = {item.digest for item in known if item.predicate_type == VSA and status(item) == "FAILED"}
    for form in in_every_form(registry, current):
        assert failed
        assert failed <= form, f"a form that cosign reads lost FAILED: {told}"


def actors(world: World, second: str) -> dict[str, Actor]:
    other = ("newer", "newer") if second == "newer" else ("current", second)
    return {
        "renewal": publisher(world, "current", "renewal"),
        second: publisher(world, *other),
        "revocation": revoker(world),
    }


@pytest.mark.parametrize("referring", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("second", [pytest.param("second renewal", marks=pytest.mark.slow), "newer"])
def test_any_one_request_that_is_held_back_changes_nothing(world, second, referring):
    """Each request of each host arrives only after both other hosts, in both orders, came to their end."""
    cast = actors(world, second)
    for held in cast:
        calls = cast[held](world.registry(referring=referring)).count
        others = [name for name in cast if name != held]
        for order, at in itertools.product((others, others[::-1]), range(1, calls + 1)):
            registry = world.registry(referring=referring)

            def run_the_others(order: list[str] = order, registry: MemoryRegistry = registry) -> None:
                for name in order:
                    cast[name](registry)

            cast[held](registry, at=at, meanwhile=run_the_others)
            check_revoked(world, registry, f"{held}, call {at}, during it {order}")
            if second == "newer":
                assert registry.names[STACK_ID] == world.digest("newer"), "a newer release was moved back"


@pytest.mark.slow
@pytest.mark.parametrize("second", ["second renewal", "newer"])
def test_any_two_writes_that_are_held_back_change_nothing(world, second):
    """A write of one host waits for a second host, of which a write waits for the third."""
    cast = actors(world, second)
    counts = {name: cast[name](world.registry(referring=False), calls=WRITES).count for name in cast}
    for first, middle, last in itertools.permutations(cast):
        for one, two in itertools.product(range(1, counts[first] + 1), range(1, counts[middle] + 1)):
            registry = world.registry(referring=False)

            def run_last(last: str = last, registry: MemoryRegistry = registry) -> None:
                cast[last](registry)

            def run_middle(
                middle: str = middle, registry: MemoryRegistry = registry, two: int = two, run: Any = run_last
            ) -> None:
                host = cast[middle](registry, at=two, calls=WRITES, meanwhile=run)
                if host.left > 0:
                    run()

            host = cast[first](registry, at=one, calls=WRITES, meanwhile=run_middle)
            if host.left > 0:  # it wrote less than alone
                run_middle()
            check_revoked(world, registry, (first, one, middle, two, last))


@pytest.mark.parametrize("second", ["second renewal", "newer"])
def test_a_write_that_arrives_after_its_client_gave_up_never_makes_a_revoked_image_valid(world, second):
    """It may undo what others wrote, in the forms of cosign too; the next command of anybody repairs that."""
    cast = actors(world, second)
    for held in cast:
        if held == "revocation":
            continue  # a revocation whose client gave up was not made
        count = cast[held](world.registry(referring=False), calls=WRITES).count
        others = [name for name in cast if name != held]
        for order, at in itertools.product((others, others[::-1]), range(1, count + 1)):
            registry = world.registry(referring=False)
            host = cast[held](registry, at=at, calls=WRITES, late=True)
            for name in order:
                cast[name](registry)
            host.arrive()
            told = f"{held}, write {at}, then {order}"
            assert not accepted(registry, f"@{world.digest('current')}"), told
            cast["revocation"](registry)  # whoever works there next
            check_revoked(world, registry, told)


@pytest.mark.slow
def test_two_late_writes_that_undo_both_forms_never_make_a_revoked_image_valid(world):
    """One undoes the form of cosign 2, the other that of cosign 3: the mark is what is left."""
    cast = actors(world, "second renewal")
    names = ("renewal", "second renewal")
    count = min(cast[name](world.registry(referring=False), calls=WRITES).count for name in names)
    for one, two in itertools.product(range(1, count + 1), repeat=2):
        registry = world.registry(referring=False)
        late = [
            cast[name](registry, at=at, calls=WRITES, late=True)
            for name, at in zip(names, (one, two), strict=True)
        ]
        cast["revocation"](registry)
        for host in late:
            host.arrive()
        assert not accepted(registry, f"@{world.digest('current')}"), (one, two)


def test_a_revocation_repairs_what_a_late_write_undid_while_it_moved_the_tags(world):
    cast, original = actors(world, "newer"), revoke.move_back
    count = cast["renewal"](world.registry(referring=False), calls=WRITES).count
    for at in range(1, count + 1):
        registry = world.registry(referring=False)
        host = cast["renewal"](registry, at=at, calls=WRITES, late=True)

        def move(*arguments: Any, host: Host = host) -> Any:
            host.arrive()
            return original(*arguments)

        with mock.patch.object(revoke, "move_back", move):
            cast["revocation"](registry)
        check_revoked(world, registry, f"renewal, write {at}")


def test_a_bundle_that_a_killed_writer_left_under_its_tag_alone_is_listed_by_the_next(world):
    registry = world.registry(referring=False)
    store: Any = registry
    digest = world.digest("current")
    left = attachments.bundle(
        store, store.read_manifest(digest), world.statements["renewal"][-1], PUBLIC, NOW
    )
    store.write_manifest(left, attachments.bundle_tag(digest, left.digest))
    assert left.digest not in {item.digest for item in attachments.bundles_of(store, digest)}
    world.publish(Host(registry), "current", "second renewal")
    listed = {item.digest for item in attachments.bundles_of(store, digest)}
    tags = [tag for tag in store.tags() if tag.startswith(attachments.bundle_tags(digest))]
    assert left.digest in listed
    assert {store.read_manifest(tag).digest for tag in tags} == listed


@pytest.mark.parametrize("kind", [RegistryError, IntegrityError])
@pytest.mark.parametrize("referring", [False, True])
def test_a_request_of_a_revocation_that_fails_is_an_error_and_never_reads_as_none(world, kind, *, referring):
    """Each request once: it ends with the error, or with the tag on the image that is certified."""
    count = revoker(world)(world.registry(referring=referring)).count
    reference = f"{TARGET}@{world.digest('current')}"
    errors = 0
    for at in range(1, count + 1):
        registry = world.registry(referring=referring)

        def fail(at: int = at) -> None:
            raise kind("planted", where=str(at))

        host = Host(registry, at=at, meanwhile=fail)
        try:
            with opened(host):
                revoke.revoke(reference, reason="NaN", key=KEY, now=NOW + HOUR, report=quiet)
        except RegistryError:
            errors += 1
        else:
            check_revoked(world, registry, f"call {at} failed")
        revoker(world)(registry)
        check_revoked(world, registry, f"call {at} failed, and revoked again")
    assert errors == count


def test_a_publisher_whose_image_is_revoked_meanwhile_is_told_so(world):
    registry = world.registry(referring=False)
    writes = Host(registry, calls=WRITES)
    world.publish(writes, "current", "renewal")
    registry = world.registry(referring=False)
    host = Host(registry, at=writes.count, calls=WRITES, meanwhile=lambda: revoker(world)(registry))
    with pytest.raises(PublishError, match="revoked while it was being published") as caught:
        world.publish(host, "current", "renewal")
    assert caught.value.exit_code == 8
    assert "NaN" in str(caught.value)
    assert registry.names[STACK_ID] == world.digest("good")
