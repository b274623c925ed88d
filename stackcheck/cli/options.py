"""The options and arguments that several verbs share, the times in them, and the one style of help.

In: nothing. Out: annotated types for Typer, each declared once, and `new_app` for the verbs of a module.
Every verb lists its options in this order: what to do, where to (--to, --key, --plain-http), how to build,
how to report (--json, --dry-run, --root).
"""

import datetime as dt
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stackcheck.errors import ConfigurationError
from stackcheck.files import checkout
from stackcheck.imaging.wheels.wheel_cache import VARIABLE
from stackcheck.matrix import matrix
from stackcheck.mirrors import VARIABLE as MIRRORS
from stackcheck.oci.store import parse_target
from stackcheck.policy import Tier as TierName
from stackcheck.vendors import Vendor as VendorName

HERE = Path()
LAST = ("as_json", "dry_run", "root")  # the options with which a verb ends


def new_app() -> typer.Typer:
    """A group for the verbs of one module; its help is plain text that can be copied."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)


def option(words: str, text: str, default: str | None = None, **more: Any) -> Any:
    """An option in the words of --help: `--key FILE`, its line, and what stands for its default."""
    flags, metavar = _split(words)
    return typer.Option(*flags, metavar=metavar, help=text, show_default=default or True, **more)


def argument(metavar: str, text: str, default: str | bool = True, **more: Any) -> Any:
    """An argument in the words of --help: its name, its line, and what stands for its default."""
    return typer.Argument(metavar=metavar, help=text, show_default=default, **more)


def _split(words: str) -> tuple[list[str], str | None]:
    """The flags of an option, and its metavar if it takes a value."""
    *flags, last = words.split()
    return ([*flags, last], None) if last.startswith("-") else (flags, last)


def taking(
    name: str, make: Callable[..., Any], *, late: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a verb that takes an object: the verb gets the options of the function that makes it.

    Args:
        name: The verb's parameter; the options stand in its place.
        make: Makes the object of its options.
        late: Options that stand behind the verb's own, as in other verbs that have them.
    """
    asked = inspect.signature(make, eval_str=True).parameters

    def decorated(verb: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            made = make(**{option: given.pop(option) for option in asked})
            verb(**{name: made}, **given)

        found: list[inspect.Parameter] = []
        for own in inspect.signature(verb, eval_str=True).parameters.values():
            if own.name in LAST:
                found += [asked[name] for name in late if asked[name] not in found]
            found += [each for each in asked.values() if each.name not in late] if own.name == name else [own]
        run.__doc__, run.__name__ = verb.__doc__, verb.__name__
        run.__annotations__ = {each.name: each.annotation for each in found}
        run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]  # what Typer reads
        return run

    return decorated


Selectors = Annotated[
    list[str] | None, argument("SELECTOR", "Patterns for stack ids, such as 'rocm7*'.", False)
]
Name = Annotated[str, argument("STACK|IMAGE", "A stack id, or any image reference.")]
Ref = Annotated[str, argument("REF", "oci:DIR:TAG or HOST/REPO:TAG; @sha256:… instead of :TAG works.")]

Tier = Annotated[
    TierName | None,
    option("--tier", "How thorough the suites are.", "the tier that certifies, in matrix.yaml"),
]
Vendor = Annotated[
    VendorName | None, option("--gpu-vendor", "The vendor whose checks run.", "the stack's vendor")
]
Force = Annotated[bool, option("--force", "Run the suites again even if nothing changed.")]

Target = Annotated[
    str | None, option("--to TARGET", "Where to publish: oci:DIR or HOST/REPO.", "`publish` in matrix.yaml")
]
FromOthers = Annotated[
    Path | None,
    option(
        "--others FOLDER",
        "Also show what others measured: signed bundles (stackcheck contribute), and contributors.pub.",
        "none",
        exists=True,
    ),
]
SigningKey = Annotated[
    Path | None, option("--key FILE", "Signing key (PEM).", "this user's key, made on first use")
]
SignWith = Annotated[
    str | None,
    option(
        "--sign-with CMD",
        "A program that signs: bytes in, signature out; --key is its public key.",
        "the signing key",
    ),
]


def _existing_key(given: str | None) -> str | None:
    """A key that the user names is an argument: a wrong one says nothing of the image."""
    if given and "://" not in given and not Path(given).exists():
        raise ConfigurationError(
            "--key names a file that does not exist",
            where=given,
            got="no such file",
            expected="the publisher's public key (PEM), or https://…#sha256=FINGERPRINT",
            next_step="ask the publisher for the file, then: --key FILE",
        )
    return given


PublicKey = Annotated[
    str | None,
    option(
        "--key FILE|URL",
        "Public key (PEM) to verify with; a URL ends in #sha256=FINGERPRINT.",
        "this user's key",
        callback=_existing_key,
    ),
]
PlainHttp = Annotated[
    bool, option("--plain-http", "Use http for a registry on another machine (not encrypted).")
]

Wheelhouse = Annotated[
    Path | None,
    option(
        "--wheelhouse DIR",
        "Take wheels from this folder only, and from no package index.",
        "none",
        exists=True,
    ),
]
WheelCache = Annotated[
    str | None,
    option(
        "--wheel-cache DIR",
        "Keep downloaded and built wheels in this folder; `off` disables the cache.",
        f"${VARIABLE}, else the user's cache folder",
    ),
]
Platform = Annotated[
    Literal["linux/amd64", "linux/arm64"] | None,
    option("--platform", "The platform to build for.", "this host's platform"),
]
NoCache = Annotated[bool, option("--no-cache", "Run every build step again.")]

