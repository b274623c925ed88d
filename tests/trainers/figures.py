"""A figure of Python's own arithmetic, which every processor computes alike, beside a printed one."""

import pytest

figure = pytest.approx
