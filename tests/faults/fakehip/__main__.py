"""Make the stand-ins for where no compiler is. In: gcc. Out: build/fakehip."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fakehip

fakehip.build(fakehip.MADE)
