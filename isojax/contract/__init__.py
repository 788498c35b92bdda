"""The execution contract: what is computed, as a file that a machine checks. See docs/contract.md.

build: a run's contract from its settings. contract: the document. diff: what moved between two.
enforce: refusals. startup: what a run calls. cases: the programs that produce log-probabilities.
"""
