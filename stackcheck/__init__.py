"""Build GPU training images from a version matrix, test them, publish only what passed."""

__version__ = "0.1.0"
