"""Planted faults, and bounds from healthy runs."""
