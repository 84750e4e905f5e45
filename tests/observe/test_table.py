"""The table of metrics against Prometheus' conventions, and the files that are written from it."""

from __future__ import annotations

import re

import pytest
from observe.kit import COMPOSE, compose_module

from draftwire.exporter import TableCollector
from draftwire.meters import Distribution, Reading
from draftwire.metric_table import LABELS, OTHER, TABLE

NAME = re.compile(r"\b(?:draftwire|process)_[a-z0-9_]+")
SUFFIXES = ("_bucket", "_sum", "_count")


def test_names_follow_the_conventions_of_prometheus():
    for metric in TABLE.values():
        assert re.fullmatch(r"(draftwire|process)_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|minutes|kb|mb|percent)(_|$)", metric.name)
        assert metric.help.endswith("."), metric.name
        assert set(metric.services) <= {"verifier", "drafter"}


def test_every_label_lists_all_its_values():
    for metric in TABLE.values():
        series = 1
        for name in metric.label_names:
            assert re.fullmatch(r"[a-z]+", name)
            assert name not in {"le", "job", "instance"}  # Prometheus' own
            values = metric.allowed(name)
            assert len(set(values)) == len(values)
            series *= len(values)
        assert series <= 128, f"{metric.name} could have {series} series"
    used = {values for metric in TABLE.values() for _, values in metric.labels}
    assert used == set(LABELS), "a label that no metric has"


def test_reasons_parts_and_faults_of_the_contract_are_values_of_their_labels():
    from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2

    def names(enum, prefix):
        return {name.removeprefix(prefix).lower() for name in enum.keys()[1:]}

    assert names(types_pb2.BlockSizeReason, "BLOCK_SIZE_REASON_") == {*LABELS["reason"]} - {OTHER}
    assert names(types_pb2.DraftPart, "DRAFT_PART_") == {*LABELS["part"]} - {OTHER}
    assert names(drafter_pb2.FaultKind, "FAULT_KIND_") == {*LABELS["fault"]} - {OTHER}
    assert names(verifier_pb2.LaneState, "LANE_STATE_") == set(LABELS["lane_state"])
    assert names(verifier_pb2.FinishReason, "FINISH_REASON_") <= set(LABELS["outcome"])


def test_written_files_are_up_to_date():
    observe = compose_module("generate")
    hint = "run `python compose/generate.py`"
    assert observe.METRICS.read_text() == observe.markdown(), hint
    assert observe.DASHBOARD.read_text() == observe.dashboard(), hint


def test_dashboard_is_what_grafana_reads():
    import json

    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    text = compose_module("generate").DASHBOARD.read_text()
    board = Dashboard.from_json(json.loads(text))
    assert JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n" == text
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["targets"] and panel["title"] for panel in panels)


@pytest.mark.parametrize(
    "path",
    ["prometheus/rules.yml", "prometheus/rules_test.yml", "grafana/dashboards/draftwire.json"],
)
def test_rules_and_dashboard_name_only_metrics_of_the_table(path):
    found = set(NAME.findall((COMPOSE / path).read_text()))
    unknown = set()
    for name in found - {"draftwire_verifier", "draftwire_drafter"}:
        plain = name
        for suffix in SUFFIXES:
            base = name.removesuffix(suffix)
            if base != name and base in TABLE and TABLE[base].kind == "histogram":
                plain = base
        if plain not in TABLE or (plain == name and TABLE[plain].kind == "histogram"):
            unknown.add(name)
    assert not unknown
    assert len(found) > 5


def test_the_dashboard_shows_every_metric_that_people_act_on():
    shown = set(NAME.findall((COMPOSE / "grafana/dashboards/draftwire.json").read_text()))
    for metric in TABLE.values():
        if metric.name.startswith("draftwire_spec_decode_num_"):
            assert metric.name in shown


def collected(service: str, *readings: Reading) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = TableCollector(service, [lambda: readings]).collect()
    return {
        sample.name: [(s.labels, s.value) for s in family.samples if s.name == sample.name]
        for family in families
        for sample in family.samples
    }


def test_counters_are_there_as_zero_before_anything_happened():
    found = collected("verifier")
    assert found["draftwire_verifier_steps_total"] == [({}, 0.0)]
    outcomes = found["draftwire_verifier_requests_total"]
    assert {labels["outcome"] for labels, _ in outcomes} == set(LABELS["outcome"])
    assert "draftwire_drafter_steps_total" not in found
    assert "draftwire_rpc_started_total" not in found  # sparse


def test_a_value_that_is_not_listed_is_other_or_an_error():
    faults = "draftwire_verifier_session_faults_total"
    found = collected("verifier", Reading(faults, 2, ("quantum",)), Reading(faults, 3, ("cosmic",)))
    assert ({"kind": "other"}, 5.0) in found[faults]
    with pytest.raises(ValueError, match="state is 'asleep'"):
        collected("verifier", Reading("draftwire_verifier_lanes", 1, ("asleep",)))
    with pytest.raises(ValueError, match="has labels"):
        collected("verifier", Reading("draftwire_verifier_lanes", 1))
    with pytest.raises(KeyError):
        collected("verifier", Reading("draftwire_verifier_secrets", 1))
    with pytest.raises(KeyError):  # the other service's
        collected("verifier", Reading("draftwire_drafter_steps_total", 1))


def test_a_distribution_counts_up_to_each_bound():
    spread = Distribution((1, 2, 4))
    for value in (1, 2, 2.5, 9):
        spread.add(value)
    spread.add(4, times=2)
    assert spread.cumulative() == [("1", 1), ("2", 2), ("4", 5), ("+Inf", 6)]
    found = collected("verifier", Reading("draftwire_verifier_step_rows", spread))
    assert found["draftwire_verifier_step_rows_sum"] == [({}, 22.5)]
    assert found["draftwire_verifier_step_rows_count"] == [({}, 6.0)]
