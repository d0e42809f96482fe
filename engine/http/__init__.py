"""The public path of `weft.engine.http.check_ids`, for `vllm serve --middleware weft.engine.http.CheckIds`."""

from weft.engine.http.check_ids import CheckIds

__all__ = ["CheckIds"]
