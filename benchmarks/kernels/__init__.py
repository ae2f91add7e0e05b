"""Suites of kernels alone, measured in this process: bandwidth, products, attention."""
