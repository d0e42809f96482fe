"""The public path of `weft.engine.http.check_ids`, for `vllm serve --middleware weft.engine.http.CheckIds`."""

from __future__ import annotations

from weft.engine.http.check_ids import CheckIds

__all__ = ["CheckIds"]
