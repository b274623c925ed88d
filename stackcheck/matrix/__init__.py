"""What exists, what fits together, and why. Pure but for reading the files."""
