"""A minute of the campaign of random faults; ``make faults`` runs ten."""

from __future__ import annotations

from faults import campaign


def test_in_a_minute_of_random_faults_every_row_is_right_and_nothing_is_left() -> None:
    report = campaign(60, seed=0)
    assert sum(report.faults.values()) >= 50, report
    assert report.restarts > 0 and report.interrupted > 0 and report.rows > 10_000, report
    assert len(report.detections_s) > 0
    assert not report.leftovers, report
