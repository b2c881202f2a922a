"""Views of an audit's JSON summary for ``audit.ipynb``: the verdict, its tables, the picture along the log."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dledger_core import ClientConfig, DLedgerError

from .._report.page import COLORS, VERDICT_COLORS
from .samples import damaged_replicas
from .style import finished, label, new_figure, row_height
from .table import Table

__all__ = [
    "Verdict",
    "findings_table",
    "load_audit",
    "open_audit",
    "plot_audit",
    "replicas_table",
    "run_audit",
    "verdict",
]

_JOB: Final = Path(__file__).resolve().parents[1] / "audit_replicas.py"
_VERDICT_COLORS: Final = {name: light for name, (light, _) in VERDICT_COLORS.items()}
_COLORS: Final = {name: light for name, (light, _) in COLORS.items()}
_BAR: Final = 0.42
_CHARACTERS: Final = 150
"""Characters of a label's font across the axis."""
_MORE: Final = ", 00 more"
_NARROWEST: Final = 0.006
"""Minimum width of a finding, as a part of the axis: one entry of a million must be visible."""


def run_audit(
    table: Path, replicas: Mapping[str, Path | str] | None = None, peers: str = "", groups: str = ""
) -> dict[str, Any]:
    """Run ``jobs/audit_replicas.py`` and return its summary; its progress is printed.

    Args:
        table: directory for the Delta tables.
        replicas: store directories by name.
        peers: the nodes of a live cluster instead.
        groups: its groups; empty = the default one.

    Raises:
        DLedgerError: the job failed.
    """
    named = [word for name, path in (replicas or {}).items() for word in ("--replica", f"{name}={path}")]
    live = [*(("--peers", peers) if peers else ()), *(("--groups", groups) if groups else ())]
    command = [sys.executable, str(_JOB), *named, *live, "--table", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=table.parent)
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1, 2) or not lines:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise DLedgerError(errors[-1].removeprefix("error: ") if errors else done.stderr[-500:], "audit_replicas.py")
    print(done.stderr[max(done.stderr.find("\nrun "), 0) :].strip())  # without Spark's first lines
    return dict(json.loads(lines[-1]))


def open_audit(
    summary: str | Path | None = None,
    *,
    replicas: Mapping[str, Path | str] | None = None,
    peers: str | None = None,
    groups: str | None = None,
) -> dict[str, Any]:
    """Return the summary of an audit: one from a file, or that of a new audit.

    Args:
        summary: a file with the job's stdout; None = ``DLEDGER_AUDIT``.
        replicas: stores to audit now, by name; None = ``DLEDGER_REPLICAS``, as ``n0=DIR;n1=DIR``.
        peers: nodes to audit now; None = ``DLEDGER_PEERS``.
        groups: their groups; None = ``DLEDGER_GROUP``, or ``default``.

    Without any of them the stores of three brokers from the tests are audited, two of them damaged on purpose.

    Raises:
        DLedgerError: the audit failed.
    """
    if summary is None and replicas is None and peers is None:
        summary, peers = os.environ.get("DLEDGER_AUDIT"), ClientConfig.in_effect().peers
        named = os.environ.get("DLEDGER_REPLICAS", "")
        replicas = dict(one.split("=", 1) for one in named.split(";")) if named else None
    if summary:
        return load_audit(summary)
    with tempfile.TemporaryDirectory(prefix="dledger-notebook-", ignore_cleanup_errors=True) as tables:
        table = Path(tables) / "tables"
        if peers:
            return run_audit(table, peers=peers, groups=groups or ClientConfig.in_effect().group or "")
        return run_audit(table, replicas or damaged_replicas(_kept_directory()))


