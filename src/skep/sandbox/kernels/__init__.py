"""Programs that run inside a sandbox and keep state between cells. They use nothing but what their language ships."""

from __future__ import annotations

import os

#: Where they are on the host, and where every sandbox sees them.
FOLDER = os.path.dirname(__file__)
INSIDE = "/run/skep/kernels"
