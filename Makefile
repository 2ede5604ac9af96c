# Every flag --x-y of the command line is make's X_Y=. A flag is passed only when its variable is set.
# One line a recipe and relative paths only: the repository's own path may hold spaces.
PYTHON ?= python3
SHELL = /bin/sh
.DEFAULT_GOAL := help

quote = '$(subst ','\'',$(1))'
flag  = $(if $($(1)), --$(2) $(call quote,$($(1))))

SET_UP = $(call quote,$(PYTHON)) escher_book/setup_env.py$(call flag,DEVICE,device)$(call flag,TORCH_INDEX_URL,torch-index-url)
IN_ENV = $(SET_UP) --
on    = $(if $(filter-out 0,$($(1))), --$(2))
RUN_OR_NEWEST = $(if $(RUN), $(call quote,$(RUN)))$(call flag,RESULTS_DIR,results-dir)
MEASURE = $(call flag,TARGET,target)$(call flag,DEVICE,device)$(call flag,FAMILIES,families)$(call flag,BUDGET,budget)$(call flag,RESULTS_DIR,results-dir)$(call flag,WORKLOAD,workload)$(call flag,REFERENCE_MODEL,reference-model)$(call flag,DEPTH,depth)$(call flag,TOKENS,tokens)$(call flag,WINDOW,window)$(call flag,REPORT_CONFIG,report-config)$(call flag,TIMEOUT_S,timeout-s)$(CONDUCT)
CONDUCT = $(call on,ALL,all)$(call on,REQUIRE_GPU,require-gpu)$(call flag,ITERATIONS,iterations)$(call flag,RUN_TIMEOUT_S,run-timeout-s)$(call flag,NUMACTL,numactl)$(call flag,STAT_INTERVAL,stat-interval)$(call on,NO_STAT,no-stat)$(call on,PREPARE_SYS,prepare-sys)$(if $(filter-out 0 1,$(RESUME)),$(call flag,RESUME,resume),$(call on,RESUME,resume))$(call on,DRY_RUN,dry-run)

.PHONY: help book run report export list doctor score validate compare baseline variability selftest lab sample test test-all env clean distclean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 | \2/p' Makefile | awk -F' [|] ' '{printf "%-17s %s\n", $$1, $$2}'
	@echo
	@echo "  Variables, each the command line's flag of that name:"
	@echo "  book, run        TARGET= DEVICE=auto|rocm|cuda|cpu FAMILIES= BUDGET=quick|standard|full"
	@echo "                   WORKLOAD= (one or several) or REFERENCE_MODEL=  DEPTH= TOKENS= WINDOW=  ALL=1"
	@echo "                   ITERATIONS= RESUME=1 or RESUME=<run> DRY_RUN=1 REQUIRE_GPU=1"
	@echo "                   RESULTS_DIR= REPORT_CONFIG= TIMEOUT_S= RUN_TIMEOUT_S="
	@echo "                   PREPARE_SYS=1 NUMACTL=\"<spec>\" STAT_INTERVAL= NO_STAT=1"
	@echo "                   book: STRICT=1 NO_VALIDATE=1"
	@echo "  report, score    RUN= RESULTS_DIR= STRICT=1"
	@echo "  export           RUN= RESULTS_DIR= FORMAT=md OUTPUT_NAME="
	@echo "  list             WHAT=families|workloads|targets|models|tools|backends  JSON=1"
	@echo "  doctor           REQUIRE_GPU=1 RESULTS_DIR= RESTORE=1 JSON=1"
	@echo "  validate         RUN= IMPORT=<a log made elsewhere>"
	@echo "  compare          RUN= BASE= ACROSS=1 STRICT=1"
	@echo "  baseline         RUN=<a run, or a folder of runs>"
	@echo "  variability      RUNS=<how many> and those of run"
	@echo "  any              PYTHON= (makes the environment)  TORCH_INDEX_URL= (a mirror to take torch from)"
	@echo "  e.g. make book TARGET=mi355x"

book:  ## measure, judge and build the HTML book
	@$(IN_ENV) escher book$(MEASURE)$(call on,STRICT,strict)$(call on,NO_VALIDATE,no-validate)

run:  ## measure only: records in RESULTS_DIR
	@$(IN_ENV) escher run$(MEASURE)

report:  ## judge and build the pages again from the records of RUN
	@$(IN_ENV) escher report$(RUN_OR_NEWEST)$(call on,STRICT,strict)

export:  ## write the report of RUN as one file
	@$(IN_ENV) escher export$(RUN_OR_NEWEST)$(call flag,FORMAT,format)$(call flag,OUTPUT_NAME,output-name)

list:  ## families, workloads, targets, models, outside tools, optional backends
	@$(IN_ENV) escher list$(if $(WHAT), $(call quote,$(WHAT)))$(call on,JSON,json)

doctor:  ## is this machine fit to be measured?
	@$(IN_ENV) escher doctor$(call on,REQUIRE_GPU,require-gpu)$(call flag,RESULTS_DIR,results-dir)$(call on,RESTORE,restore)$(call on,JSON,json)

score:  ## judge RUN: the scorecard alone
	@$(IN_ENV) escher score$(RUN_OR_NEWEST)$(call on,STRICT,strict)

validate:  ## hold RUN against the outside tools that are installed, or against a log
	@$(IN_ENV) escher validate$(RUN_OR_NEWEST)$(call flag,IMPORT,import)

compare:  ## hold RUN against BASE, or against the baseline
	@$(IN_ENV) escher compare$(RUN_OR_NEWEST)$(call flag,BASE,base)$(call on,ACROSS,across)$(call on,STRICT,strict)

baseline:  ## keep RUN as what later runs are compared with
	@$(IN_ENV) escher baseline set$(RUN_OR_NEWEST)

variability:  ## make RUNS runs and say how far they differ
	@$(IN_ENV) escher variability --runs $(or $(RUNS),3)$(MEASURE)

selftest:  ## put the judge on trial
	@$(IN_ENV) escher selftest

lab:  ## open the notebooks in JupyterLab
	@$(IN_ENV) jupyter lab$(if $(filter 0,$(shell id -u)), --allow-root) --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate notebooks

sample:  ## make the committed sample runs again
	@$(IN_ENV) python tests/make_sample.py

test:  ## the fast tests
	@$(IN_ENV) python -m pytest

test-all:  ## ruff and every test: runs notebooks, builds the book, drives a browser
	@$(IN_ENV) ruff check
	@$(IN_ENV) python -m pytest -m ""

env:  ## create the environment .venv-<device>, or bring it up to date
	@$(SET_UP)

clean:  ## remove caches; keeps results and environments
	rm -rf build escher.egg-info .pytest_cache .ruff_cache .hypothesis
	find . \( -name '.venv-*' -o -name .git -o -path ./results \) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too; keeps results
	rm -rf .venv-*
