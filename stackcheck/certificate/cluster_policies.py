"""Policies for other programs that decide which images may run: cosign, Kyverno, policy-controller. Pure.

In: the publisher's key, the images, and what is asked of their certificates. Out: text that the engine
reads. What each engine cannot express is in docs/guides/certificates.md, "Admit only certified images to a
cluster".
"""

import datetime as dt
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

import yaml

from stackcheck.certificate import keyring, keys
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.levels import PACKAGED_PYTHON, level_name
from stackcheck.certificate.statement import VERIFIER_ID, VSA
from stackcheck.certificate.summary import CERTIFIED_LEVEL
from stackcheck.errors import ConfigurationError

Form = Literal["cosign", "kyverno", "policy-controller"]
FORMS: tuple[Form, ...] = get_args(Form)
NAME = "stackcheck-certified"
LABEL = re.compile(r"([\w./-]+)=([\w.*-]+)")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a cluster asks for.

    Attributes:
        images: Patterns of references that the policy is about, such as registry.example.org/team/stacks*.
        node_label: Label and value (with * as a pattern) that pods must ask for: `KEY=VALUE`; None: any node.
    """

    images: tuple[str, ...]
    levels: tuple[str, ...] = (CERTIFIED_LEVEL,)  # levels that each certificate must have
    max_age: dt.timedelta | None = None  # how old a certificate may be; None: any age
    node_label: str | None = None


def demanded_levels(
    gpu: str | None, devices: int | None, tier: str | None, *, packaged_python: bool = False
) -> tuple[str, ...]:
    """The levels for a device model, a number of devices tested together, a tier, a Python of a package.

    Raises:
        ConfigurationError: A number of devices without a model: there is no level for that.
    """
    if devices and not gpu:
        raise ConfigurationError(
            "a policy cannot ask for a number of devices alone",
            got=f"--devices {devices}",
            expected="--device-model MODEL with it",
        )
    names = [gpu and (f"{gpu}_X{devices}" if devices else gpu), tier and f"TIER_{tier}"]
    names += [PACKAGED_PYTHON] if packaged_python else []
    return (CERTIFIED_LEVEL, *(level_name(name) for name in names if name))


def render(form: Form, pinned: Pinned, demand: Demand) -> str:
    """The policy as text.

    Raises:
        ConfigurationError: The engine cannot express what is asked for.
    """
    if form == "cosign":
        _require_plain(form, demand)
        return cue(demand.levels)
    if not demand.images:
        raise ConfigurationError(
            "a cluster's policy must name its images",
            got="no --images",
            expected="--images 'HOST/REPO*', once or more",
        )
    documents = _kyverno(_pem(pinned), demand) if form == "kyverno" else _controller(_pem(pinned), demand)
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110)


def cue(levels: tuple[str, ...]) -> str:
    """The policy for `cosign verify-attestation --policy`, with these levels."""
    wanted = " & ".join(f'list.Contains("{name}")' for name in levels)
    return policy_text().replace(f'list.Contains("{CERTIFIED_LEVEL}")', wanted)


def policy_text() -> str:
    """The CUE policy for `cosign verify-attestation --policy`: it accepts PASSED only."""
    return files("stackcheck.certificate").joinpath("stackcheck.cue").read_text(encoding="utf-8")


def _require_plain(form: Form, demand: Demand) -> None:
    asked = [
        name for name, value in (("--max-age", demand.max_age), ("--node-label", demand.node_label)) if value
    ]
    if asked:
        raise ConfigurationError(
            f"{form} cannot express this",
            got=" and ".join(asked),
            expected="levels: --gpu, --devices, --tier, --packaged-python",
            next_step="use `stackcheck verify`, which looks at age, driver and device model",
        )


def _pem(pinned: Pinned) -> str:
    """The one key of a policy. An engine checks keys separately: it would miss revocations by other keys."""
    found = keyring.trusted(pinned)
    if len(found) != 1 or found[0].retired:
        raise ConfigurationError(
            "a cluster's policy takes one key that is not retired",
            got=f"{len(found)} keys",
            expected="one",
            next_step="renew the certificates with the new key, then name its file alone: --key FILE",
        )
    return keys.public_pem(found[0].key).decode()


def _kyverno(pem: str, demand: Demand) -> list[dict[str, Any]]:
    entry = {"keys": {"publicKeys": pem, "rekor": {"ignoreTlog": True}, "ctlog": {"ignoreSCT": True}}}
    verify = {
        "type": "Cosign",
        "imageReferences": list(demand.images),
        "failureAction": "Enforce",
        "required": True,
        "mutateDigest": True,
        "verifyDigest": True,
        "attestations": [
            {
                "name": "certificate",
                "type": VSA,
                "attestors": [{"entries": [entry]}],
                "conditions": [{"all": _conditions(demand)}],
            }
        ],
    }
    rules = [{"name": "certified", "match": _pods(), "verifyImages": [verify]}]
    if demand.node_label:
        rules.append(_node_rule(demand, demand.node_label))
    spec = {
        "background": False,
        "webhookConfiguration": {"failurePolicy": "Fail", "timeoutSeconds": 30},
        "rules": rules,
    }
    return [
        {"apiVersion": "kyverno.io/v1", "kind": "ClusterPolicy", "metadata": {"name": NAME}, "spec": spec}
    ]


def _pods() -> dict[str, Any]:
    return {"any": [{"resources": {"kinds": ["Pod"]}}]}


def _conditions(demand: Demand) -> list[dict[str, Any]]:
    """The conditions of a rule; Kyverno tests every certificate: one that says FAILED refuses the image."""
    found: list[dict[str, Any]] = [
        {"key": "{{ verifier.id }}", "operator": "Equals", "value": VERIFIER_ID},
        {"key": "{{ verificationResult }}", "operator": "Equals", "value": "PASSED"},
    ]
    found += [
        {"key": "{{ verifiedLevels }}", "operator": "AnyIn", "value": [level]} for level in demand.levels
    ]
    # On GPUs a smoke run never certifies: it measures no speed.
    full = ["TIER_standard", "TIER_soak", "CPU"]
    found.append(
        {"key": "{{ verifiedLevels }}", "operator": "AnyIn", "value": [level_name(name) for name in full]}
    )
    if demand.max_age is not None:
        hours = f"{demand.max_age.total_seconds() / 3600:g}h"
        age = "{{ time_since('', '{{ timeVerified }}', '') }}"
        found.append({"key": age, "operator": "LessThanOrEquals", "value": hours})
    return found


def _node_rule(demand: Demand, label: str) -> dict[str, Any]:
    """A pod has no node yet when it is admitted: so it has to ask for nodes of the certified model."""
    name, value = _split(label)
    used = "{{ request.object.spec.[containers, initContainers][].image }}"
    about = [{"key": used, "operator": "AnyIn", "value": list(demand.images)}]
    return {
        "name": "certified-device-model",
        "match": _pods(),
        "preconditions": {"all": about},
        "validate": {
            "failureAction": "Enforce",
            "message": f"the image is certified for nodes with {name}={value}: ask for them in nodeSelector",
            "pattern": {"spec": {"nodeSelector": {name: value}}},
        },
    }


def _controller(pem: str, demand: Demand) -> list[dict[str, Any]]:
    if demand.max_age is not None:
        _require_plain("policy-controller", Demand(images=demand.images, max_age=demand.max_age))
    attestations = [
        {"name": "every", "predicateType": VSA},
        {
            "name": "passed",
            "predicateType": VSA,
            "policy": {"type": "cue", "data": _bare(cue(demand.levels))},
        },
    ]
    policy: dict[str, Any] = {"type": "cue", "data": none_failed()}
    if demand.node_label:
        name, value = _split(demand.node_label)
        pattern = "^" + value.replace(".", r"\.").replace("*", ".*") + "$"
        policy["includeSpec"] = True
        policy["data"] += f'spec: nodeSelector: "{name}": =~#"{pattern}"#\n'
    spec = {
        "mode": "enforce",
        "match": [{"resource": "pods", "version": "v1"}],
        "images": [{"glob": pattern} for pattern in demand.images],
        "authorities": [{"name": "stackcheck", "key": {"data": pem}, "attestations": attestations}],
        "policy": policy,
    }
    kind = {"apiVersion": "policy.sigstore.dev/v1beta1", "kind": "ClusterImagePolicy"}
    return [{**kind, "metadata": {"name": NAME}, "spec": spec}]


def none_failed() -> str:
    """CUE over all attestations that policy-controller found: by default, one that fits would be enough."""
    return (
        "// Every summary of this key passed: else an image that was revoked would still have one that did.\n"
        "authorityMatches: stackcheck: attestations: {\n    passed: [_, ...]\n    every: passed\n}\n"
    )


def _bare(text: str) -> str:
    """CUE without remarks and tabs: YAML writes a text with tabs in quotes, where nobody can read it."""
    lines = [line.expandtabs(4) for line in text.splitlines() if not line.lstrip().startswith("//")]
    return "\n".join([*lines, ""])


def _split(label: str) -> tuple[str, str]:
    match = LABEL.fullmatch(label)
    if match is None:
        raise ConfigurationError(
            "this is not a label of a node", got=label, expected="KEY=VALUE, where * stands for any text"
        )
    return match[1], match[2]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a key looks like a key."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
