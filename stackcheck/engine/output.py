"""What a container prints, with limits: its program is foreign, and may print without an end.

In: chunks of its two streams as they come. Out: whole lines, or an error that ends the container. The engine
keeps no copy (its log would grow on the host's disk), so a container that prints faster than this reads has
to wait.
"""

from collections.abc import Callable, Iterable

from stackcheck.errors import ChecksFailedError

Frames = Iterable[tuple[bytes | None, bytes | None]]  # of stdout, of stderr

LINE_BYTES = 16 << 20  # the longest honest one: the database of an image's packages
LINES = 1_000_000
OUTPUT_BYTES = 256 << 20  # a healthy run of the suites prints some megabytes


class Lines:
    """Whole lines of one stream; each byte is looked at once, however long its line is."""

    def __init__(self, on_line: Callable[[str], None], where: str) -> None:
        self._on_line, self._where = on_line, where
        self._parts: list[bytes] = []
        self._held = self._lines = self._bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take a chunk, which may end in the middle of a line.

        Raises:
            ChecksFailedError: There are more bytes or lines than an honest program prints.
        """
        *lines, rest = chunk.split(b"\n")
        self._lines, self._bytes = self._lines + len(lines), self._bytes + len(chunk)
        self._require("lines", self._lines, LINES)
        self._require("bytes", self._bytes, OUTPUT_BYTES)
        for line in lines:
            self._hold(line)
            self._end_line()
        self._hold(rest)

    def end(self) -> None:
        """Hand over what no line break ended."""
        if self._held:
            self._end_line()

    def _hold(self, part: bytes) -> None:
        self._held += len(part)
        self._require("bytes in one line", self._held, LINE_BYTES)
        self._parts.append(part)

    def _end_line(self) -> None:
        line = b"".join(self._parts)
        self._parts, self._held = [], 0
        self._on_line(line.decode("utf-8", errors="replace").rstrip("\r"))

    def _require(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise ChecksFailedError(
                "the container printed too much and was killed",
                where=self._where,
                got=f"more than {most} {what}",
                expected=f"at most {LINES} lines, {OUTPUT_BYTES} bytes and {LINE_BYTES} bytes in one line",
                next_step="look at what the image prints: docker run IMAGE",
            )


def read(frames: Frames, on_line: Callable[[str], None], where: str) -> None:
    """Read both streams of a container to their end, each by its own lines."""
    streams = (Lines(on_line, where), Lines(on_line, where))
    for frame in frames:
        for stream, chunk in zip(streams, frame, strict=True):
            if chunk:
                stream.feed(chunk)
    for stream in streams:
        stream.end()
