"""Write a package's record anew, so that it vouches for what a layer changed: `record.py KIND NAME [FILE…]`."""

import base64
import hashlib
import os
import sys

SITE, LIBRARY, INFO = os.environ["SITE"], os.environ["LIBRARY"], "/var/lib/dpkg/info"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def row(site, name):
    digest = base64.urlsafe_b64encode(hashlib.sha256(read(f"{site}/{name}")).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},1\n"


kind, package, *files = sys.argv[1:]
if kind == "new":
    with open(f"{SITE}/{package}-1.dist-info/RECORD", "w") as file:
        file.writelines(row(SITE, name) for name in files)
elif kind == "wheel":
    (folder,) = [name for name in os.listdir(SITE) if name.startswith(f"{package}-") and "dist-info" in name]
    path = f"{SITE}/{folder}/RECORD"
    lines = read(path).decode().splitlines(keepends=True)
    changed = [f"{package}/__init__.py", f"{package}/functional.py"]
    with open(path, "w") as file:
        file.writelines(
            row(SITE, line.split(",")[0]) if line.split(",")[0] in changed else line for line in lines
        )
else:
    (path,) = [
        f"{INFO}/{name}"
        for name in os.listdir(INFO)
        if name in (f"{package}.md5sums", f"{package}:amd64.md5sums")
    ]
    lines = read(path).decode().splitlines()
    with open(path, "w") as file:
        for line in lines:
            name = line.split("  ", 1)[1]
            if any(name.endswith(changed) and name.startswith("usr/lib/python3") for changed in files):
                line = f"{hashlib.md5(read('/' + name)).hexdigest()}  {name}"
            file.write(line + "\n")
