"""How long `stackcheck verify` takes on an OCI layout of a given size, as a user calls it.

    python benchmarks/verify.py [MEGABYTES]

Makes a layout of random layers (one of three quarters of the size, as torch's is, and four small ones),
certifies it with a key of its own in a temporary folder, and times the command: best and median of five. One
layer cannot be hashed by two cores, so the largest one decides.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.certificate import keys, publish
from stackcheck.oci.documents import OCI_MANIFEST, Manifest, compact_json
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from small_images import SmallImage

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "shared"))  # its images are certified as the tests' are

REPEATS = 5


def large_image(folder: Path, megabytes: int) -> SmallImage:
    from small_images import CONFIG_TYPE, LAYER_TYPE, SmallImage, put, quiet

    layout = OciLayout(folder)
    sizes = [megabytes * 3 // 4, *[megabytes // 16] * 4]
    with layout.writing(quiet):
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": put(layout, CONFIG_TYPE, compact_json({"architecture": "amd64", "os": "linux"})),
            "layers": [put(layout, LAYER_TYPE, os.urandom(size << 20)) for size in sizes],
        }
        manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
        layout.write_manifest(manifest, "candidate")
    return SmallImage(folder, manifest.digest, document["config"]["digest"])


def main() -> None:
    from small_images import STACK_ID, certify, new_key, quiet

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", nargs="?", type=int, default=1024, help="of the image")
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = new_key()
        (folder / "k.pub").write_bytes(keys.public_pem(key.public_key()))
        image = large_image(folder / "oci", megabytes)
        publish.publish(
            image.layout,
            tag=STACK_ID,
            envelopes=certify(image, key, now=dt.datetime.now(dt.UTC)),
            target=f"oci:{folder / 'dist'}",
            public_key=key.public_key(),
            report=quiet,
        )
        command = [sys.executable, "-m", "stackcheck", "verify", f"oci:{folder / 'dist'}:{STACK_ID}"]
        command += ["--key", str(folder / "k.pub"), "--device-model", "CPU", "--driver", "none"]
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    print(f"{megabytes} MiB: best {min(times):.2f} s, median {middle:.2f} s, {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
