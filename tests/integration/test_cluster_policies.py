"""The policy for Kyverno, by a model of Kyverno's own resource definition.

The package `cloudcoil-models-kyverno` is generated from the definitions of Kyverno 1.13: types and allowed
values. It passes over fields that it does not know, so what it read is compared with what was written. It
says nothing of what Kyverno does with the policy: no package of the indexes brings the engine itself.
"""

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from small_images import new_key
from stackcheck.certificate import cluster_policies
from stackcheck.certificate.cluster_policies import Demand, demanded_levels
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = """\
import json, sys
from cloudcoil.models.kyverno.v1 import ClusterPolicy

answers = []
for text in json.load(sys.stdin):
    try:
        found = ClusterPolicy.model_validate(text).model_dump(by_alias=True, exclude_unset=True, mode="json")
    except ValueError as error:
        found = str(error)
    answers.append(found)
json.dump(answers, sys.stdout)
"""
ALL = Demand(
    images=("registry.example.org/team/stacks*",),
    levels=demanded_levels("H200", 8, "standard"),
    max_age=dt.timedelta(days=30),
    node_label="nvidia.com/gpu.product=NVIDIA-H200*",
)


@pytest.fixture
def known(validators: Path) -> Callable[[list[Any]], list[Any]]:
    """What the models know of each document, or why they refuse it."""

    def ask(documents: list[Any]) -> list[Any]:
        command = [validators / "python", "-c", PROGRAM]
        done = run_program(command, input=json.dumps(documents), check=True)
        return list(json.loads(done.stdout))

    return ask


def changed(document: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    copy: Any = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return dict(copy)


def test_kyverno_knows_every_field_of_the_policy_and_its_type(known):
    key = new_key().public_key()
    written = [
        yaml.safe_load(cluster_policies.render("kyverno", key, demand))
        for demand in (ALL, Demand(images=ALL.images))
    ]
    image = ("spec", "rules", 0, "verifyImages", 0)
    condition = (*image, "attestations", 0, "conditions", 0, "all", 0, "operator")
    wrong = [
        changed(written[0], (*image, "failureAction"), "Block"),
        changed(written[0], condition, "Equal"),
        changed(written[0], ("spec", "webhookConfiguration", "timeoutSeconds"), "soon"),
    ]
    unknown = changed(written[0], (*image, "failurAction"), "Enforce")
    found = known([*written, *wrong, unknown])
    assert found[:2] == written
    assert all(isinstance(answer, str) for answer in found[2:5]), "the models can say no"
    assert found[5] == written[0], "a field that Kyverno does not know is not read"
