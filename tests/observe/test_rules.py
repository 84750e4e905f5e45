"""The alerts: promtool's unit tests pass, and fail as soon as any rule is wrong."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from observe.kit import COMPOSE, RULES, compose_module, debian, scaled

ALERTS = [alert["alert"] for alert in compose_module("generate").alerts()]
TESTS = COMPOSE / "prometheus" / "rules_test.yml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [debian("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_configuration_and_rules_are_valid():
    found = promtool("check", "config", COMPOSE / "prometheus" / "prometheus.yml")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SUCCESS" in found.stdout


def test_every_alert_fires_on_its_fault_and_clears():
    found = promtool("test", "rules", TESTS)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("expression", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
def test_the_unit_tests_notice_every_alert_that_is_wrong(expression, tmp_path):
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = expression
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    shutil.copy(TESTS, tmp_path)
    found = promtool("test", "rules", tmp_path / TESTS.name)
    assert found.returncode != 0
    missed = [alert for alert in ALERTS if alert not in found.stdout + found.stderr]
    assert not missed


def test_every_alert_says_what_happened_and_what_to_do():
    for alert in compose_module("generate").alerts():
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert "$labels.instance" in alert["annotations"]["summary"]
        assert len(alert["annotations"]["runbook"].split()) > 10


def test_scaled_rules_stay_valid_and_keep_their_thresholds(tmp_path):
    short = scaled(RULES.read_text(), 60)
    (tmp_path / "rules.yml").write_text(short)
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0
    assert "[5000ms]" in short
    assert "for: 500ms" in short
    assert "offset 10000ms" in short
    assert "oldest_waiting_seconds > 10" in short
