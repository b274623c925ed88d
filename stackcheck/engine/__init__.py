"""The only door to Docker and to the host's packages."""
