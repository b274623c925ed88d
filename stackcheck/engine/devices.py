"""The devices of a host in a container: the one place where certification and users' jobs get them.

In: a `RunSpec`, and what a vendor's devices need. Out: the same with nodes, groups, libraries and limits, so
that a job has what was certified.
"""

import dataclasses

from stackcheck.engine.container import Mount, RunSpec
from stackcheck.vendors import ContainerNeeds


def with_devices(spec: RunSpec, needs: ContainerNeeds) -> RunSpec:
    """The same container with devices added; the caller sets the environment variables."""
    libraries = (Mount(source=bind.source, target=bind.target) for bind in needs.binds)
    return dataclasses.replace(
        spec,
        mounts=(*spec.mounts, *libraries),
        devices=(*needs.devices, *spec.devices),
        group_add=(*needs.groups, *spec.group_add),
        ulimits=dict(needs.ulimits),
    )
