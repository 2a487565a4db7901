from __future__ import annotations

import torch

# they are run by test_simulated.py, in a process that has the simulated accelerator
collect_ignore = [] if hasattr(torch, "sim") else ["checks.py"]
