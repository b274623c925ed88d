"""Hosts as distributions and sites set them up: drawn `/etc/apt` layouts, with what each should give.

A `Host` is drawn, written into a folder, and says itself which archive is the distribution's own: nothing of
the tool decides that here.
"""

import dataclasses
import random
from pathlib import Path

RELEASES = {
    "debian12": ("debian", "bookworm", "oldstable"), "debian13": ("debian", "trixie", "stable"),
    "testing": ("debian", "forky", "testing"), "ubuntu22.04": ("ubuntu", "jammy", None),
    "ubuntu24.04": ("ubuntu", "noble", None), "ubuntu26.04": ("ubuntu", "resolute", None),
}  # fmt: skip
INLINE_KEY = "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBGA=\n -----END PGP PUBLIC KEY BLOCK-----"
# Other publishers on a host: they use names of suites, other architectures, other kinds of media.
OTHERS_LINES = (
    "deb [arch=amd64 signed-by=/usr/share/keyrings/other.gpg] https://apt.other.example.org {codename} main",
    "deb [arch=riscv64] http://ports.example.org/{distribution} {codename} main",
    "deb cdrom:[Live 1.0 _X_ - amd64]/ {codename} main",
    "deb-src http://archive.example.org/{distribution} {codename} main",
    "# deb http://old.example.org/{distribution} {codename} main",
    "deb https://flat.example.org/repo ./",
    "deb [signed-by=/etc/apt/keyrings/engine.gpg] https://engine.example.org/linux {codename} stable",
)
_STANZA = "Types: deb\nURIs: {uri}\nSuites: {{codename}}\nComponents: main\n{field}\n"
OTHERS_STANZAS = (
    _STANZA.format(uri="https://off.example.org/{distribution}", field="Enabled: no"),
    _STANZA.format(uri="https://off.example.org/{distribution}", field="Enabled: false"),
    _STANZA.format(uri="https://s390.example.org/{distribution}", field="Architectures: s390x"),
    _STANZA.format(uri="https://apt.other.example.org", field="Signed-By: /usr/share/keyrings/other.gpg"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host's apt settings.

    Attributes:
        release: A key of `RELEASES`.
        suite: How its sources name their own release.
        style: `.list` or `.sources`.
        signed_by: Of its own archive.
        updates: Whether its own archive's updates are among its sources.
        security: "apart" at an address of its own, "same" as the archive's, or "none".
        others: What else its sources have.
        others_first: Whether apt reads that before the host's own.
    """

    release: str
    suite: str
    style: str
    signed_by: str | None
    settings: tuple[tuple[str, str], ...]
    components: str
    updates: bool
    security: str
    others: tuple[str, ...]
    others_first: bool

    @property
    def distribution(self) -> str:
        """`debian` or `ubuntu`."""
        return RELEASES[self.release][0]

    @property
    def codename(self) -> str:
        """`bookworm`."""
        return RELEASES[self.release][1]

    @property
    def archive(self) -> str:
        """The address of its own archive, which no other publisher has."""
        return f"http://archive.example.org/{self.distribution}"

    @property
    def security_archive(self) -> str | None:
        """The address of its security archive."""
        apart = f"http://security.example.org/{self.distribution}-security"
        return {"apart": apart, "same": self.archive, "none": None}[self.security]

    def write(self, folder: Path) -> Path:
        """Write `/etc/apt`."""
        parts = folder / "sources.list.d"
        parts.mkdir(parents=True)
        own = parts / f"own.{self.style}"
        if self.style == "list":
            own = folder / "sources.list"
        own.write_text(self._own(), encoding="utf-8")
        others = parts / f"{'aaa' if self.others_first else 'zzz'}.{self._others_style()}"
        texts = [text.format(codename=self.codename, distribution=self.distribution) for text in self.others]
        others.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return folder

    def _others_style(self) -> str:
        return "sources" if any(text.startswith("Types") for text in self.others) else "list"

    def _own(self) -> str:
        suites = [self.suite] + ([f"{self.suite}-updates"] if self.updates else [])
        groups = [(self.archive, suites)]
        if self.security_archive:
            groups.append((self.security_archive, [f"{self.suite}-security"]))
        return "\n".join(
            self._lines(uri, names) if self.style == "list" else self._stanza(uri, names)
            for uri, names in groups
        )

    def _lines(self, uri: str, suites: list[str]) -> str:
        options = [f"{name}={value}" for name, value in self.settings]
        options += [f"signed-by={self.signed_by}"] if self.signed_by else []
        shown = f"[{' '.join(options)}] " if options else ""
        return "".join(f"deb {shown}{uri}/ {suite} {self.components}  # own\n" for suite in suites)

    def _stanza(self, uri: str, suites: list[str]) -> str:
        fields = {"Types": "deb deb-src", "URIs": uri, "Suites": " ".join(suites)}
        fields |= {"Components": self.components} | {name.title(): value for name, value in self.settings}
        fields |= {"Signed-By": self.signed_by} if self.signed_by else {}
        return "# the host's own\n" + "".join(f"{name}: {value}\n" for name, value in fields.items())


def draw(seed: int) -> Host:
    """A host; equal seeds give equal hosts."""
    at = random.Random(seed)
    release = at.choice([*RELEASES])
    distribution, codename, symbolic = RELEASES[release]
    style = at.choice(["list", "sources"])
    keyring = f"/usr/share/keyrings/{distribution}-archive-keyring.gpg"
    signed_by = at.choice([None, keyring, *([INLINE_KEY] if style == "sources" else [])])
    settings = at.choice([(), (), (("trusted", "yes"),), (("check-valid-until", "no"),)])
    pool = OTHERS_LINES if at.random() < 0.5 else OTHERS_STANZAS
    return Host(
        release=release,
        suite=at.choice([codename, symbolic or codename]),
        style=style,
        signed_by=signed_by,
        settings=settings,
        components=at.choice(["main", "main contrib non-free", "main universe"]),
        # Without updates, nothing but the keyring or the place tells the distribution's own archive.
        updates=(style == "sources" and signed_by != keyring) or at.random() < 0.7,
        security=at.choice(["apart", "same", "none"]),
        others=tuple(at.sample(pool, at.randrange(len(pool)))),
        others_first=at.random() < 0.5,
    )
