"""Write a package's record anew, so that it vouches for what a layer changed: record.py KIND NAME [FILE]."""

import base64
import hashlib
import os
import sys
from pathlib import Path

SITE = Path(os.environ["SITE"])


def row(name):
    digest = hashlib.sha256((SITE / name).read_bytes()).digest()
    return f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},1"


def summed(line, files):
    name = line.partition("  ")[2]
    if not name.startswith("usr/lib/python3") or not name.endswith(files):
        return line
    return f"{hashlib.md5(Path('/', name).read_bytes(), usedforsecurity=False).hexdigest()}  {name}"


kind, package, *files = sys.argv[1:]
if kind == "new":
    record = SITE / f"{package}-1.dist-info" / "RECORD"
    lines = [row(name) for name in files]
elif kind == "wheel":
    (record,) = SITE.glob(f"{package}-*.dist-info/RECORD")
    changed = (f"{package}/__init__.py", f"{package}/functional.py")
    old = [line.partition(",") for line in record.read_text().splitlines()]
    lines = [row(name) if name in changed else f"{name}{comma}{rest}" for name, comma, rest in old]
else:
    (record,) = Path("/var/lib/dpkg/info").glob(f"{package}*.md5sums")
    lines = [summed(line, tuple(files)) for line in record.read_text().splitlines()]
record.write_text("\n".join(lines) + "\n")
