"""Tiny random models of every supported family."""

import torch
import transformers as T
from transformers import PreTrainedModel

import kvsketch

VOCABULARY = 97
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"] * 2


def _config(cls, **given):
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    } | given
    return cls(**{name: value for name, value in options.items() if name != "head_dim" or value is not None})


def _rope(**parameters):
    return {"rope_theta": 10000.0, **parameters}


LLAMA3_ROPE = _rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN_ROPE = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OSS_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}

FAMILIES = {
    "llama": lambda: T.LlamaForCausalLM(_config(T.LlamaConfig)),
    "llama_mha": lambda: T.LlamaForCausalLM(_config(T.LlamaConfig, num_key_value_heads=8)),
    "llama_llama3_rope": lambda: T.LlamaForCausalLM(_config(T.LlamaConfig, rope_parameters=LLAMA3_ROPE)),
    "llama_yarn": lambda: T.LlamaForCausalLM(_config(T.LlamaConfig, rope_parameters=YARN_ROPE)),
    "mistral_full": lambda: T.MistralForCausalLM(_config(T.MistralConfig, sliding_window=None)),
    "qwen2": lambda: T.Qwen2ForCausalLM(_config(T.Qwen2Config)),
    "qwen3": lambda: T.Qwen3ForCausalLM(_config(T.Qwen3Config)),
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(_config(T.Qwen3MoeConfig, **MOE)),
    "gemma2": lambda: T.Gemma2ForCausalLM(
        _config(T.Gemma2Config, sliding_window=16, query_pre_attn_scalar=16, attn_logit_softcapping=5.0)
    ),
    "gemma3": lambda: T.Gemma3ForCausalLM(
        _config(T.Gemma3TextConfig, sliding_window=16, query_pre_attn_scalar=16, layer_types=SLIDING_THEN_FULL)
    ),
    "phi3": lambda: T.Phi3ForCausalLM(_config(T.Phi3Config, head_dim=None, num_attention_heads=4)),
    "glm4": lambda: T.Glm4ForCausalLM(_config(T.Glm4Config)),
    "olmo2": lambda: T.Olmo2ForCausalLM(_config(T.Olmo2Config, head_dim=None)),
    "granite": lambda: T.GraniteForCausalLM(_config(T.GraniteConfig, head_dim=None)),
    "smollm3": lambda: T.SmolLM3ForCausalLM(_config(T.SmolLM3Config)),
    "gpt_oss": lambda: T.GptOssForCausalLM(
        _config(T.GptOssConfig, sliding_window=16, rope_parameters=_rope(rope_type="default"), **OSS_MOE)
    ),
    "cohere2": lambda: T.Cohere2ForCausalLM(_config(T.Cohere2Config, sliding_window=16)),
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
QWEN_MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
GEMMA4 = {
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
    "layer_types": SLIDING_THEN_FULL, "sliding_window": 16, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
# Layers with convolutions or linear attention between those with attention, or in them.
HYBRIDS = {
    "lfm2": lambda: T.Lfm2ForCausalLM(
        _config(T.Lfm2Config, head_dim=None, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3)
    ),
    "qwen3_next": lambda: T.Qwen3NextForCausalLM(
        _config(T.Qwen3NextConfig, **LINEAR, **QWEN_MOE, shared_expert_intermediate_size=32)
    ),
    "falcon_h1": lambda: T.FalconH1ForCausalLM(
        _config(T.FalconH1Config, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
    ),
}
WIDE = {"gemma4": lambda: T.Gemma4ForCausalLM(_config(T.Gemma4TextConfig, **GEMMA4))}  # full layers have other heads
NO_FULL_LAYER = {"mistral_sliding": lambda: T.MistralForCausalLM(_config(T.MistralConfig, sliding_window=16))}
REFUSED = {
    "deepseek_v3": lambda: T.DeepseekV3ForCausalLM(
        _config(
            T.DeepseekV3Config,
            head_dim=None,
            num_key_value_heads=8,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=4,
            moe_intermediate_size=32,
            n_shared_experts=1,
        )
    ),
    "bloom": lambda: T.BloomForCausalLM(_config(T.BloomConfig, n_layer=2, n_head=4)),
    "recurrent_gemma": lambda: T.RecurrentGemmaForCausalLM(_config(T.RecurrentGemmaConfig, attention_window_size=32)),
    "mamba2": lambda: T.Mamba2ForCausalLM(
        T.Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=8
        )
    ),
}
EVERY = FAMILIES | HYBRIDS | WIDE | NO_FULL_LAYER | REFUSED
PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")


def build(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    layers: int | None = None,
):
    """A model of the family, or its first layers; queries and keys are sharpened: random ones attend almost alike."""
    torch.manual_seed(seed)
    model: PreTrainedModel = EVERY[family]()
    if layers is not None:
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in PROJECTIONS):
                parameter.mul_(8)
            if name.endswith("sinks"):
                parameter.normal_()
    model.set_attn_implementation(attention or exact_attention_of(family))
    return model


def attached(family: str):
    """A model of the family that computes attention with kvsketch."""
    model = build(family)
    kvsketch.attach(model)
    return model


def exact_attention_of(family: str) -> str:
    """The stock attention that computes the family right: some leave out soft-capping or sinks in sdpa."""
    return "eager" if family in ("gemma2", "gpt_oss") else "sdpa"


def longrope_phi3(limit: int = 32) -> PreTrainedModel:
    """A Phi-3 that switches its rotary frequencies after `limit` tokens."""
    rope = _rope(
        rope_type="longrope",
        short_factor=[1.0] * 8,
        long_factor=[1.0 + 0.7 * i for i in range(8)],
        original_max_position_embeddings=limit,
        factor=32.0,
    )
    torch.manual_seed(0)
    config = _config(
        T.Phi3Config,
        head_dim=None,
        num_attention_heads=4,
        original_max_position_embeddings=limit,
        rope_parameters=rope,
    )
    return T.Phi3ForCausalLM(config).eval()


def dynamic_llama(limit: int = 32) -> PreTrainedModel:
    """A Llama that rescales its rotary frequencies with every length beyond `limit`."""
    torch.manual_seed(0)
    rope = _rope(rope_type="dynamic", factor=4.0)
    return T.LlamaForCausalLM(_config(T.LlamaConfig, max_position_embeddings=limit, rope_parameters=rope)).eval()


def tokens(rows: int, count: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, none of them padding."""
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))
