"""Grouped-query attention over a cache, with sinks and sliding windows."""

from gqa.api import append_kv, grouped_query_attention
from gqa.tuning import Config

__all__ = ["Config", "append_kv", "grouped_query_attention"]
