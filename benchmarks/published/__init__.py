"""Published figures of other libraries, and the runs on one host that measure Octavo and its peers on the same workloads."""
