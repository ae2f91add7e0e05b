"""Octavo beside its peers on one machine: cases and entries are tables, every figure has its provenance.

Run from a clone, `python -m benchmarks SUITE`; `results/` has what was measured, and the pages of docs/ are drawn from it. It
uses the package as its users do, and nothing of the package imports it.
"""
