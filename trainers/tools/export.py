"""Write a full checkpoint as a model of transformers: config.json and model.safetensors, in float32.

    python trainers/tools/export.py RUNS/8b/step_00010000 OUT

In: a checkpoint that holds whole weights. Out: a folder that from_pretrained reads, and --weights. Exit code
2: it holds none, or its family has no form there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from errors import require_torch

    require_torch(__file__)

import checkpoint
import initial
import presets
import pretrained
import whole
from errors import RefusedError
from tools import launch

if TYPE_CHECKING:
    from collections.abc import Sequence


def export(source: Path, out: Path, positions: int) -> int:
    """Write the model of a checkpoint; 0. Raises RefusedError where it cannot."""
    if not all((source / name).is_file() for name in (checkpoint.MARKER, checkpoint.WEIGHTS, initial.SHAPE)):
        raise RefusedError(
            f"{source} is no complete checkpoint with whole weights; name one of --full-every, or the last"
        )
    family = json.loads((source / initial.SHAPE).read_text())["family"]
    config, module = initial.kept(source, family), presets.MODELS[family]
    said = pretrained.said(family, config, positions)
    theirs = module.to_transformers(initial.untied(config, whole.read(source / checkpoint.WEIGHTS)))
    if config.tied:
        theirs.pop("lm_head.weight", None)
    out.mkdir(parents=True, exist_ok=True)
    shapes = {name: value.shape for name, value in theirs.items()}
    whole.write(out / "model.safetensors", shapes, theirs.items())
    (out / pretrained.FILE).write_text(json.dumps(said, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = launch.parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder step_00000042 with whole weights")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--positions", type=int, default=8192, help="max_position_embeddings of config.json")
    given: Any = parser.parse_args(arguments)
    return launch.exit_code("export.py", lambda: export(given.checkpoint, given.out, given.positions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
