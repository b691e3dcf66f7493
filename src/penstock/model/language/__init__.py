"""Decoder-only language models: configuration, mathematics, Hugging Face directories."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.model.language.attention import Segments, grouped_attention, packed_mask
    from penstock.model.language.config import InitConfig, ModelConfig, PolicyConfig
    from penstock.model.language.decoder import (
        Decoder,
        Layer,
        named_arrays,
        rms_norm,
        rotary_tables,
        with_named_arrays,
    )
    from penstock.model.language.hugging_face import load_decoder, load_policy, save_decoder

_EXPORTS = {
    "attention": ["Segments", "grouped_attention", "packed_mask"],
    "config": ["InitConfig", "ModelConfig", "PolicyConfig"],
    "decoder": ["Decoder", "Layer", "named_arrays", "rms_norm", "rotary_tables", "with_named_arrays"],
    "hugging_face": ["load_decoder", "load_policy", "save_decoder"],
}

__all__ = [
    "Decoder", "InitConfig", "Layer", "ModelConfig", "PolicyConfig", "Segments", "grouped_attention", "load_decoder",
    "load_policy", "named_arrays", "packed_mask", "rms_norm", "rotary_tables", "save_decoder",
    "with_named_arrays",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