@cache
def _kept_directory() -> Path:
    """Return a directory that exists as long as this process: a finding's entries are read from it later."""
    directory = Path(tempfile.mkdtemp(prefix="dledger-notebook-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def load_audit(path: Path | str) -> dict[str, Any]:
    """Return the summary in a file with the job's stdout: its last line."""
    return dict(json.loads(Path(path).read_text(encoding="utf-8").strip().splitlines()[-1]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """An audit's verdict; a notebook shows it as a card."""

    name: str
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((f"verdict: {self.name}", *self.lines))

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.lines)
        color = _VERDICT_COLORS.get(self.name, "#30363d")
        style = f"background:{color};color:#fff;padding:14px 18px;border-radius:8px;max-width:60em"
        return (
            f'<div style="{style}"><div style="font-size:1.5em;font-weight:600">{escape(self.name)}</div>{lines}</div>'
        )


def verdict(summary: Mapping[str, Any]) -> Verdict:
    """Return the verdict with its coverage, and the reasons for incomplete coverage."""
    severities: dict[str, int] = {}
    for finding in summary["findings"]:
        severities[finding["severity"]] = severities.get(finding["severity"], 0) + 1
    counted = ", ".join(f"{count} {name}" for name, count in severities.items()) or "none"
    lines = [f"{summary['coverage_percent']} % of the replicas' entries were compared", f"findings: {counted}"]
    lines += [f"left out: {reason}" for reason in summary.get("incomplete", ())]
    return Verdict(str(summary["verdict"]), tuple(lines))


def replicas_table(summary: Mapping[str, Any]) -> Table:
    """Return a row per replica: its range of entries and its coverage."""
    rows = [
        {name: replica.get(name) for name in ("group", "name", "kind", "role", "first_index", "last_index")}
        | {"commit_index": replica.get("commit_index")}
        | {"compared_percent": (summary.get("coverage") or {}).get(replica["name"], {}).get("percent")}
        | {"where": replica.get("where"), "error": replica.get("error")}
        for replica in summary["replicas"]
    ]
    return Table(pd.DataFrame(rows).convert_dtypes().dropna(axis="columns", how="all"))


def findings_table(summary: Mapping[str, Any]) -> Table:
    """Return a row per finding, with the numbers that ``diff_finding`` takes."""
    names = ("class", "severity", "group", "replica", "start", "end", "count", "meaning", "next_step")
    return Table([{name: finding[name] for name in names} for finding in summary["findings"]], columns=names)


def plot_audit(summary: Mapping[str, Any], group: str | None = None) -> Figure:
    """Return the picture of a group: each replica's log from left to right, with compared ranges and findings.

    Args:
        summary: of an audit.
        group: which group; None = the first.
    """
    replicas = [one for one in summary["replicas"] if group in (None, one["group"])]
    group = group if group is not None else replicas[0]["group"]
    replicas = [one for one in replicas if one["group"] == group]
    findings = [finding for finding in summary["findings"] if finding["group"] == group]
    stored = [one for one in replicas if one["reachable"]]
    low = min((one["first_index"] for one in stored), default=0)
    high = max([low + 1, *(one["last_index"] + 1 for one in stored), *(finding["end"] for finding in findings)])
    ranges: list[dict[str, Any]] = next((one["ranges"] for one in summary["groups"] if one["group"] == group), [])
    figure, axes = new_figure(10.0, row_height(2 * len(replicas)) + 0.4)
    for row, replica in enumerate(replicas):
        mine = [finding for finding in findings if replica["name"] in finding["replica"].split(",")]
        own = [one for one in ranges if one["replica"] == replica["name"]]
        _plot_replica(axes, row, replica, own, mine, (low, high))
    axes.set_yticks(range(len(replicas)), [label(one["name"]) for one in replicas])
    axes.invert_yaxis()
    axes.set_xlim(low, high)
    axes.set_ylim(len(replicas) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")
    axes.set(title=f"Group {group}: {summary['verdict']}", xlabel="index")
    used = {finding["severity"] for finding in findings} | {one["state"] for one in ranges}
    shown = [name for name in _COLORS if name in used]
    handles = [Patch(color=_COLORS[name], label=name) for name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return finished(figure)


def _plot_replica(
    axes: Axes,
    row: int,
    replica: Mapping[str, Any],
    ranges: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    axis: tuple[int, int],
) -> None:
    width = axis[1] - axis[0]
    if not replica["reachable"]:
        text = f"could not be read: {replica['error']}"
        axes.annotate(text, (0.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        return
    for one in ranges:
        axes.barh(row, one["end"] - one["start"], _BAR, left=one["start"], color=_COLORS[one["state"]])
    order = list(_COLORS)
    for finding in sorted(findings, key=lambda one: -order.index(one["severity"])):  # the worst on top
        begin, count = finding["start"], max(finding["end"] - finding["start"], 1)
        wide = max(count, _NARROWEST * width)
        info = finding["severity"] == "info"
        axes.barh(
            row + (0.32 if info else 0.0),
            wide,
            0.14 if info else _BAR + 0.16,
            left=begin - (wide - count) / 2,
            color=_COLORS[finding["severity"]],
        )
    for begin, text in _labels([one for one in findings if one["severity"] != "info"], width):
        right = begin - axis[0] > 0.6 * width
        axes.annotate(text, (begin, row - 0.36), fontsize=7, ha="right" if right else "left", color="#30363d")


def _labels(findings: Sequence[Mapping[str, Any]], width: int) -> list[tuple[int, str]]:
    """Return index and text of the labels; one that would cover the label before it is counted there instead."""
    found: list[tuple[int, str, int]] = []
    end = float("-inf")
    for finding in sorted(findings, key=lambda one: one["start"]):
        begin, count = finding["start"], max(finding["end"] - finding["start"], 1)
        text = f"{finding['class']} {begin:,}" + ("" if count == 1 else f" to {finding['end'] - 1:,}")
        room = (len(text) + len(_MORE)) * width / _CHARACTERS
        if found and begin - room < end:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((begin, text, 0))
            end = begin + room
    return [(begin, text + (_MORE.replace("00", str(more)) if more else "")) for begin, text, more in found]
