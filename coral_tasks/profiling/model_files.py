"""The ``config.json`` of each catalogue model, written by the project itself: nothing is downloaded at run time.

Owns the translation of a ServedModel into the keys that vLLM, transformers and aiconfigurator-core read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coral_tasks.domain.models import AttentionKind, ServedModel

ARCHITECTURES = {
    "Qwen/Qwen3": "Qwen3ForCausalLM",
    "openai/gpt-oss": "GptOssForCausalLM",
    "deepseek-ai/DeepSeek-V3": "DeepseekV3ForCausalLM",
    "mistralai/Mixtral": "MixtralForCausalLM",
    "google/gemma-3": "Gemma3ForCausalLM",
    "Qwen/Qwen2.5": "Qwen2ForCausalLM",
}
"""Architecture by the beginning of the hub name; Llama's for all others (phi-4 has its dimensions and layout)."""

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "MixtralForCausalLM": "mixtral",
    "Gemma3ForCausalLM": "gemma3_text",
}


EXTRA_KEYS: dict[str, dict[str, Any]] = {
    # openai/gpt-oss-20b config.json
    "GptOssForCausalLM": {
        "attention_bias": True,
        "initial_context_length": 4096,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    # deepseek-ai/DeepSeek-V3 config.json: latent 512 + rope 64 = 576 cached values
    "DeepseekV3ForCausalLM": {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    },
    # Qwen/Qwen3-235B-A22B config.json
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
}
"""What an architecture needs beyond the dimensions, from the published configuration named."""


def architecture(model: ServedModel) -> str:
    """Class name that engines know the model by."""
    for prefix, name in ARCHITECTURES.items():
        if model.hub_name.startswith(prefix):
            return "Qwen3MoeForCausalLM" if name == "Qwen3ForCausalLM" and model.experts else name
    return "LlamaForCausalLM"


def model_config(model: ServedModel, num_layers: int | None = None) -> dict[str, Any]:
    """Keys of ``config.json``. ``num_layers``: truncate to so many layers (the first ones)."""
    layers = model.num_layers if num_layers is None else num_layers
    name = architecture(model)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_context_tokens,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if name == "DeepseekV3ForCausalLM":
        # Heads have two sizes there, and engines derive what they need from the rope and nope parts.
        config["v_head_dim"] = config.pop("head_dim")
    return config | _expert_keys(model, name) | _attention_keys(model, layers) | EXTRA_KEYS.get(name, {})


def _expert_keys(model: ServedModel, name: str) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    count = {"GptOssForCausalLM": "num_local_experts", "MixtralForCausalLM": "num_local_experts"}
    keys: dict[str, Any] = {
        count.get(name, "num_experts"): experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
    }
    if name == "GptOssForCausalLM":
        keys["experts_per_token"] = experts.experts_per_token
    if name == "DeepseekV3ForCausalLM":
        keys |= {
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.num_shared_experts,
            "first_k_dense_replace": experts.num_dense_layers,
        }
    return keys


def _attention_keys(model: ServedModel, layers: int) -> dict[str, Any]:
    kinds = model.attention_kinds[:layers]
    keys: dict[str, Any] = {}
    if AttentionKind.SLIDING in kinds:
        keys["sliding_window"] = model.window_tokens
        keys["layer_types"] = [
            "sliding_attention" if kind is AttentionKind.SLIDING else "full_attention" for kind in kinds
        ]
    return keys


def write_model_config(model: ServedModel, folder: Path, num_layers: int | None = None) -> Path | None:
    """Write ``config.json`` into ``folder``; returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(model_config(model, num_layers), indent=1, sort_keys=True), encoding="utf-8")
    return path
