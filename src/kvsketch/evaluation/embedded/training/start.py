"""The embedded model before training: a plain Llama whose first layers already look for what repeats.

Every block is the stock one. A token's code has two parts, each in a slice of the embedding: the first is used to match
tokens, and both together identify the token. Layer 0 starts as shift heads: through constant biases of queries and
keys, head h attends to the token h + 1 back, and copies the first part of its code into a slice of its own. Layer 1
starts as matching heads: a query made from the codes at some offsets matches keys made from the codes at others,
through the same random projection. So a head finds a token that followed the latest tokens earlier in the text, and
hands its code to the output. One head links the beginning of a value to the earlier values of its name. Layer 2 starts
with heads for what takes two steps: a name's value after the one said last, and chains of variables. All weights can
change. `heads.py` makes the heads of layers 1 and 2; `shape.py` says what each slice is for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvsketch.evaluation.embedded.training.heads import chain_heads, matching_heads
from kvsketch.evaluation.embedded.training.shape import COMPARED, MARKED, Shape
from kvsketch.evaluation.embedded.training.tokenizer import (
    ASSIGNED,
    BEGIN,
    NEEDLE,
    PLACES,
    SEVERAL,
    VALUE,
    alike,
    token_of,
)

SHIFT = 8.0  # size of the shift heads' constant keys and queries: large enough that one offset gets all attention
READ, QUIET = 0.9, 0.33  # weights of all that was found, and of later layers' outputs at first


def start_model(tokenizer: PreTrainedTokenizerFast, *, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """The model to train; the same seed gives the same model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        _spread_weights(model, shape)
        codes = _embed_codes(model, shape, alike(tokenizer))
        first = tokenizer.convert_tokens_to_ids(BEGIN)
        _mark(model, first, [token_of(tokenizer, text) for text in PLACES], shape)
        _shift_heads(model.model.layers[0], shape)
        known = {
            text: codes[token_of(tokenizer, text), : shape.code] for text in (ASSIGNED, NEEDLE, SEVERAL, VALUE, *PLACES)
        }
        matching_heads(model.model.layers[1], known, codes[first], _size_after_shifts(model, first), shape)
        chain_heads(model.model.layers[2], known, codes[first], shape)
        _read_what_was_found(model, shape, codes)
    return model


def _spread_weights(model: LlamaForCausalLM, shape: Shape) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(projection.weight, std=shape.hidden**-0.5)
        nn.init.normal_(attention.o_proj.weight, std=2 * shape.hidden**-0.5 / (2 * shape.layers) ** 0.5)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight *= QUIET
        layer.mlp.down_proj.weight *= QUIET


def _embed_codes(model: LlamaForCausalLM, shape: Shape, groups: Sequence[Sequence[int]]) -> Tensor:
    """Put random codes into two slices of the embedding, and 0 elsewhere; tokens of a group share a code.

    All codes have the same length, so that no token is found more easily than another.
    """
    table = model.model.embed_tokens.weight
    table.zero_()
    width = shape.code + shape.rest
    codes = torch.randn(len(table), width)
    for part in codes.split((COMPARED, shape.code - COMPARED, shape.rest), dim=1):
        part.mul_(part.shape[1] ** 0.5 / part.norm(dim=1, keepdim=True))
    codes *= (shape.hidden / width) ** 0.5
    for tokens in groups:
        codes[list(tokens)] = codes[tokens[0]].clone()
    table[:, shape.at(0)], table[:, shape.own_rest] = codes.split((shape.code, shape.rest), dim=1)
    return codes


def _mark(model: LlamaForCausalLM, first: int, places: Sequence[int], shape: Shape) -> None:
    """Mark the first token, so that heads can rest on it and say nothing, and mark each place."""
    table = model.model.embed_tokens.weight
    table[:, shape.one] = 1
    table[first, shape.mark] = MARKED
    table[list(places), shape.said] = torch.eye(len(places)) * MARKED


def _shift_heads(layer: Any, shape: Shape) -> None:
    attention, d, half = layer.self_attn, shape.head_dim, shape.head_dim // 2
    group, turns = shape.group, shape.turns
    identity = torch.eye(shape.code)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(0.05)
    for projection in (attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    attention.v_proj.bias.zero_()
    scale = (shape.hidden / shape.code) ** 0.5 * 0.3
    for head in range(shape.offsets):
        one, kv = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
        attention.k_proj.bias[kv] = torch.cat([torch.full((half,), SHIFT), torch.zeros(half)])
        angles = -turns * (head + 1)
        attention.q_proj.bias[one] = SHIFT * torch.cat([angles.cos(), angles.sin()])
        attention.v_proj.weight[kv.start : kv.start + shape.code, : shape.code] = identity
        attention.o_proj.weight[shape.at(head + 1), one.start : one.start + shape.code] = identity * scale
    layer.mlp.down_proj.weight.mul_(0.1)


def _size_after_shifts(model: LlamaForCausalLM, first: int) -> float:
    """The number by which a layer's norm divides the first token after the shift heads."""
    hidden = model.model(torch.tensor([[first]]), output_hidden_states=True).hidden_states[1]
    return float(hidden.square().mean().sqrt())


def _read_what_was_found(model: LlamaForCausalLM, shape: Shape, codes: Tensor) -> None:
    model.lm_head.weight.mul_(0.02)
    for place, part in zip((shape.found, shape.found_rest), codes.split((shape.code, shape.rest), dim=1), strict=True):
        model.lm_head.weight[:, place] += part * READ
