# One command line a recipe; every target makes and uses .venv/, and `make` alone explains itself.
.DEFAULT_GOAL := help
SHELL := /bin/sh

STACKS ?=
TO ?=
ARGS ?=

.PHONY: help
help: ## Show this text
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

.venv/ready: .ci/requirements.txt pyproject.toml
	@sh .ci/venv

.PHONY: setup
setup: .venv/ready ## Make .venv/ with the pinned dependencies; every other target does it too

.PHONY: images
images: .venv/ready ## Build, test, certify and publish what this host can run (STACKS='rocm7*' selects)
	@.venv/bin/stackcheck images $(STACKS) $(if $(TO),--to $(TO)) $(ARGS)

.PHONY: test
test: .venv/ready ## Run the tool's own tests, then the acceptance suites inside the cpu image
	@sh .ci/test

.PHONY: test-slow
test-slow: .venv/ready ## Run the tests marked slow: ROCm's image, compiled extensions, kills, every layout
	@sh .ci/test slow

.PHONY: certify
certify: .venv/ready ## Run the suites, judge and sign (STACKS=one stack id or image)
	@.venv/bin/stackcheck certify $(STACKS) $(ARGS)

.PHONY: publish
publish: .venv/ready ## Publish a certified image (STACKS=one stack id, TO=oci:DIR or a repository)
	@.venv/bin/stackcheck publish $(STACKS) $(if $(TO),--to $(TO)) $(ARGS)

.PHONY: report
report: .venv/ready ## Write build/report.html: what is certified, what failed last night, how fast it is
	@.venv/bin/stackcheck report $(ARGS)

.PHONY: nightly
nightly: .venv/ready ## Validate the published images again on this host (ARGS=--dry-run shows what is due)
	@.venv/bin/stackcheck nightly $(ARGS)

.PHONY: wheel
wheel: .venv/ready ## Write build/wheel/stackcheck-VERSION-py3-none-any.whl, which needs no checkout
	@rm -rf build/lib build/bdist.*  # of an earlier version: its files would be in this wheel
	@.venv/bin/pip --quiet wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@rm -rf build/lib build/bdist.*

.PHONY: lists
lists: .venv/ready ## Write the generated lists after a check was added: checks.json, docs/reference/amd.md's table, …
	@sh .ci/lists

.PHONY: lint
lint: .venv/ready ## Check style, types and drift of generated files
	@sh .ci/lint
