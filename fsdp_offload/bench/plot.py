"""Pictures of reports; matplotlib is optional and imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_iterations(report: Mapping[str, Any], path: Path) -> None:
    """One bar per row: milliseconds per iteration, its bound as a line across the bar.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from .table import describe

    rows = [row for row in report["rows"] if row["status"] == "ok"][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(rows) + 1.6))
    axes.barh([row["name"] for row in rows], [row["iteration_ms"] for row in rows], color="#7a9cc6")
    for index, row in enumerate(rows):
        if "bound_ms" in row:
            axes.plot([row["bound_ms"]] * 2, [index - 0.4, index + 0.4], color="#b03030")
    axes.set_xlabel("ms per iteration (line: bound)")
    axes.set_title(describe(report), fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
