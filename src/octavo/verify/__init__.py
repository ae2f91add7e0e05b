"""`octavo verify`: does a layout of ranks compute what one rank computes?

    certificate.py    compares a run file's layout, and reports
    fuzz.py           random layouts and model features
    small.py          the run on a small model for CPU ranks, with generated samples
    worker.py         the steps of a rank, and its whole tensors afterwards
    pool.py           ranks for many comparisons, started once
    compare.py        differences between two results

May import train and lower levels.
"""
