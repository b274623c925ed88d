"""Signed statements: made, stored, published, verified, revoked."""
