"""A small Llama with random weights, for trying caches where no trained model is at hand.

Its text means nothing. Its bytes, its speed and the errors of its attention are real.
"""

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END = "<end>"


def stand_in_model(
    *,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PreTrainedModel:
    """The model; the same for the same arguments, whatever else draws random numbers."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(4.0)  # random queries and keys attend almost uniformly otherwise
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any text, both ways without loss."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, clean_up_tokenization_spaces=False)
