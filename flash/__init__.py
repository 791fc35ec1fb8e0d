"""Flash attention, and a drop-in for `jax.nn.dot_product_attention`."""

from flash.api import dot_product_attention, flash_attention
from flash.tuning import Config

__all__ = ["Config", "dot_product_attention", "flash_attention"]
