"""Tests of the trainers themselves; they need torch (and transformers, triton where a test says so)."""

import os
import sys
from pathlib import Path

TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
sys.path.insert(0, str(TRAINERS))
sys.dont_write_bytecode = True
os.environ.setdefault("OMP_NUM_THREADS", "1")
