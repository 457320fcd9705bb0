"""How the tests here look for examples: without a clock, and without a folder where none can be written."""

from __future__ import annotations

import os

from hypothesis import settings

_CAN_KEEP = os.access(".", os.W_OK)
settings.register_profile("egress", deadline=None, **({} if _CAN_KEEP else {"database": None}))
settings.load_profile("egress")
