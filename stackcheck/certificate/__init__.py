"""Certificates: sign statements about an image, store them, publish, verify, revoke."""
