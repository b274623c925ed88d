# The stages of the tests, and what each of them needs to have been made. In: .venv and an engine; the goal `usual`
# or `slow`. Make runs as many at a time as it is told, the first one of a goal's list that can begin.
# exec: what ends make ends the stage, which lets its tests clean up.
STAGE := exec .venv/bin/python .ci/stage.py
# What a test that passed wrote goes at once: a hundred thousand files of earlier runs take a disk a minute.
# In a folder that no other pytest has: one that ends removes its folder, another then takes the same number, and the
# first one removes the other's lock.
PYTEST := .venv/bin/python -m pytest -o tmp_path_retention_policy=failed --basetemp {folder}
# Usual tests of the tool write small files only, at most 0.5 GB at a time: in memory that takes half the system's
# time, and none waits for the disk.
IN_MEMORY := $(subst {folder},{memory},$(PYTEST))
IMAGE = $$(sh .ci/cpu-image)
IN_IMAGE = .venv/bin/stackcheck run "$(IMAGE)" -- env PYTHONPATH=build/peers python
TRAINERS := -m pytest tests/trainers -q -n 2 -p no:cacheprovider --durations 10
VERDICT := --closing '[A-Z]+, [0-9]+ of [0-9]+ checks passed'
# A file stays in one process, with what its tests share, and the next free process takes the next file. What takes
# longest begins first: tests/integration/conftest.py has the order.
FILES := --dist loadfile --no-loadscope-reorder --durations 10

.PHONY: usual slow image lint faults unit integration nvml trainers image-again network tool amd-hosts \
	amd-calls amd-whole slow-faults slow-trainers numbers peers

usual: image lint faults unit integration nvml trainers

# Nodes wait minutes for links that are down: beside the rest, and from the beginning.
slow: network tool image-again amd-hosts amd-calls amd-whole slow-faults slow-trainers numbers

# An image whose inputs did not change is not built again; its suites run again all the same.
image:
	@$(STAGE) $(VERDICT) "suites in the cpu image" .venv/bin/stackcheck images 'cpu-*' --force

lint:
	@$(STAGE) "lint" sh .ci/lint

# Inside the image, and over fabricated hosts: there every kind of fault of AMD once, as the
# slow tests plant the rest. Three at a time, as some wait for a time limit while another computes.
faults: image
	@sh .ci/prepare-faults
	@$(STAGE) "planted faults" env STACKCHECK_AMD_HOSTS=quick .venv/bin/stackcheck prove --quick --workers 3

unit:
	@$(STAGE) "unit tests" $(IN_MEMORY) tests/unit -q -n 2 -m "not slow" --durations 10

integration:
	@$(STAGE) "integration" $(IN_MEMORY) tests/integration -q -n 2 $(FILES) -m "not slow"

# Needs nvidia-ml-py, which the cpu image has not.
nvml:
	@$(STAGE) "stub of NVML" $(PYTEST) tests/faults/test_device_faults.py -q -k name_of_the_stub

trainers: image peers
	@$(STAGE) "trainers" $(IN_IMAGE) $(TRAINERS) -m "not slow"

# The libraries that the trainers are held to.
peers:
	@sh .ci/peers

network:
	@$(STAGE) "slow networks" $(PYTEST) tests/integration/test_fleet_network.py -q -m slow --durations 10

tool:
	@$(STAGE) "slow unit, integration" sh .ci/slow-files

# Made only where there is none.
image-again:
	@$(STAGE) $(VERDICT) "certified cpu image" .venv/bin/stackcheck images 'cpu-*'

# Three at a time: a host mostly waits for what its library does not answer.
amd-hosts:
	@$(STAGE) "other faults of AMD hosts" env STACKCHECK_AMD_HOSTS=rest $(PYTEST) -q -n 3 \
		tests/faults/test_amd_hosts.py -k "healthy_host or fault_of_a_host or part_of_a_node or one_partition"

amd-calls: amd-hosts
	@$(STAGE) "AMD's module without calls" $(PYTEST) -q -n 3 tests/faults/test_amd_missing_calls.py \
		tests/faults/test_first_amd_page.py tests/faults/test_amd_releases.py tests/faults/test_first_host_file.py

# It takes the root file system that those made, and Python and torch from the image.
amd-whole: amd-hosts image-again
	@$(STAGE) "whole command on AMD hosts" $(PYTEST) -q tests/faults/test_amd_whole_run.py

slow-faults: image-again
	@sh .ci/prepare-faults
	@$(STAGE) "slow planted faults" .venv/bin/stackcheck run "$(IMAGE)" -- python -m pytest tests/faults -q -m slow \
		-p no:cacheprovider --ignore tests/faults/test_amd_hosts.py --ignore tests/faults/test_amd_readings.py \
		--ignore tests/faults/test_amd_whole_run.py --ignore tests/faults/test_amd_missing_calls.py \
		--ignore tests/faults/test_first_amd_page.py --ignore tests/faults/test_nvidia_verdicts.py \
		--ignore tests/faults/test_amd_releases.py --ignore tests/faults/test_first_host_file.py

slow-trainers: image-again peers
	@$(STAGE) "slow trainers" $(IN_IMAGE) $(TRAINERS) -m slow

# All that compares numbers, as older and newer processors would compute it.
numbers: image-again peers
	@$(STAGE) "numbers on processors" $(IN_IMAGE) .ci/processors.py --with '$(IN_IMAGE)'
