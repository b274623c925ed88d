"""train.py with a compiler that needs no C++: it traces the graphs, and runs them as they are.

In: train.py's flags. Out: its record.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))

import torch

import train

torch.compile = functools.partial(torch.compile, backend="aot_eager")
sys.exit(train.main([*sys.argv[1:], "--compile"]))
