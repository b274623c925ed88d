"""How checks run: device leases, child processes, launches, thresholds, evidence and result.json.

In: the options of tests/conftest.py and a `vendors.Host`. Out: the fixtures of the checks (see
tests/acceptance/conftest.py) and one result.json. Nothing here depends on a particular check.
"""
