"""Policies for clusters: what Kyverno's conditions say about real certificates, and what is refused.

`holds` is a small evaluator of the operators in use; it is not Kyverno.
"""

import datetime as dt
import re
from typing import Any

import pytest
import yaml

import result_files
from small_images import NOW, SmallImage, certify, new_key
from stackcheck.certificate import cluster_policies, keys
from stackcheck.certificate.cluster_policies import Demand
from stackcheck.certificate.keyring import Keyring, TrustedKey
from stackcheck.certificate.statement import VSA
from stackcheck.errors import ConfigurationError

KEY = new_key()
IMAGES = ("registry.example.org/team/stacks*",)
H200 = result_files.host("nvidia", "H200", "H200", driver="580.1")


def rendered(form: Any, key: Any = None, **changes: Any) -> dict[str, Any]:
    levels = cluster_policies.demanded_levels(*changes.pop("asked", (None, None, None)))
    demand = Demand(images=IMAGES, levels=levels, **changes)
    (document,) = yaml.safe_load_all(cluster_policies.render(form, key or KEY.public_key(), demand))
    return dict(document)


def holds(condition: dict[str, Any], predicate: dict[str, Any], now: dt.datetime) -> bool:
    """Whether one condition of Kyverno holds for a predicate."""
    key = condition["key"]
    if "time_since" in key:
        age = now - dt.datetime.fromisoformat(predicate["timeVerified"])
        return age <= dt.timedelta(hours=float(condition["value"].removesuffix("h")))
    path = re.fullmatch(r"\{\{ (\S+) \}\}", key)
    assert path
    found: Any = predicate
    for name in path[1].split("."):
        found = found[name]
    if condition["operator"] == "Equals":
        return bool(found == condition["value"])
    assert condition["operator"] == "AnyIn"
    return bool(set(found) & set(condition["value"]))


def admitted(document: dict[str, Any], image: SmallImage, **changes: Any) -> bool:
    """Every summary that the key signed has to fulfil every condition."""
    (verify,) = document["spec"]["rules"][0]["verifyImages"]
    (attestation,) = verify["attestations"]
    ((conditions,),) = [list(attestation["conditions"])]
    made = certify(image, KEY, **changes)
    summaries = [item.statement.predicate for item in made if item.statement.predicate_type == VSA]
    assert attestation["type"] == VSA
    return all(holds(item, predicate, NOW) for item in conditions["all"] for predicate in summaries)


@pytest.mark.parametrize(
    ("asked", "certified", "accepted"),
    [
        ({}, {}, True),
        ({}, {"outcome": "failed"}, False),
        ({}, {"host": H200, "tier": "smoke"}, False),
        ({}, {"host": H200, "tier": "standard"}, True),
        ({"asked": ("H200", 2, None)}, {"host": H200, "tier": "standard"}, True),
        ({"asked": ("H200", 8, None)}, {"host": H200, "tier": "standard"}, False),
        ({"asked": ("MI300X", None, None)}, {"host": H200, "tier": "standard"}, False),
        ({"asked": (None, None, "soak")}, {"host": H200, "tier": "standard"}, False),
        ({"max_age": dt.timedelta(hours=2)}, {"now": NOW - dt.timedelta(hours=1)}, True),
        ({"max_age": dt.timedelta(hours=2)}, {"now": NOW - dt.timedelta(hours=3)}, False),
    ],
)
def test_the_conditions_for_kyverno_fit_what_certificates_say(image, asked, certified, accepted):
    assert admitted(rendered("kyverno", **asked), image, **certified) == accepted


def test_both_policies_hold_the_key_the_images_and_the_nodes():
    pem = keys.public_pem(KEY.public_key()).decode()
    label = {"node_label": "nvidia.com/gpu.product=NVIDIA-H200*"}
    kyverno, controller = rendered("kyverno", **label), rendered("policy-controller", **label)
    verify, node = kyverno["spec"]["rules"]
    (images,) = verify["verifyImages"]
    assert images["imageReferences"] == list(IMAGES)
    assert (images["failureAction"], images["required"]) == ("Enforce", True)
    ((entry,),) = [images["attestations"][0]["attestors"][0]["entries"]]
    assert entry["keys"]["publicKeys"] == pem
    assert node["validate"]["pattern"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200*"}
    (authority,) = controller["spec"]["authorities"]
    assert authority["key"]["data"] == pem
    assert "ctlog" not in authority
    assert controller["spec"]["images"] == [{"glob": IMAGES[0]}]
    assert (
        'nodeSelector: "nvidia.com/gpu.product": =~#"^NVIDIA-H200.*$"#'
        in controller["spec"]["policy"]["data"]
    )
    assert controller["spec"]["policy"]["includeSpec"]
    assert cluster_policies.none_failed() in controller["spec"]["policy"]["data"]


@pytest.mark.parametrize("form", ["kyverno", "policy-controller"])
def test_two_keys_are_refused_because_the_revocation_of_one_would_be_missed(form):
    two = Keyring(tuple(TrustedKey(key=key.public_key()) for key in (KEY, new_key())))
    with pytest.raises(ConfigurationError, match="one key"):
        rendered(form, two)
    with pytest.raises(ConfigurationError, match="one key"):
        rendered(form, Keyring((TrustedKey(key=KEY.public_key(), retired=NOW),)))


def test_what_an_engine_cannot_express_is_refused_and_not_left_out():
    for form, changes in (
        ("policy-controller", {"max_age": dt.timedelta(days=1)}),
        ("cosign", {"max_age": dt.timedelta(days=1)}),
        ("cosign", {"node_label": "a=b"}),
        ("kyverno", {"node_label": 'a="b"'}),
    ):
        with pytest.raises(ConfigurationError):
            rendered(form, **changes)
