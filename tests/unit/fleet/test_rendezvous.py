"""Where torchrun meets, by the variables of each engine."""

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.fleet.rendezvous import find, hostnames

SLURM = {
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[08-10],login",
}
POD = {
    "JOB_COMPLETION_INDEX": "2",
    "STACKCHECK_NODES": "4",
    "STACKCHECK_JOB": "stackcheck-7",
    "STACKCHECK_SERVICE": "stackcheck-7",
}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "trainer-0",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (1, 0, "127.0.0.1", 29500)),
        (KUBEFLOW, (2, 0, "trainer-0", 29400)),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1234", "NODE_RANK": "1", "NNODES": "2"}, (2, 1, "a", 1234)),
        (SLURM, (3, 1, "gpu08", 29500)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[09-10]"}, (2, 1, "gpu09", 29500)),
        (SLURM | {"MASTER_ADDR": "gpu08-ib0"}, (3, 1, "gpu08-ib0", 29500)),
        (POD, (4, 2, "stackcheck-7-0.stackcheck-7", 29500)),
        (SKYPILOT, (2, 1, "10.0.0.1", 29500)),
        (SLURM | KUBEFLOW, (2, 0, "trainer-0", 29400)),  # torchrun's own words come first
        ({"MASTER_ADDR": "left-over"}, (1, 0, "127.0.0.1", 29500)),
    ],
)
def test_each_engine_says_where(variables: dict[str, str], place: tuple[int, int, str, int]) -> None:
    found = find(variables)
    assert (found.nodes, found.rank, found.address, found.port) == place
    assert found.variables()["PET_NODE_RANK"] == str(place[1])


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"PET_NODE_RANK": "0"}, "PET_MASTER_ADDR"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES"),
        (KUBEFLOW | {"PET_NODE_RANK": "2"}, "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR"),
        (POD | {"STACKCHECK_SERVICE": ""}, "MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "0"}, "MASTER_ADDR"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "the first of SKYPILOT_NODE_IPS"),
        (SLURM | {"SLURM_NNODES": "many"}, "SLURM_NNODES"),
        ({"MASTER_ADDR": "a", "NODE_RANK": "-1", "NNODES": "2"}, "NODE_RANK"),
    ],
)
def test_half_a_set_of_variables_is_refused(variables: dict[str, str], where: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        find(variables)
    assert error.value.where == where


def test_slurms_short_form_of_names_is_read() -> None:
    text = "a1,gpu[01-03,7],rack[2-3]-n,b"
    assert list(hostnames(text)) == ["a1", "gpu01", "gpu02", "gpu03", "gpu7", "rack2-n", "rack3-n", "b"]
    assert list(hostnames("")) == []
    assert list(hostnames("r[1-2]n[09-10].a,b")) == ["r1n09.a", "r1n10.a", "r2n09.a", "r2n10.a", "b"]
