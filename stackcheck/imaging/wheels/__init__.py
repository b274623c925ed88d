"""Where the wheels of a build come from."""
