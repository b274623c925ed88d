"""Read the machine through the vendor's library, with a timeout. In: a vendor.
Out: a `vendors.Host`, samples.

A wedged driver hangs inside the library, so the library runs in a child process. The child stays alive
between readings. After a timeout it is killed, and the next reading starts a new one.
"""

import itertools
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from harness import processes
from vendors import Host, Sample, VendorAbsentError, VendorName, wire

LONGEST_BYTES = 16 << 20  # of an answer
TIMEOUT_S = 60.0  # as AMD's own command line waits for its library


class MonitorError(Exception):
    """The library did not answer, or failed although the vendor is present."""


class Monitor:
    """One child. Calls are serialised, because neither vendor's library is documented as thread-safe."""

    def __init__(self, vendor: VendorName, *, timeout_s: float | None = None) -> None:
        self.vendor = vendor
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._lock = threading.RLock()
        self._process: processes.Child | None = None
        self._requests = self._answers = -1
        self._token = uuid.uuid4().hex
        self._folder = Path(tempfile.gettempdir(), f"stackcheck-monitor-{self._token}")  # while a child lives

    def read(self) -> Host:
        """The whole host. Raises `VendorAbsentError` or `MonitorError`."""
        host: Host = self._call("read")  # type: ignore[assignment]
        return host

    def read_devices(self) -> Host:
        """The host without its links. Raises as `read` does."""
        host: Host = self._call("read_devices")  # type: ignore[assignment]
        return host

    def sample(self, indices: Sequence[int]) -> tuple[Sample, ...]:
        """What changes under load. Raises as `read` does."""
        samples: tuple[Sample, ...] = self._call("sample", tuple(indices))  # type: ignore[assignment]
        return samples

    def stop(self) -> None:
        """End the child."""
        with self._lock:
            if self._process is None:
                return
            process, self._process = self._process, None
            os.close(self._requests)
            os.close(self._answers)
            processes.kill(self._token, process)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, *request: object) -> object:
        with self._lock:
            if self._process is None:
                self._start()
            try:
                os.write(self._requests, json.dumps(request).encode() + b"\n")
                answer = self._read(time.monotonic() + self.timeout_s)
            except (BrokenPipeError, EOFError):
                last = processes.tail(self._folder / "stderr.txt")
                self.stop()
                raise MonitorError(f"the {self.vendor} library ended its process:\n{last}") from None
            except TimeoutError:
                self.stop()
                raise MonitorError(
                    f"the {self.vendor} library did not answer in {self.timeout_s:g} s, so the driver hangs; "
                    "look at dmesg, then reset the device or reboot"
                ) from None
            if isinstance(answer, RuntimeError):
                self.stop()  # the next call opens the library again
                raise MonitorError(str(answer))
        if isinstance(answer, VendorAbsentError):
            raise answer
        return answer

    def _read(self, deadline: float) -> object:
        line, _ = processes.line_of(self._answers, b"", deadline, LONGEST_BYTES)
        try:
            answer: object = wire.decoded(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return RuntimeError(f"its answer cannot be read: {type(error).__name__}: {error}")
        return answer

    def _start(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        child_reads, self._requests = os.pipe()
        self._answers, child_writes = os.pipe()
        self._process = processes.start(
            processes.python("-m", "vendors.child", self.vendor, *processes.numbers(2)),
            env=processes.environment({}, self._token, self._folder),
            stdout=self._folder / "stdout.txt",
            stderr=self._folder / "stderr.txt",
            pass_fds=(child_reads, child_writes),
        )
        os.close(child_reads)
        os.close(child_writes)


class Sampler:
    """Samples devices ten times a second from `start` to `finish`, while a performance check runs."""

    PERIOD_S = 0.1
    LEAST_TRIES = 2  # without a sample: a library may stumble once, however short the check is

    def __init__(self, monitor: Monitor, indices: Sequence[int]) -> None:
        self.monitor = monitor
        self.indices = tuple(indices)
        self.samples: list[Sample] = []
        self.problem: str | None = None  # the library's last error
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Sampler":
        """Begin."""
        self._thread.start()
        return self

    def finish(self) -> tuple[Sample, ...]:
        """Stop, and return the samples."""
        self._done.set()
        self._thread.join(self.monitor.timeout_s)
        return tuple(self.samples)

    def _run(self) -> None:
        for tries in itertools.count(1):
            try:
                self.samples.extend(self.monitor.sample(self.indices))
            except (MonitorError, VendorAbsentError) as error:
                self.problem = str(error)
            if self._done.wait(self.PERIOD_S) and (self.samples or tries >= self.LEAST_TRIES):
                return
