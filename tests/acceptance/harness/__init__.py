"""How the checks run: leases, children, launches, thresholds, evidence and result.json.

In: the options of tests/conftest.py and a `vendors.Host`. Out: fixtures for the checks (see
tests/acceptance/conftest.py) and one result.json. Nothing here knows what a check checks.
"""
