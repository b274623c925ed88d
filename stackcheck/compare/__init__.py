"""Two runs or two images beside each other: pairs, mixed stacks, a candidate against a certified image."""
