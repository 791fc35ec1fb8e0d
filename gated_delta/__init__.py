"""The gated delta rule (linear attention of Qwen3-Next and Qwen3.5): prefill in chunks, and decode."""

from gated_delta.api import chunk_gated_delta_rule, prefill_scratch_bytes, recurrent_gated_delta_rule
from gated_delta.tuning import Config

__all__ = ["Config", "chunk_gated_delta_rule", "prefill_scratch_bytes", "recurrent_gated_delta_rule"]
