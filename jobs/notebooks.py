"""The functions of the notebooks; a notebook begins with ``from jobs import notebooks as nb``.

``open_log`` reads a sample of a log into memory, ``open_queues`` counts the queues of a log, ``open_audit`` returns the
summary of an audit. Functions ``plot_...`` return a figure, or a sentence where there is nothing to draw.
``notebooks/README.md`` describes the notebooks.
"""

from jobs._audit.range_diff import diff_finding
from jobs._notebooks.audit_view import findings_table, open_audit, plot_audit, replicas_table, verdict
from jobs._notebooks.log_plots import plot_over_time, plot_per_queue
from jobs._notebooks.log_sample import Log, open_log
from jobs._notebooks.note import Note
from jobs._notebooks.queue_counts import Queues, open_queues
from jobs._notebooks.queue_plots import plot_depth, plot_rates, plot_skew, plot_tags, plot_waiting
from jobs._notebooks.replay import Replay, replay
from jobs._notebooks.widgets import browser, time_range
from jobs._report.drill_down import RangeDiff

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
