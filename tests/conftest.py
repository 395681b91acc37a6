"""Shared set-up: few threads, since the tests run in two processes."""

from __future__ import annotations

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
