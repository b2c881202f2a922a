"""The results as a page with tables, a picture, and the block of dledger_core/README.md that quotes them."""

from __future__ import annotations

import io
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.comparison import ROOT, SIDES
from benchmarks.lines import LINES, Line

PAGE, PICTURE, README = ROOT / "benchmarks/RESULTS.md", ROOT / "benchmarks/results.svg", ROOT / "dledger_core/README.md"
BEGIN, END = "<!-- speed: written by python -m benchmarks --render -->", "<!-- /speed -->"
NONE = "-"


class Results:
    """A file of ``python -m benchmarks``.

    Args:
        content: of the file.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def runs(self, line: Line, side: str) -> list[dict[str, Any]]:
        """Return the measurements of a line of a side that gave figures."""
        found = [run for run in self.content["runs"] if run["line"] == line.name and run["side"] == side]
        return [run for run in found if run.get("p50_ms") is not None]

    def median(self, line: Line, side: str, key: str) -> float | None:
        """Return the median of a figure; None if there is none."""
        values = [run[key] for run in self.runs(line, side) if key in run]
        return statistics.median(values) if values else None

    def reasons(self, side: str) -> list[str]:
        """Return why lines of a side have no figures, or not all: a sentence for each reason."""
        found: dict[str, list[str]] = {}
        for run in self.content["runs"]:
            if run["side"] == side:
                kind = "not run" if "not_run" in run else "failed" if "failed" in run else ""
                if kind:
                    reason = f"{kind}: {run.get('not_run') or run.get('reason') or run['failed']}"
                    lines = found.setdefault(reason, [])
                    if run["line"] not in lines:
                        lines.append(run["line"])
        measured = {run["line"] for run in self.content["runs"]}
        return [reason if set(lines) == measured else f"{', '.join(lines)} {reason}" for reason, lines in found.items()]

    def lines(self) -> list[Line]:
        """Return the lines that were run."""
        names = {run["line"] for run in self.content["runs"]}
        return [line for line in LINES if line.name in names]

    def headline(self, line: Line, side: str) -> tuple[float | None, str]:
        """Return the figure that a line is about, and its cell of a table."""
        if line.share:
            values = [self.median(line, side, key) for key in ("p50_ms", "p99_ms", "p99_9_ms")]
            cell = " / ".join(NONE if value is None else number(value) for value in values)
            return values[0], NONE if values[0] is None else cell
        value = self.median(line, side, "p50_ms" if line.in_flight == 1 else "entries_per_s")
        return value, NONE if value is None else number(value)


def number(value: float) -> str:
    """Return a figure with two or three digits that mean something."""
    if value >= 1_000_000:
        return f"{value / 1e6:.2f} M"
    if value >= 10_000:
        return f"{value / 1000:.0f} k"
    if value >= 1000:
        return f"{value / 1000:.1f} k"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def unit(line: Line) -> str:
    """Return the unit of a line's figure."""
    return "p50 / p99 / p99.9, ms" if line.share else "p50, ms" if line.in_flight == 1 else "entries/s"


