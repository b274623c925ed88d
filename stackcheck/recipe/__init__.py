"""A stack -> its lock and its Dockerfile."""
