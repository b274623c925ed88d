"""A stack -> an image."""
