"""Grouped-query attention over a cache, with sinks and sliding windows."""

from gqa.api import append_kv, grouped_query_attention

__all__ = ["append_kv", "grouped_query_attention"]
