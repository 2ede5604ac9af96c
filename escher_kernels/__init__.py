"""Measures a machine and returns records. Knows nothing of verdicts or pages.

`METHOD` is the number of the measuring rules (units, timing protocol, workload accounting, families). It is
raised whenever one of those rules changes, stands in every run, and runs of different numbers are not compared.
"""

METHOD = 1
