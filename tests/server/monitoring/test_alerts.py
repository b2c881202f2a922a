"""Prometheus' own promtool runs each alert rule: it fires on its symptom, and none fires on a healthy cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dledger_core.server.monitoring.metrics import METRICS

ALERTS = Path(__file__).resolve().parents[3] / "deploy/prometheus/alerts.yml"
NAMES = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
ON = 'instance="n0",group="g"'
MINUTES = 60
LONG = ("DLedgerScrubStopped", "DLedgerDiskFillsUp")
"""Alerts about hours or days."""


def buckets(name: str, labels: str, slow: str) -> dict[str, str]:
    """Durations that are all above 1.6 s (slow) or all below 1 ms."""
    growing, none = "0+10x5000", "0x5000"
    return {
        f'{name}_bucket{{{labels},le="{le}"}}': none if slow and le == "0.001" else growing for le in ("0.001", "+Inf")
    } | {f'{name}_bucket{{{labels},le="3.2"}}': growing}


SYMPTOMS: dict[str, dict[str, str]] = {
    "DLedgerNodeDown": {'up{job="dledger",instance="n0"}': "0x5000"},
    "DLedgerNoLeader": {f"dledger_leader_known{{{ON}}}": "0x5000"},
    "DLedgerNothingAcknowledged": {f"dledger_failures_survived{{{ON}}}": "-1x5000"},
    "DLedgerNodeWithoutLeader": {
        f"dledger_leader_known{{{ON}}}": "0x5000",
        'dledger_leader_known{instance="n1",group="g"}': "1x5000",
    },
    "DLedgerNotReady": {'dledger_ready{instance="n0"}': "0x5000"},
    "DLedgerQuarantined": {f'dledger_group_state{{{ON},state="quarantined"}}': "1x5000"},
    "DLedgerPeerDisconnected": {'dledger_peer_connected{instance="n0",peer="n1"}': "0x5000"},
    "DLedgerLeaderChanges": {f"dledger_leader_changes_total{{{ON}}}": "0+1x5000"},
    "DLedgerElections": {f"dledger_elections_total{{{ON}}}": "0+1x5000"},
    "DLedgerRecoveringVoter": {f"dledger_recovering{{{ON}}}": "1x5000"},
    "DLedgerDamage": {f"dledger_damaged_places{{{ON}}}": "1x5000"},
    "DLedgerRepairs": {f"dledger_repairs_total{{{ON}}}": "0+1x5000"},
    "DLedgerScrubStopped": {
        f"dledger_scrub_index{{{ON}}}": "7x5000",
        f"dledger_scrub_rounds_total{{{ON}}}": "0x5000",
        f"dledger_commit_index{{{ON}}}": "0+1x5000",
    },
    "DLedgerFollowerLags": {f'dledger_follower_lag_bytes{{{ON},follower="n1"}}': "1000000000x5000"},
    "DLedgerMemberChangePending": {f"dledger_member_change_pending{{{ON}}}": "1x5000"},
    "DLedgerDiskFull": {f"dledger_disk_full{{{ON}}}": "1x5000"},
    "DLedgerDiskFillsUp": {
        f"dledger_disk_free_bytes{{{ON}}}": "30000000000-10000000x5000",
        f"dledger_disk_size_bytes{{{ON}}}": "110000000000x5000",
    },
    "DLedgerSlowSync": buckets("dledger_fsync_duration_seconds", ON, "slow"),
    "DLedgerSlowCommit": buckets("dledger_commit_duration_seconds", ON, "slow"),
    "DLedgerBusy": {'dledger_requests_refused_total{instance="n0",error="BUSY"}': "0+5x5000"},
    "DLedgerMemoryOfAppends": {
        'dledger_append_inflight_bytes{instance="n0"}': "9x5000",
        'dledger_append_inflight_limit_bytes{instance="n0"}': "10x5000",
    },
    "DLedgerClientConnections": {
        'dledger_client_connections{instance="n0"}': "9x5000",
        'dledger_client_connections_limit{instance="n0"}': "10x5000",
    },
    "DLedgerDescriptors": {
        'process_open_fds{job="dledger",instance="n0"}': "9x5000",
        'process_max_fds{job="dledger",instance="n0"}': "10x5000",
    },
    "DLedgerCertificateExpires": {'dledger_certificate_expiry_timestamp_seconds{instance="n0"}': "1000000x5000"},
    "DLedgerTableNearlyFull": {
        f'dledger_table_rows{{{ON},table="queries"}}': "9x5000",
        f'dledger_table_rows_limit{{{ON},table="queries"}}': "10x5000",
    },
    "DLedgerArchiveBehind": {f"dledger_archive_lag_seconds{{{ON}}}": "90000x5000"},
    "DLedgerArchiveDiffers": {f"dledger_archive_differs{{{ON}}}": "1x5000"},
    "DLedgerReadersHeldBack": {
        f"dledger_open_transactions{{{ON}}}": "1x5000",
        f"dledger_commit_index{{{ON}}}": "1000000x5000",
        f"dledger_visible_end{{{ON}}}": "5x5000",
    },
    "DLedgerEventLoopStalls": buckets("dledger_event_loop_delay_seconds", 'instance="n0"', "slow"),
}
HEALTHY: dict[str, str] = {
    'up{job="dledger",instance="n0"}': "1x5000",
    f"dledger_leader_known{{{ON}}}": "1x5000",
    'dledger_ready{instance="n0"}': "1x5000",
    f'dledger_group_state{{{ON},state="quarantined"}}': "0x5000",
    f'dledger_group_state{{{ON},state="hosted"}}': "1x5000",
    'dledger_peer_connected{instance="n0",peer="n1"}': "1x5000",
    f"dledger_leader_changes_total{{{ON}}}": "1x5000",
    f"dledger_elections_total{{{ON}}}": "1x5000",
    f"dledger_recovering{{{ON}}}": "0x5000",
    f"dledger_damaged_places{{{ON}}}": "0x5000",
    f"dledger_repairs_total{{{ON}}}": "0x5000",
    f"dledger_scrub_index{{{ON}}}": "0+5x5000",
    f"dledger_scrub_rounds_total{{{ON}}}": "0+1x5000",
    f"dledger_commit_index{{{ON}}}": "0+7x5000",
    f"dledger_visible_end{{{ON}}}": "1+7x5000",
    f'dledger_follower_lag_bytes{{{ON},follower="n1"}}': "0x5000",
    f"dledger_member_change_pending{{{ON}}}": "0x5000",
    f"dledger_disk_full{{{ON}}}": "0x5000",
    f"dledger_disk_free_bytes{{{ON}}}": "100000000000-1000x5000",
    f"dledger_disk_size_bytes{{{ON}}}": "110000000000x5000",
    'dledger_requests_refused_total{instance="n0",error="NOT_LEADER"}': "0+1x5000",
    'dledger_append_inflight_bytes{instance="n0"}': "1x5000",
    'dledger_append_inflight_limit_bytes{instance="n0"}': "10x5000",
    'dledger_client_connections{instance="n0"}': "1x5000",
    'dledger_client_connections_limit{instance="n0"}': "10x5000",
    'process_open_fds{job="dledger",instance="n0"}': "1x5000",
    'process_max_fds{job="dledger",instance="n0"}': "10x5000",
    'dledger_certificate_expiry_timestamp_seconds{instance="n0"}': "4000000000x5000",
    f'dledger_table_rows{{{ON},table="queries"}}': "1x5000",
    f'dledger_table_rows_limit{{{ON},table="queries"}}': "10x5000",
    f"dledger_open_transactions{{{ON}}}": "1x5000",
    f"dledger_archive_lag_seconds{{{ON}}}": "3000x5000",
    f"dledger_archive_differs{{{ON}}}": "0x5000",
    **buckets("dledger_fsync_duration_seconds", ON, ""),
    **buckets("dledger_commit_duration_seconds", ON, ""),
    **buckets("dledger_event_loop_delay_seconds", 'instance="n0"', ""),
}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = shutil.which("promtool") or pytest.skip("needs promtool: sudo apt-get install prometheus")
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False)


def case(name: str, series: dict[str, str], firing: dict[str, int]) -> dict[str, Any]:
    """One test of promtool: how many series of each alert fire; an alert that does not fire has none."""
    hours = 50 if name in LONG else 1
    checks = [
        {
            "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert}"}}) or vector(0)',
            "eval_time": f"{hours}h",
            "exp_samples": [{"labels": "{}", "value": count}],
        }
        for alert, count in firing.items()
    ]
    return {
        "name": name,
        "interval": "1h" if name == "DLedgerScrubStopped" else "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": checks,
    }


def test_rules_are_valid() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_symptom_here() -> None:
    assert sorted(SYMPTOMS) == sorted(NAMES)
    named = {series.split("{")[0] for symptom in [*SYMPTOMS.values(), HEALTHY] for series in symptom}
    known = {metric.name for metric in METRICS} | {"up", "process_open_fds", "process_max_fds"}
    assert {name.removesuffix("_bucket") for name in named} <= known


def test_each_alert_fires_on_its_symptom_and_none_when_healthy(tmp_path: Path) -> None:
    tests = [case(name, series, {name: 1}) for name, series in SYMPTOMS.items()]
    tests += [case(name, HEALTHY, dict.fromkeys(NAMES, 0)) for name in ("healthy", "DLedgerDiskFillsUp")]
    content = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(content))
    done = promtool("test", "rules", tmp_path / "tests.yml")
    assert done.returncode == 0, done.stdout + done.stderr
