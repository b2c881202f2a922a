"""The functions of the notebooks; a notebook begins with ``from jobs import notebooks as nb``.

``open_log`` reads a sample of a log into memory, ``open_queues`` counts the queues of a log, ``open_audit`` returns the
summary of an audit. Functions ``plot_...`` return a figure, or a sentence where there is nothing to draw.
``notebooks/README.md`` describes the notebooks.
"""

from ._audit.range_diff import diff_finding
from ._notebooks.audit_view import findings_table, open_audit, plot_audit, replicas_table, verdict
from ._notebooks.log_plots import plot_over_time, plot_per_queue
from ._notebooks.log_sample import Log, open_log
from ._notebooks.note import Note
from ._notebooks.queue_counts import Queues, open_queues
from ._notebooks.queue_plots import plot_depth, plot_rates, plot_skew, plot_tags, plot_waiting
from ._notebooks.replay import Replay, replay
from ._notebooks.widgets import browser, time_range
from ._report.drill_down import RangeDiff

__all__ = [
    "Log",
    "Note",
    "Queues",
    "RangeDiff",
    "Replay",
    "browser",
    "diff_finding",
    "findings_table",
    "open_audit",
    "open_log",
    "open_queues",
    "plot_audit",
    "plot_depth",
    "plot_over_time",
    "plot_per_queue",
    "plot_rates",
    "plot_skew",
    "plot_tags",
    "plot_waiting",
    "replay",
    "replicas_table",
    "time_range",
    "verdict",
]