def table(results: Results, names: list[str], *, shares: bool) -> str:
    """Return the table of the figures that the lines are about.

    Args:
        results: the measurements.
        names: the sides.
        shares: with columns for the shares that ours has of the skeletons' rates.
    """
    titles = {side.name: side.title for side in SIDES}
    extra = ["of growing", "of zeroed"] if shares else []
    head = ["", "", *(titles[name] for name in names), *extra]
    rows = [head, ["---"] * len(head)]
    for line in results.lines():
        cells = [line.title, unit(line), *(results.headline(line, name)[1] for name in names)]
        for skeleton in ("growing", "zeroed")[: len(extra)]:
            ours, bound = (results.headline(line, name)[0] for name in ("ours", skeleton))
            cells.append(f"{ours / bound:.2f}" if ours and bound else NONE)
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def details(results: Results) -> str:
    """Return a table with every figure."""
    rows = [
        "| | | entries/s: median (least to most) | p50 ms | p99 ms | p99.9 ms | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in results.lines():
        for side in SIDES:
            runs = results.runs(line, side.name)
            if not runs:
                continue
            rates = [run["entries_per_s"] for run in runs]
            times = [results.median(line, side.name, key) for key in ("p50_ms", "p99_ms", "p99_9_ms")]
            spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
            cells = [line.title, side.title, spread, *(NONE if time is None else number(time) for time in times)]
            rows.append(f"| {' | '.join([*cells, str(len(runs))])} |")
    return "\n".join(rows)


def processor(results: Results) -> str:
    """Return a table of the CPU time that ours takes."""
    rows = ["| | client | each node | context switches per entry |", "|---|---|---|---|"]
    for line in results.lines():
        runs = results.runs(line, "ours")
        keys = sorted(key for key in runs[0] if key.startswith("cpu_us_per_entry_n")) if runs else []
        if keys:
            client, *nodes = (
                f"{statistics.median(run[key] for run in runs if key in run):.3g}"
                for key in ("cpu_us_per_entry_client", *keys)
            )
            switches = results.median(line, "ours", "context_switches_per_entry")
            shown = NONE if switches is None else number(switches)
            rows.append(f"| {line.title} | {client} | {' / '.join(nodes)} | {shown} |")
    return "\n".join(rows)


def measured_on(results: Results) -> str:
    """Return a sentence about the machine and the date."""
    content = results.content
    if not content["runs"]:
        return "not yet"
    about = content["machine"]
    return (
        f"{content['at']}, commit {about['commit']}, Python {about['python']}; {about['cores']} cores"
        f"{' (' + about['processor'] + ')' if about['processor'] else ''}, {about['memory_gib']} GiB, {about['system']}"
    )


def page(results: Results) -> str:
    """Return RESULTS.md."""
    content = results.content
    names = [side.name for side in SIDES]
    settings = "\n".join(f"- **{side.title}**: {side.settings}" for side in SIDES)
    reasons = [f"- {side.title}: {reason}" for side in SIDES for reason in results.reasons(side.name)]
    warmed = "free memory was touched before each side" if content["warmed"] else "memory was not warmed"
    missing = "\n".join(reasons) or ("Every side ran every line." if content["runs"] else "Nothing was measured yet.")
    return f"""\
# Results

Written by `python -m benchmarks --render` from [results.json](results.json); see [the guide](README.md).

Measured {measured_on(results)}. Three nodes and the client of each side share these cores, and all traffic is on
loopback: compare the columns, not these figures with other machines. Medians of {content["rounds"]} rounds of
{content["seconds"]:g} s after {content["warm_up_s"]:g} s of warm-up; {warmed}.

{table(results, names, shares=True)}

A dash means not run, see below. The last two columns are this log's figure divided by the skeleton's: of rates more is
better, of times less. At 60 % of the maximum rate, each side sends at 60 % of what it reached itself with 1 KB.

![Every line, each side](results.svg)

## Every figure

{details(results)}

## CPU time of this log, µs per entry

{processor(results)}

## Settings

{settings}

## Not run

{missing}
"""


def block(results: Results) -> str:
    """Return the figures for the README."""
    names = [side.name for side in SIDES if side.name != "zeroed"]
    return f"""\
Three nodes and one client on one machine, loopback, acknowledged by a majority; bodies of 100 bytes to 10 KB
([all figures and settings](../benchmarks/RESULTS.md)). Measured {measured_on(results)}. The skeleton
does the same without Raft. Kafka with page cache and Java DLedger acknowledge without a sync.

{table(results, names, shares=False)}
"""


def picture(results: Results) -> str:
    """Return a panel of bars for each line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lines = results.lines()
    with mpl.rc_context({"svg.hashsalt": "dledger", "font.size": 8}):
        figure = Figure(figsize=(12, 2.4 * -(-max(1, len(lines)) // 3)), layout="constrained")
        panels = figure.subplots(-(-max(1, len(lines)) // 3), 3, squeeze=False).flatten()
        for panel in panels[len(lines) :]:
            panel.axis("off")
        for panel, line in zip(panels, lines, strict=False):
            found = [(side, *results.headline(line, side.name)) for side in reversed(SIDES)]
            shown = [(side, value, cell) for side, value, cell in found if value is not None]
            colors = [
                "tab:red" if side.name == "ours" else "silver" if "skeleton" in side.title else "tab:blue"
                for side, _, _ in shown
            ]
            bars = panel.barh([side.title for side, _, _ in shown], [value for _, value, _ in shown], color=colors)
            panel.bar_label(bars, [cell for _, _, cell in shown], padding=2)
            title = textwrap.fill(line.title, 45)
            panel.set_title(f"{title}\n{unit(line)}, {'more' if unit(line) == 'entries/s' else 'less'} is better")
            panel.margins(x=0.4)
            panel.set_xticks([])
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "\n".join(text.rstrip() for text in drawn.getvalue().splitlines()) + "\n"


def quoted(readme: str, results: Results) -> str:
    """Return the README with the block replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no block between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{block(results)}\n{END}{after}"


def render(
    content: dict[str, Any], page_path: Path = PAGE, picture_path: Path = PICTURE, readme: Path = README
) -> None:
    """Write the page and the picture, and replace the block of the README."""
    results = Results(content)
    page_path.write_text(page(results))
    picture_path.write_text(picture(results))
    readme.write_text(quoted(readme.read_text(), results))
