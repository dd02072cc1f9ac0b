"""Networks of DP-MAC: names that are none are refused by a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sordino.errors import InputError
from sordino.methods.dp_mac.network import Network


@pytest.mark.parametrize("named", [{"activation": 0}, {"activation": [0]}, {"activation": None}, {"output": 0}])
def test_what_is_no_name_is_an_unknown_one(named: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is unknown"):
        Network([4, 3, 2], **named)
