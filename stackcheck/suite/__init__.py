"""An image -> a run of the suites -> result.json -> a verdict."""
