"""The Grafana dashboard in the documentation."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import promql_parser
import pytest
from background import ROOT

from weft.engine.watch.metrics.export import METRICS

DASHBOARD = json.loads((ROOT / "docs/how-to/grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
SNIPPETS = re.findall(r"```text\n(sum .*?)```", (ROOT / "docs/how-to/observe.md").read_text(), flags=re.DOTALL)
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


class Query:
    """What a query asks for, as PromQL's grammar has it.

    Attributes:
        names: The series that it reads.
        selected: The labels that it compares.
        grouped: The labels by which it sums, or that a division leaves out.
        by: The labels that its first sum leaves; None: it sums nothing.
    """

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self.selected: set[str] = set()
        self.grouped: set[str] = set()
        self.by: set[str] | None = None
        filled = text.replace("$__rate_interval", "1m").replace("$engine", ".*")  # as Grafana does
        promql_parser.walk(promql_parser.parse(filled), self._read)

    def _read(self, node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            self.names.add(node.name)
            self.selected |= {matcher.name for matcher in node.matchers.matchers}
        elif isinstance(node, promql_parser.AggregateExpr):
            labels = set(node.modifier.labels) if node.modifier is not None else set()
            self.grouped |= labels
            self.by = labels if self.by is None else self.by
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None and node.modifier.matching:
            self.grouped |= set(node.modifier.matching.labels)


@pytest.mark.parametrize("text", [*QUERIES, *SNIPPETS])
def test_every_query_reads_series_that_are_exported_by_labels_that_they_have(text: str) -> None:
    """It is PromQL, and no panel is empty because a metric was renamed, or one line because a label was."""
    query = Query(text)
    assert query.names
    assert query.names <= SERIES.keys()
    assert query.grouped | query.selected <= set.intersection(*(SERIES[name] for name in query.names))


def test_the_variable_is_a_label_of_a_metric() -> None:
    """Otherwise no engine could be chosen, and every panel would be empty."""
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in SERIES[metric]


def test_every_legend_has_labels_that_its_query_leaves() -> None:
    """A label that the sum has removed is empty in the legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            query = Query(target["expr"])
            left = query.by if query.by is not None else set.union(*(SERIES[name] for name in query.names))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left, target


def test_every_metric_is_on_the_dashboard() -> None:
    """A metric that is added is shown, too."""
    shown = {name for query in QUERIES for name in Query(query).names}
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
