"""`python -m stackcheck` is `stackcheck`."""

from stackcheck.cli import main

if __name__ == "__main__":  # a process that judges imports this again
    main()
