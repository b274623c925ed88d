"""When to run again, and what to do with the outcome. In: a host and a publish target.
Out: renewed, widened or revoked certificates, a record of each run, and a list of what was skipped and why.
"""
