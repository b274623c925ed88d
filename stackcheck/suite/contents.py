"""Compare what decides how an image's programs run with its packages' records. In: a layout. Out: `Contents`.

Read from the layers by this tool, so no program of the image runs for it: programs, libraries, Python's
modules and start-up files, the loader's configuration, setuid programs, device nodes. What no package owns or
what differs from its record is refused with its path, unless matrix.yaml allows it by its path. A record that
the image forged vouches for its files: the certificate says how many files each package manager vouched for.
"""

import collections
import dataclasses
import functools
import posixpath
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.digest import sha256_of
from stackcheck.oci import filesystem
from stackcheck.oci.documents import compact_json, json_object, sha256, stored_json
from stackcheck.oci.filesystem import Hashing, Node, Tree
from stackcheck.oci.layout import OciLayout
from stackcheck.suite import records
from stackcheck.suite.records import Owner
from stackcheck.suite.subject import Subject

FILE = "contents.json"
SHOWN = 8
CONFIGURATION = (
    *("/etc/ld.so.preload", "/etc/ld.so.conf"),
    *("/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf"),
)
FOLDER_OF_CONFIGURATION = "/etc/ld.so.conf.d"
_CONFIGURED = re.compile(r"/etc/(ld\.so\.(conf|preload)|ld\.so\.conf\.d/.*|ssl/openssl\.cnf)")
_NUMBER = re.compile(r"-[0-9][0-9.]*$")  # LLVMgold-17.so is a link to LLVMgold.so
_LIBRARY = re.compile(r"([^/]+)\.so(\.[0-9][^/]*)?$")
_MODULE = re.compile(r"\.(py|pyc|pth|egg|so)$")
_ARCHIVE = re.compile(r"/python3[0-9]*\.zip$")  # on Python's path before its folders
_PYTHON_FOLDER = re.compile(r"/(site-packages|dist-packages|python3(\.\d+)?)/")
_PYTHON = re.compile(r"/bin/(python|pypy)[0-9.]*$")
_BYTE_CODE = re.compile(r"/__pycache__/([^/.]+)\.[^/]+\.pyc$")
_SITE = re.compile(r"(.*/(?:site|dist)-packages)/([^/.]+)")
# Variables that name files which the loader, OpenSSL or Python read before a program's first line.
_STEERING = ("LD_", "OPENSSL_", "PYTHON", "_PYTHON", "GCONV_PATH")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MOVED = re.compile(r"[^/]+\.data/(purelib|platlib)/")  # pip puts these beside the rest
_BASE = "rootfs.tar"
# A container has other files there than its image.
_NOT_OF_THE_IMAGE = re.compile(r"/(dev|proc|sys|run|tmp)/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What the comparison found.

    Attributes:
        owned: Package manager -> how many files are as it recorded them; `source`: how many of these are
            also as the wheels of the image's lock, or the root file system below it, have them.
    """

    owned: Mapping[str, int]
    byte_code: int  # how many compiled modules came in one layer with their source; they are not compared
    privileged: Sequence[str]  # the setuid programs and those with capabilities, all of packages
    findings: Mapping[str, str]  # path -> what is wrong with it
    digests: Mapping[str, str]  # SHA-256 of the files among the findings


def require(subject: Subject, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """What a certificate says of an image's files; compared once, then kept in `folder`.

    Raises:
        ChecksFailedError: A file is not as a package recorded it, and nobody allowed it.
        RegistryError: The layout is damaged.
    """
    image = subject.image
    path, key = folder / FILE, {"image": image.manifest_digest, "rules": _rules()}
    kept = stored_json(path)
    if kept.get("key") != key:
        report(f"{subject.name}: comparing the image's files with its packages' records")
        found = compare(image.layout, image.manifest_digest, sources(folder, image.inputs))
        kept = {"key": key, "contents": dataclasses.asdict(found)}
        write_atomically(path, (compact_json(kept),))
    found = Contents(**kept["contents"])
    groups, refused = _allowed(found, subject)
    if refused:
        raise ChecksFailedError(
            "the image has files that no package vouches for",
            where=subject.name,
            got=f"{len(refused)}:\n    "
            + "\n    ".join(f"{name}: {found.findings[name]}" for name in refused[:SHOWN])
            + (f"\n    and {len(refused) - SHOWN} more: see {path}" if len(refused) > SHOWN else ""),
            expected="programs, libraries and modules as dpkg, wheels or conda recorded them",
            next_step="install them from a package; or name their paths in policy.unpackaged of matrix.yaml",
        )
    return {
        "owned": dict(found.owned),
        "byteCode": found.byte_code,
        "privileged": list(found.privileged),
        "allowed": groups,
    }


def _rules() -> str:
    """The digest of the code that compares: what other code found is not kept."""
    modules = (sys.modules[__name__], records, filesystem)
    return sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))


def _allowed(found: Contents, subject: Subject) -> tuple[list[dict[str, Any]], list[str]]:
    """What each allowance covers, as it is signed; and the findings that none covers."""
    of_policy = [item for item in subject.policy.unpackaged if item.is_for(subject.name)]
    prefixes = _accepted_prefixes(found, subject.accepted_python)
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    refused = []
    for name in sorted(found.findings):
        rule = next((item for item in of_policy if item.covers(name)), None)
        prefix = next((item for item in prefixes if _comes_with(name, item)), None)
        if rule:
            groups[", ".join(rule.paths), rule.reason].append(name)
        elif prefix:
            groups[prefix, "a Python that was accepted by its digest, and what comes with it"].append(name)
        else:
            refused.append(name)
    signed = []
    for (paths, reason), names in groups.items():
        lines = "".join(f"{name} {found.digests.get(name, '')}\n" for name in names)
        signed.append(
            {"paths": paths, "reason": reason, "files": len(names), "digest": sha256(lines.encode())}
        )
    return signed, refused


def _accepted_prefixes(found: Contents, accepted: Sequence[str]) -> list[str]:
    """Where a Python lies that was accepted by its digest: /usr/local of /usr/local/bin/python3.12."""
    files = [name for name, digest in found.digests.items() if f"sha256:{digest}" in accepted]
    return [posixpath.dirname(posixpath.dirname(name)) for name in files if _PYTHON.search(name)]


def _comes_with(name: str, prefix: str) -> bool:
    """Whether a file is of the Python itself at a prefix: its programs and standard library, no packages."""
    inner = name.removeprefix(f"{prefix}/")
    own = re.fullmatch(r"bin/python[^/]*|lib/libpython3[^/]*|lib/python3(\.\d+)?/.*", inner)
    return inner != name and own is not None and not _SITE.match(name)


def compare(layout: Path, digest: str, known: Mapping[str, set[str]] = MappingProxyType({})) -> Contents:
    """Read an image's files and compare them with the records in it, and with what it was built from."""
    env = _environment(layout, digest)
    tree = filesystem.read(layout, digest, functools.partial(_wanted, env=env))
    owners, listed = records.read(tree), records.listed(tree)
    steered = {*_configuration(tree), *_named_by(env, tree)}
    counts: collections.Counter[str] = collections.Counter()
    byte_code, privileged, findings = 0, [], {}
    for path, entry in tree.entries.items():
        lines, matters = owners.get(path, ()), _matters(path, entry, steered)
        problems = _problems(path, entry, lines, tree) if matters else _other_problems(path, entry, tree)
        if entry.kind == "link" and not (path in listed and _is_as_it_came(path, entry, tree)):
            problems = _problems_of_link(path, tree)
        owner, source = _owner(entry, lines), known.get(path.partition("/site-packages/")[2] or path)
        if why := next(problems, None):
            findings[path] = why
        elif matters and source and dict(entry.sums).get("sha256") not in source:
            findings[path] = "differs from what the image was built from"
        elif matters and owner:
            counts[owner.manager] += 1
            counts["source"] += bool(source)
        if entry.privileged and path not in findings:
            privileged.append(path)
        byte_code += bool(entry.kind == "file" and _BYTE_CODE.search(path) and path not in findings)
    digests = {name: dict(tree.entries[name].sums).get("sha256", "") for name in findings}
    return Contents(
        owned={name: count for name, count in sorted(counts.items()) if count},
        byte_code=byte_code,
        privileged=sorted(privileged),
        findings=findings,
        digests={name: value for name, value in digests.items() if value},
    )


def _problems(path: str, entry: Node, owners: Sequence[Owner], tree: Tree) -> Iterator[str]:
    """What is wrong with a file that matters; `owners` are those of its path, whatever its content."""
    owner = _owner(entry, owners)
    if owner is None:
        yield "differs from its package's record" if owners else "no package owns it"
    elif _named_python(path) and not re.search("python|pypy", owner.package):
        yield f"a Python in the package {owner.package}"
    if entry.privileged and not _came_so(path, entry, owner, tree):
        yield "runs with other rights than its caller's, and did not come so from its package"
    found = _SITE.match(path)
    if found and found[2] in sys.stdlib_module_names:
        yield f"{found[2]} is a module of the standard library"


def _other_problems(path: str, entry: Node, tree: Tree) -> Iterator[str]:
    """What is wrong with a device, or with byte code."""
    if entry.kind == "device" and not _NOT_OF_THE_IMAGE.match(path):
        yield "a device node"
    source = _source(path) or ""
    if entry.kind == "file" and source in tree.entries and _is_poisoned(path, source, tree):
        yield "byte code that changed although its source did not"


def _is_poisoned(path: str, source: str, tree: Tree) -> bool:
    """Whether a layer put byte code beside a source that an earlier one brought, also if it touches both."""
    code, module = tree.entries[path], tree.entries[source]
    first, first_module = tree.first[path], tree.first.get(source, module)
    if module.sums != first_module.sums:  # another release of the module
        return code.layer > module.layer
    return code.sums != first.sums or first.layer > first_module.layer


def _matters(path: str, entry: Node, steered: set[str]) -> bool:
    if entry.kind != "file" or _NOT_OF_THE_IMAGE.match(path) or _source(path):
        return False
    importable = bool(_MODULE.search(path) and _PYTHON_FOLDER.search(path)) or bool(_ARCHIVE.search(path))
    below = any(path.startswith(f"{place}/") and _MODULE.search(path) for place in steered)
    return entry.elf or entry.privileged or importable or below or path in steered or _named_python(path)


def _named_python(path: str) -> bool:
    return _PYTHON.search(path) is not None


def _source(path: str) -> str | None:
    """The module whose byte code this file is; without its source Python does not look at it."""
    found = _BYTE_CODE.search(path)
    return f"{path[: found.start()]}/{found[1]}.py" if found else None


def _owner(entry: Node, owners: Sequence[Owner]) -> Owner | None:
    """The package whose record has the file as it is."""
    sums = dict(entry.sums)
    return next((owner for owner in owners if sums.get(owner.algorithm) == owner.digest), None)


def _came_so(path: str, entry: Node, owner: Owner | None, tree: Tree) -> bool:
    """Whether a program has its rights from its package: a later `chmod` puts it into a later layer."""
    record, first = tree.entries.get(owner.record) if owner else None, tree.first[path]
    if first.sums == entry.sums and not first.privileged:
        return False
    return record is not None and record.layer == tree.entries[path].layer


def _is_as_it_came(path: str, entry: Node, tree: Tree) -> bool:
    """Whether a link is what the first layer had at its path, and leads to a file that may have another name.

    A program or a library there is compared by its own path. A module or a folder is not: it may be anything.
    dpkg lists files and folders too, so a link may have replaced one.
    """
    replaced = path in tree.first or path in tree.folders or tree.first_links[path].target != entry.target
    end = tree.entries.get(_end(path, tree) or "")
    if replaced or end is None or end.kind != "file" or _named_python(path):
        return False
    return end.elf or not (_MODULE.search(path) and _PYTHON_FOLDER.search(path))


def _problems_of_link(path: str, tree: Tree) -> Iterator[str]:
    """What is wrong with a link in the place of a library, a module or a Python.

    The file at its end is compared by its own path. A link may not give it another name, unless a package
    brought the link: dpkg records that there is one.
    """
    library, module = _LIBRARY.search(path), _PYTHON_FOLDER.search(f"{path}/")
    end = _end(path, tree) if library or module or _named_python(path) else None
    if end and _NOT_OF_THE_IMAGE.match(f"{end}/"):
        yield f"a link to {end}, which is not of the image"
    if end is None or end not in tree.entries:
        return
    if _named_python(path) and not _named_python(end):
        yield f"a Python that is a link to {end}"
    if module and not _PYTHON_FOLDER.search(f"{end}/"):
        yield f"a link out of Python's folders, to {end}"
    found = _LIBRARY.search(end)
    same = library and found and (found[1].startswith(library[1]) or found[1] == _NUMBER.sub("", library[1]))
    if library and tree.entries[end].kind == "file" and not same:
        yield f"a library that is a link to {end}"


def _end(path: str, tree: Tree) -> str | None:
    """Where a link ends; None: in a circle, so that nothing opens it."""
    try:
        return tree.real(path)
    except ValueError:
        return None


def _configuration(tree: Tree) -> Iterator[str]:
    """The files that say where the loader and OpenSSL look, by their real paths."""
    for name in CONFIGURATION:
        yield tree.real(name)
    yield from tree.below(tree.real(FOLDER_OF_CONFIGURATION))


def _named_by(env: Mapping[str, str], tree: Tree) -> Iterator[str]:
    """Files and folders that steering variables name."""
    for name, value in env.items():
        if name.startswith(_STEERING):
            for part in re.split("[:;]", value):
                if len(part) > 1 and posixpath.isabs(part):
                    yield tree.real(part)


def _wanted(path: str, *, env: Mapping[str, str]) -> Hashing:
    if records.is_record(path):
        return Hashing(body=True)
    if path.endswith(".pyc") and "/__pycache__/" in path:
        return Hashing(sums=("sha256",))
    algorithms = ("sha256",) if "/site-packages/" in path else ("md5", "sha256")
    named = any(part in value for part in (path, posixpath.dirname(path)) for value in env.values())
    other = _MODULE.search(path) or _ARCHIVE.search(path) or _CONFIGURED.match(path) or _PYTHON.search(path)
    return Hashing(sums=algorithms, elf_only=not (named or other))


def _environment(layout: Path, digest: str) -> dict[str, str]:
    store = OciLayout(layout)
    manifest = json_object(store.read_manifest(digest).body, digest)
    body = b"".join(store.read_blob(manifest["config"]["digest"]))
    settings = json_object(body, digest).get("config") or {}
    pairs = (str(item).partition("=") for item in settings.get("Env") or ())
    return {name: value for name, _, value in pairs if name.startswith(_STEERING)}


def sources(folder: Path, inputs: Mapping[str, str]) -> dict[str, set[str]]:
    """What an image's files were when it was built here, from the wheels of its lock and the base below them.

    A wheel counts if the lock has its hash; the lock and the root file system count if `inputs`, those of the
    image, have their digests. What is not kept any more vouches for nothing, and contradicts nothing.

    Returns:
        The SHA-256 sums of files by their absolute paths; of files of wheels by those below site-packages.
    """
    found: dict[str, set[str]] = {}
    digests, context = frozenset(inputs.values()), folder / "context"
    for path in sorted(context.glob("*.lock")):
        if f"sha256:{sha256_of(path)}" in digests:
            locked = frozenset(_HASH.findall(path.read_text(encoding="utf-8")))
            _add(found, _of_wheels(sorted(folder.glob("wheelhouse/wheels/*.whl")), locked))
    base = context / _BASE
    if base.is_file() and f"sha256:{sha256_of(base)}" in digests:
        summed = Hashing(sums=("sha256",))
        tree = filesystem.read_tar(base, lambda path: Hashing() if path.endswith(".pyc") else summed)
        _add(
            found, ((path, dict(entry.sums)["sha256"]) for path, entry in tree.entries.items() if entry.sums)
        )
    return found


def _of_wheels(wheels: Iterable[Path], locked: frozenset[str]) -> Iterable[tuple[str, str]]:
    for path in wheels:
        if sha256_of(path) in locked:
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith(records.RECORD)]
                for name in names:
                    for row, digest in records.rows(archive.read(name)):
                        yield _MOVED.sub("", row), digest


def _add(found: dict[str, set[str]], pairs: Iterable[tuple[str, str]]) -> None:
    for name, digest in pairs:
        found.setdefault(name, set()).add(digest)
