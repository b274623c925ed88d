"""`python -m stackcheck` is `stackcheck`."""

from stackcheck.cli import main

main()
