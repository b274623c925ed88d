"""The model families, in plain torch.

Each has a Config, a Model, and weights that convert to the library's.
"""