MirrorsFile = Annotated[
    Path | None,
    option(
        "--mirrors FILE",
        "A file with this site's mirrors of public indexes, archives and registries.",
        f"${MIRRORS}, else the user's mirrors.yaml",
        exists=True,
    ),
]

AcceptPython = Annotated[
    list[str] | None,
    option(
        "--accept-python SHA256",
        "The image's Python may be a file of this digest, although no package owns it; once or more.",
        "none: a package must own it",
    ),
]
PackagedPython = Annotated[
    bool, option("--packaged-python", "Refuse an image whose Python belongs to no package of it.")
]

AsJson = Annotated[bool, option("--json", "Print one JSON document to stdout.")]
DryRun = Annotated[bool, option("--dry-run", "Print what would be done, and change nothing.")]
# These verbs write below images/ or read tests/faults, which only a checkout has.
WRITE_IN_A_CHECKOUT = frozenset({"lock", "prove", "render"})


def _root(context: typer.Context, given: Path) -> Path:
    """The checkout that --root names, else the nearest one upwards, else what the tool itself ships."""
    if context.resilient_parsing or given != HERE:
        return given
    if found := checkout.above(HERE):
        return found
    if context.info_name in WRITE_IN_A_CHECKOUT:
        raise ConfigurationError(
            f"`{context.info_name}` works in a checkout of stackcheck, and here is none",
            where=str(Path.cwd()),
            expected=f"a folder with {checkout.MARK}, here or above",
            next_step="go to your checkout, or name it with --root DIR",
        )
    return checkout.users_own()


Root = Annotated[
    Path,
    option(
        "--root DIR",
        "The checkout.",
        "the nearest folder upwards with a matrix.yaml, else the user's data folder",
        exists=True,
        callback=_root,
    ),
]


def target_of(root: Path, given: str | None) -> str:
    """Where images are: the argument, else `publish` in matrix.yaml, whose folder lies in the checkout."""
    if given:
        return parse_target(given)
    named = matrix.load_matrix(root / "matrix.yaml").publish
    if named.startswith("oci:") and root.resolve() != Path.cwd():
        named = f"oci:{root / named.removeprefix('oci:')}"
    return parse_target(named)


def sign_words(command: str | None) -> tuple[str, ...]:
    """The words of --sign-with, as a shell would split them; no shell runs them."""
    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise ConfigurationError(
            "the command in --sign-with has an unmatched quote",
            got=command,
            expected=f"quotes in pairs ({error})",
        ) from error
    if command is not None and not words:
        raise ConfigurationError("--sign-with is empty", expected="a program and its arguments")
    return words


def accepted_python(given: list[str] | None, *names: str) -> tuple[str, ...]:
    """The digests of --accept-python, as sha256:HEX, each once; sha256sum prints them without the prefix.

    Raises:
        ConfigurationError: One is not a digest, or all of `names` are stacks: a package owns the Python of
            those.
    """
    found = tuple(f"sha256:{text.lower().removeprefix('sha256:')}" for text in given or ())
    for text, digest in zip(given or (), found, strict=True):
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ConfigurationError(
                "--accept-python takes the SHA-256 of a file",
                got=f"{text}: length {len(digest.removeprefix('sha256:'))}",
                expected="64 hexadecimal digits, as sha256sum prints them",
                next_step="leave the option out: the error about a Python of no package has its digest",
            )
    if found and not any(re.search("[/:@]", name) for name in names):
        raise ConfigurationError(
            "--accept-python is for images that were not built here",
            got=f"the stack {' and the stack '.join(names)}",
            expected="the reference of an image: in a stack a package owns the Python",
            next_step="leave the option out",
        )
    return tuple(dict.fromkeys(found))


def key_path(key: Path | None, sign_with: str | None) -> Path:
    """The signing key, or the public key of --sign-with: by default this user's."""
    from stackcheck.certificate import keys  # not above: `stackcheck list` needs no cryptography

    path = key or keys.default_path()
    return keys.public_path(path) if sign_with is not None and path.suffix == ".key" else path


_DURATION = re.compile(r"(?P<number>\d+)(?P<unit>[dhms])")
_DAYS = {"today": 0, "yesterday": 1}
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def duration(text: str, option: str) -> dt.timedelta:
    """The duration that an option names.

    Raises:
        ConfigurationError: The text is not a duration.
    """
    match = _DURATION.fullmatch(text)
    try:
        if match:
            return dt.timedelta(**{_UNITS[match["unit"]]: int(match["number"])})
    except OverflowError:
        pass
    raise ConfigurationError(
        "invalid duration",
        where=option,
        got=text,
        expected="a number and d, h, m or s, such as 30d; at most 999999999d",
    )


def since(text: str, option: str) -> dt.datetime:
    """The moment that an option names: a duration before now, `today`, `yesterday`, or an ISO time (UTC).

    Raises:
        ConfigurationError: The text is neither a duration, nor a date or time.
    """
    try:
        if _DURATION.fullmatch(text):
            return dt.datetime.now(dt.UTC) - duration(text, option)
        if text in _DAYS:
            begin = dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            return begin - dt.timedelta(days=_DAYS[text])
        found = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            "invalid time",
            where=option,
            got=text,
            expected="a number and d, h, m or s, such as 30d; today, yesterday; or a date such as 2026-11-01",
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)
