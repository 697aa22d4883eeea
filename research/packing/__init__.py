"""Compares estimators by their effect on a cluster: replays a trace of jobs on an inventory of GPUs
once for each estimator.

:func:`read_trace` and :func:`workload` give the jobs, :func:`inventory` the cards,
:func:`estimators` what each estimator says, and :func:`simulate` replays the trace with one of
them; :func:`figures` sums up.  Only memory is simulated: that neighbours slow each other down is
left out.
"""

from research.packing.amounts import Amounts, estimators
from research.packing.cluster import FITS, Inventory, Policy, Run, inventory, simulate
from research.packing.report import Figures, figures
from research.packing.trace import Trace, TraceRow, Workload, read_trace, workload

__all__ = [
    "Amounts",
    "FITS",
    "Figures",
    "Inventory",
    "Policy",
    "Run",
    "Trace",
    "TraceRow",
    "Workload",
    "estimators",
    "figures",
    "inventory",
    "read_trace",
    "simulate",
    "workload",
]
