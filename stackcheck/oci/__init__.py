"""Bytes by digest: registries, image layouts on disk, archives."""
