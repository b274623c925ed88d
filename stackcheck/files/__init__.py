"""Files of this host: written whole or not at all, read strictly. In: paths. Out: bytes and values."""
