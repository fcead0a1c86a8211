"""The embedded model before training: a plain Llama whose first two layers already look for what repeats.

Every block is the stock one. Layer 0 starts as shift heads: through constant biases of queries and keys, head h attends
to the token h + 1 back, and copies its code into a slice of its own. Layer 1 starts as a matching head: a query made of
the codes at offsets 0..7 meets keys made, through the same random projection, of the codes at offsets 1..8, so that a
token is found whose predecessors are the ones at hand, and its code is handed to the output. All weights can change.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SHIFT = 8.0  # size of the constant keys and queries of the shift heads: enough for one offset to take it all


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model."""

    hidden: int = 256
    heads: int = 8  # of layer 0: one for each offset that it looks back
    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 4
    intermediate: int = 512
    theta: float = 1e9  # so large that most pairs of dimensions hardly turn over a long document
    code: int = 23  # dimensions of a token's code: a slice for itself, each offset, the match, and the one before it

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def match(self) -> int:
        """The slice of the token that is expected next: behind those of the token itself and of all offsets."""
        return self.heads + 1

    @property
    def last_time(self) -> int:
        """The slice of the token that stood here the last time that these tokens came before."""
        return self.heads + 2

    @property
    def turns(self) -> Tensor:
        """By how much each pair of dimensions turns from one token to the next."""
        return self.theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)


def start_model(vocabulary: int, *, shape: Shape, begin: int, end: int, pad: int, seed: int = 0) -> LlamaForCausalLM:
    """The model to train; the same for the same seed."""
    config = LlamaConfig(
        vocab_size=vocabulary,
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
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        _spread_weights(model, shape)
        codes = _embed_codes(model, shape)
        _shift_heads(model.model.layers[0], shape)
        _matching_heads(model.model.layers[1], shape)
        _list_head(model.model.layers[2], shape)
        _read_the_match(model, shape, codes)
    return model


def _spread_weights(model: LlamaForCausalLM, shape: Shape) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(projection.weight, std=shape.hidden**-0.5)
        nn.init.normal_(attention.o_proj.weight, std=2 * shape.hidden**-0.5 / (2 * shape.layers) ** 0.5)


def _embed_codes(model: LlamaForCausalLM, shape: Shape) -> Tensor:
    """Random codes in the first slice of the embedding, none in the others."""
    table = model.model.embed_tokens.weight
    table.zero_()
    table[:, : shape.code] = torch.randn(len(table), shape.code) * (shape.hidden / shape.code) ** 0.5
    return table[:, : shape.code]


def _slice(offset: int, shape: Shape) -> slice:
    return slice(offset * shape.code, (offset + 1) * shape.code)


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
    for head in range(shape.heads):
        one, kv = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
        attention.k_proj.bias[kv] = torch.cat([torch.full((half,), SHIFT), torch.zeros(half)])
        angles = -turns * (head + 1)
        attention.q_proj.bias[one] = SHIFT * torch.cat([angles.cos(), angles.sin()])
        attention.v_proj.weight[kv.start : kv.start + shape.code, : shape.code] = identity
        attention.o_proj.weight[_slice(head + 1, shape), one.start : one.start + shape.code] = identity * scale
    layer.mlp.down_proj.weight.mul_(0.1)


def _matching_heads(layer: Any, shape: Shape) -> None:
    """Two KV heads find what came next, one finds the next of a list, one what stood here the last time."""
    attention, offsets = layer.self_attn, shape.heads
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.mul_(0.02)
    follows = [(offset, offset + 1, 1.0) for offset in range(offsets)]
    listed = [(0, 1, 1.0), (6, 2, 1.0), (7, 3, 1.0)]  # the name before the last number, and what came after it
    again = [(0, 0, -float(offsets)), *((offset, offset, 1.0) for offset in range(1, offsets + 1))]  # but not itself
    for kv_head, pairs in enumerate((follows, follows, listed, again)):
        _match(attention, kv_head, pairs, shape)
        _hand_on(attention, kv_head, shape.last_time if pairs is again else shape.match, shape)


def _list_head(layer: Any, shape: Shape) -> None:
    """A KV head that goes on in a list of numbers: it finds the number that has the last one before it."""
    attention, d, wide = layer.self_attn, shape.head_dim, shape.group * shape.head_dim
    for weight in (attention.q_proj.weight[:wide], attention.k_proj.weight[:d], attention.v_proj.weight[:d]):
        weight.mul_(0.02)
    attention.o_proj.weight[:, :wide].mul_(0.02)
    _match(attention, 0, [(4, shape.last_time, 1.0)], shape)  # the first piece of the last number stands four back
    _hand_on(attention, 0, shape.match, shape)


def _match(attention: Any, kv_head: int, pairs: list[tuple[int, int, float]], shape: Shape) -> None:
    """Queries of a KV head's group meet its keys where slices of theirs agree, each pair with its weight."""
    d, group = shape.head_dim, shape.group
    slow = (shape.turns < 3e-4).repeat(2)[:, None]  # only these dimensions still match over thousands of tokens
    scale = 2.0 * (len(slow) / slow.sum()) ** 0.25 / (min(len(pairs), shape.heads) * shape.code) ** 0.5
    for query_offset, key_offset, weight in pairs:
        projection = torch.randn(d, shape.code) * scale * slow * abs(weight) ** 0.5
        attention.k_proj.weight[kv_head * d : (kv_head + 1) * d, _slice(key_offset, shape)] += projection
        for head in range(kv_head * group, (kv_head + 1) * group):
            signed = projection if weight > 0 else -projection
            attention.q_proj.weight[head * d : (head + 1) * d, _slice(query_offset, shape)] += signed


def _hand_on(attention: Any, kv_head: int, to: int, shape: Shape) -> None:
    """The code of the token that was found goes into a slice."""
    out = _slice(to, shape)
    d, identity = shape.head_dim, torch.eye(shape.code)
    attention.v_proj.weight[kv_head * d : kv_head * d + shape.code, : shape.code] += identity
    for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
        attention.o_proj.weight[out, head * d : head * d + shape.code] += identity


def _read_the_match(model: LlamaForCausalLM, shape: Shape, codes: Tensor) -> None:
    model.lm_head.weight.mul_(0.02)
    model.lm_head.weight[:, _slice(shape.match, shape)] += codes * 0.3
