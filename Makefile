# The targets for developers and CI. The work is in scripts/ or in a crate.
#
#   make build               the two programs, optimised
#   make test                everything CI runs, with the minutes of each part
#   make test-full           the same with more repetitions: 200 kills on each database, a minute for each fuzz target
#   make bench [M=M1]        benchmarks; standard output is JSON lines only
#   make fuzz  [T=60]        a million inputs for every parser of external text; with T, at most T seconds each
#   make kill                kills the controller 200 times on each database; nothing may be lost or duplicated
#   make portable            doctor-node for x86-64 and aarch64, glibc 2.28 or newer, into target/portable
#   make packages            .deb, .rpm and an archive of both programs for x86-64 and arm64, into target/packages (deploy/packages)
#   make images              both container images without Docker, into target/images (Debian or Ubuntu; deploy/image)
#   make demo                a simulated month in the terminal
#   make fmt | lint | docs   format; clippy; regenerate the pages that are generated from code

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

CARGO ?= cargo
# One benchmark, or all when empty.
M ?=
# Seconds per fuzz target. Empty: as long as its million inputs take, half an hour at most.
T ?=

.PHONY: build test test-full bench fuzz kill portable packages images demo fmt lint docs

# `doctor version` prints it.
build packages images: export DOCTOR_COMMIT ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null)

build:
	$(CARGO) build --release -p doctor -p doctor-node --features doctor/kubernetes

test:
	@scripts/test.sh

test-full:
	@FULL=true scripts/test.sh

bench:
	@$(CARGO) run --profile bench --quiet -p doctor-bench $(if $(filter-out M2 M3 M14,$(M)),,--features kubernetes) -- $(M)

fuzz:
	@scripts/fuzz.sh $(T)

kill:
	@scripts/kill.sh

portable:
	@scripts/portable.sh dist

packages:
	@scripts/portable.sh programs
	@here=target/portable/$$(uname -m); version=$$($$here/doctor --version); for processor in x86_64 aarch64; do \
	  DOCTOR=$$here/doctor deploy/packages/build.sh target/portable/$$processor $$processor $${version#doctor } target/packages; done
	@ls -l target/packages

images:
	$(CARGO) build --profile dist -p doctor -p doctor-node --features doctor/kubernetes
	@programs=$${CARGO_TARGET_DIR:-target}/dist; deploy/image/build.sh $$programs/doctor $$programs/doctor-node target/images

demo:
	@$(CARGO) run --release --quiet -- demo

fmt:
	$(CARGO) fmt --all

lint:
	@scripts/lint.sh

docs:
	@scripts/generated.sh write
