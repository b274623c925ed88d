"""Run the acceptance suites in an image: an image -> a run -> result.json -> a verdict."""
