"""A service in its sandbox, where systemd does not run. In: a unit. Out: what its program does there.

`python sandboxed.py UNIT [COMMAND…]`, as root, applies each directive of the sandbox as systemd does: mounts
in a namespace of its own, the bounding set, seccomp by libseccomp. A directive that is not known here is an
error, so none is left out. Without a command it starts the unit's own, in its folder and with its variables.
"""

import ctypes
import errno
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS = 0x00020000, 0x04000000
NAMESPACES = (NEWNS, NEWUTS, 0x02000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00000080)
MS_BIND, MS_REMOUNT, MS_RDONLY, MS_REC, MS_PRIVATE = 4096, 32, 1, 16384, 1 << 18
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NE, GE, EQ, MASKED_EQ = 1, 5, 4, 7
REALTIME = (1, 2, 6)  # SCHED_FIFO, SCHED_RR, SCHED_DEADLINE
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
SECTION = "NoNewPrivileges="  # the first directive of the sandbox
MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2}  # call -> which argument is the mode


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        *(("arg", ctypes.c_uint), ("op", ctypes.c_int)),
        *(("a", ctypes.c_uint64), ("b", ctypes.c_uint64)),
    )


class Filter:
    """A seccomp filter that allows what no rule denies."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libseccomp.so.2")
        self.library.seccomp_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(self.library.seccomp_init(ALLOW))

    def deny(self, call: str, *given: tuple[int, int, int, int], error: int = errno.EPERM) -> None:
        """A call ends with an error; with comparisons only where all of them hold."""
        number = self.library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:  # of another architecture
            return
        compared = (Comparison * len(given))(*given)
        done = self.library.seccomp_rule_add_array(self.context, ERRNO | error, number, len(given), compared)
        checked(done, call)

    def load(self) -> None:
        checked(self.library.seccomp_load(self.context), "seccomp_load")


def checked(code: int, what: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno() or -code, what)


def read_only(*paths: str) -> None:
    for path in filter(os.path.exists, paths):
        name = path.encode()
        checked(LIBC.mount(name, name, None, MS_BIND | MS_REC, None), path)
        checked(LIBC.mount(None, name, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None), path)


def calls(names: Iterable[str]) -> Iterable[str]:
    """The system calls of names and of groups such as @mount, as this systemd has them."""
    for name in names:
        if not name.startswith("@"):
            yield name
            continue
        listed = subprocess.run(
            ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
        ).stdout
        lines = [line.strip() for line in listed.splitlines()[1:]]
        yield from calls(line for line in lines if line and not line.startswith("#"))


def bound(names: str) -> None:
    """Drop every capability but these, as CapabilityBoundingSet= does."""
    header = Path("/usr/include/linux/capability.h")
    known = [line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define CAP_")]
    numbers = {name: int(value) for name, value in known if value.isdigit()}
    kept = {numbers[name] for name in names.split()}
    for number in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if number not in kept:
            checked(LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), str(number))


def families(rules: Filter, names: str) -> None:
    allowed = {FAMILIES[name] for name in names.split()}
    for family in set(range(46)) - allowed:
        rules.deny("socket", (0, EQ, family, 0), error=errno.EAFNOSUPPORT)


def namespaces(rules: Filter) -> None:
    for flag in NAMESPACES:
        for call in ("unshare", "clone"):
            rules.deny(call, (0, MASKED_EQ, flag, flag))
    rules.deny("setns")
    rules.deny("clone3", error=errno.ENOSYS)


def set_ids(rules: Filter) -> None:
    for call, place in MODES.items():
        for bit in (stat.S_ISUID, stat.S_ISGID):
            rules.deny(call, (place, MASKED_EQ, bit, bit))


def directives(unit: Path) -> list[tuple[str, str]]:
    text = unit.read_text(encoding="utf-8")
    lines = text[text.index(SECTION) :].splitlines()
    return [(name, value) for name, _, value in (line.partition("=") for line in lines) if value]


def enter(unit: Path) -> None:
    """Apply the sandbox of a unit to this process."""
    checked(LIBC.unshare(NEWNS | NEWUTS), "unshare")
    checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "/")
    rules = Filter()
    known: dict[str, Callable[[str], object]] = {
        "NoNewPrivileges": lambda _: checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs"),
        "ProtectSystem": lambda _: read_only("/usr", "/boot", "/efi", "/etc"),
        "ProtectKernelTunables": lambda _: read_only("/proc/sys", "/proc/sysrq-trigger", "/sys"),
        "ProtectKernelLogs": lambda _: rules.deny("syslog"),
        "ProtectControlGroups": lambda _: read_only("/sys/fs/cgroup"),
        "ProtectHostname": lambda _: [rules.deny(call) for call in ("sethostname", "setdomainname")],
        "RestrictNamespaces": lambda _: namespaces(rules),
        "RestrictRealtime": lambda _: [
            rules.deny("sched_setscheduler", (1, EQ, policy, 0)) for policy in REALTIME
        ],
        "RestrictSUIDSGID": lambda _: set_ids(rules),
        "RestrictAddressFamilies": lambda value: families(rules, value),
        "LockPersonality": lambda _: rules.deny("personality", (0, NE, 0xFFFFFFFF, 0)),
        "KeyringMode": lambda _: LIBC.syscall(250, 1, None),  # keyctl(KEYCTL_JOIN_SESSION_KEYRING)
        "SystemCallArchitectures": lambda _: None,  # libseccomp kills other architectures by itself
        "SystemCallFilter": lambda value: [rules.deny(call) for call in calls(value.lstrip("~").split())],
        "SystemCallErrorNumber": lambda _: None,  # EPERM, as `deny` has it
        "CapabilityBoundingSet": bound,
    }
    for name, value in directives(unit):
        known[name](value)
    rules.load()


def own_command(unit: Path) -> list[str]:
    """What the unit starts; its folder and its variables are this process's from now on."""
    lines = [line.partition("=")[::2] for line in unit.read_text(encoding="utf-8").splitlines()]
    (command,) = [value for name, value in lines if name == "ExecStart"]
    told = [word for name, value in lines if name == "Environment" for word in shlex.split(value)]
    os.environ |= dict(word.partition("=")[::2] for word in told)
    os.chdir(next(value for name, value in lines if name == "WorkingDirectory"))
    return shlex.split(command)


if __name__ == "__main__":
    service = Path(sys.argv[1]).resolve()
    words = sys.argv[2:] or own_command(service)
    enter(service)
    os.execvp(words[0], words)  # the program under test
