"""Octavo beside its peers on one machine: cases and entries are tables, every figure has its provenance.

May import train and the levels above.
"""
