"""The models of the protocol, as far as that takes seconds; ``make model`` checks all of them."""

from __future__ import annotations

import shutil

import pytest
from check_models import CHECKS, Check, judge, search


@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed (e.g. apt install spin)")
@pytest.mark.parametrize("check", [each for each in CHECKS if each.is_quick], ids=lambda each: each.name)
def test_the_protocol_holds_and_every_broken_one_is_caught(check: Check) -> None:
    assert not judge(check, search(check))
