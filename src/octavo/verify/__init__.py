"""`octavo verify`: does a layout of ranks compute what one rank computes?

    certificate.py    the comparisons of a run file's layout, and their report
    fuzz.py           layouts and features of models at random
    small.py          the run on a model that is small enough for CPU ranks, on generated samples
    worker.py         its steps on a rank, and what the ranks hold, whole
    pool.py           ranks that are started once, for many comparisons
    compare.py        the differences of two such results

May import train and the levels above.
"""
