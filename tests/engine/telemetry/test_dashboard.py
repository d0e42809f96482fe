"""The Grafana dashboard in the documentation."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

from background import ROOT

from weft.engine.telemetry.metrics import METRICS

DASHBOARD = json.loads((ROOT / "docs/how-to/grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
# By the name of each series: its labels. A histogram has three series.
SERIES = {
    name: {"engine", *metric.labels, *more}
    for metric in METRICS
    for name, more in (
        [(f"{metric.name}_bucket", ("le",)), (f"{metric.name}_sum", ()), (f"{metric.name}_count", ())]
        if metric.kind == "histogram"
        else [(metric.name, ())]
    )
}


def names(query: str) -> set[str]:
    return set(re.findall(r"weft:\w+", query))


def test_every_metric_of_the_dashboard_is_exported() -> None:
    """A panel of a metric that was renamed would be empty, and nobody would know why."""
    assert QUERIES
    assert {name for query in QUERIES for name in names(query)} <= SERIES.keys()


def test_every_label_of_the_dashboard_is_one_of_its_metric() -> None:
    """Grouped by a label that does not exist, all series are one."""
    for query in QUERIES:
        labels = set.intersection(*(SERIES[name] for name in names(query)))
        grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")}
        selected = set(re.findall(r"(\w+)=~?\"", query))
        assert grouped | selected <= labels, query


def test_every_legend_has_labels_that_its_query_leaves() -> None:
    """A label that the sum has removed is empty in the legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            left = set(by[1].split(", ")) if by is not None else set.union(*map(SERIES.get, names(target["expr"])))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left, target


def test_every_metric_is_on_the_dashboard() -> None:
    """A metric that is added is shown, too."""
    shown = {name for query in QUERIES for name in names(query)}
    for metric in METRICS:
        assert any(name.startswith(metric.name) for name in shown), metric.name


def test_panels_do_not_overlap() -> None:
    """Grafana's grid is 24 wide, and a panel has an id of its own."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    spans = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(span["x"] + span["w"] <= 24 for span in spans)
    for one, other in combinations(spans, 2):
        is_apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_apart_x or is_apart_y, (one, other)
