"""The model families, in plain torch: each has a Config, a Model, and weights that convert to
the library's.
"""
