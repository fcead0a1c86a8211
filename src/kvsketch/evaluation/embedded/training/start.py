"""The embedded model before training: a plain Llama whose first layers already look for what repeats.

Every block is the stock one. A token's code has two parts, each in a slice of the embedding: one to match tokens by,
both to tell which token it is. Layer 0 starts as shift heads: through constant biases of queries and keys, head h
attends to the token h + 1 back, and copies the first part of its code into a slice of its own. Layer 1 starts as
matching heads: a query made of the codes at some offsets meets keys made, through the same random projection, of the
codes at others, so that a token is found that came behind what is at hand, and its code is handed to the output.
Layer 2 starts with heads for what takes two steps: the next of several values, and chains of variables. All weights can
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvsketch.evaluation.embedded.training.tokenizer import ASSIGNED, NEEDLE, SEVERAL, alike, token_of

SHIFT = 8.0  # size of the constant keys and queries of the shift heads: enough for one offset to take it all
SLOW, FAST = 3e-4, 6e-3  # turns from one token to the next: slower pairs match at any distance, those between tell it
LINK = 5  # the offset whose slice is for links from layer 1 on
PREFERENCE = 9.0  # size of constants that prefer early or late tokens: matters among those that match alike
LOUD = 10.0  # how much stronger than others a query is that a single token calls for
FOLLOWED, NAMED = 3.0, 2.0  # how loud it is what came behind the tokens at hand, and behind a name
LINKED, LISTED = 3.0, 2.0  # how loud links are, and what is found by them
NEARER = (1.0, 1.0, 1.0, 1.0, 0.7, 0.6, 0.5)  # what came before a name differs, where the name is the same
SHARPNESS = 2.8  # size of the projections that match: enough for a name of two tokens to stand out among thousands


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model."""

    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 4
    intermediate: int = 512
    theta: float = 1e9  # so large that most pairs of dimensions hardly turn over a long document
    offsets: int = 7  # tokens that layer 0 looks back
    code: int = 18  # dimensions of a token's code that it is matched by: slices for it, each offset, and what is found
    rest: int = 46  # those that only tell which token it is: slices for it and what is found

    def __post_init__(self) -> None:
        if self.layers < 3 or self.kv_heads != 4 or not len(NEARER) == self.offsets <= self.heads:
            raise ValueError(
                f"the start needs 3 layers or more, 4 KV heads, {len(NEARER)} offsets and a head for each, got "
                f"{self.layers}, {self.kv_heads}, {self.offsets} and {self.heads}"
            )
        if self.found_rest.stop > self.hidden or self.code + self.rest > self.head_dim:
            raise ValueError(
                f"codes of {self.code} and {self.rest} numbers take {self.found_rest.stop} dimensions, of which there "
                f"are {self.hidden}, and {self.code + self.rest} of a head, which has {self.head_dim}"
            )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def at(self, offset: int) -> slice:
        """The slice of the code of the token so many back."""
        return slice(offset * self.code, (offset + 1) * self.code)

    @property
    def found(self) -> slice:
        """The slice of the code of the token that is expected next."""
        return self.at(self.offsets + 1)

    @property
    def own_rest(self) -> slice:
        """The slice of the rest of a token's own code."""
        return slice(self.found.stop, self.found.stop + self.rest)

    @property
    def found_rest(self) -> slice:
        """The slice of the rest of the code of the token that is expected next."""
        return slice(self.own_rest.stop, self.own_rest.stop + self.rest)

    @property
    def turns(self) -> Tensor:
        """By how much each pair of dimensions turns from one token to the next."""
        return self.theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)


def start_model(tokenizer: PreTrainedTokenizerFast, *, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """The model to train, the same for the same seed."""
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
        _shift_heads(model.model.layers[0], shape)
        known = {text: codes[token_of(tokenizer, text), : shape.code] for text in (ASSIGNED, NEEDLE, SEVERAL)}
        _matching_heads(model.model.layers[1], known, shape)
        _chain_heads(model.model.layers[2], known, shape)
        _read_what_was_found(model, shape, codes)
    return model


def _spread_weights(model: LlamaForCausalLM, shape: Shape) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(projection.weight, std=shape.hidden**-0.5)
        nn.init.normal_(attention.o_proj.weight, std=2 * shape.hidden**-0.5 / (2 * shape.layers) ** 0.5)


def _embed_codes(model: LlamaForCausalLM, shape: Shape, groups: Sequence[Sequence[int]]) -> Tensor:
    """Random codes, in two slices of the embedding, none in the others; the same for tokens of a group.

    All codes to match by are of one length: no token is found more easily than another.
    """
    table = model.model.embed_tokens.weight
    table.zero_()
    width = shape.code + shape.rest
    codes = torch.randn(len(table), width)
    codes[:, : shape.code] *= shape.code**0.5 / codes[:, : shape.code].norm(dim=1, keepdim=True)
    codes *= (shape.hidden / width) ** 0.5
    for tokens in groups:
        codes[list(tokens)] = codes[tokens[0]].clone()
    table[:, shape.at(0)], table[:, shape.own_rest] = codes.split((shape.code, shape.rest), dim=1)
    return codes


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


def _matching_heads(layer: Any, known: Mapping[str, Tensor], shape: Shape) -> None:
    """KV heads that find what came behind what is at hand, what behind a name, the next name of a list, and links.

    A link: where the second value of a name begins, how its first one goes on. So values follow one another, and the
    next layer can list them.
    """
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.mul_(0.02)
    follows = [(offset, offset + 1, weight) for offset, weight in zip(range(shape.offsets), NEARER, strict=True)]
    named = [(0, 1, 0.5), (1, 2, 0.5), (2, 3, 2.0), (3, 4, 2.0)]  # what came behind a name of two tokens, and two more
    listed = [(0, 1, 1.0), (6, 2, 1.0), (7, 3, 1.0)]  # the name before the last number, and what came after it
    linked = [(1, 2, 0.5), (2, 3, 0.5), (3, 4, 2.0), (4, 5, 2.0)]
    _match(attention, 0, follows, shape)
    _hand_on_token(attention, 0, shape, gain=FOLLOWED)
    _match(attention, 1, named, shape)
    _prefer(attention, 1, -1.0, _between(shape), shape)  # several times: the first
    _hand_on_token(attention, 1, shape, gain=NAMED)
    projections = _match(attention, 2, listed, shape)
    _begin_list(attention, 2, projections[0], known, shape)
    _hand_on_token(attention, 2, shape, gain=1.0)
    _match(attention, 3, linked, shape)
    _prefer(attention, 3, 1.0, _between(shape), shape)  # the last
    _hand_on(attention, 3, shape.at(0), shape.at(LINK), shape, gain=LINKED)


def _chain_heads(layer: Any, known: Mapping[str, Tensor], shape: Shape) -> None:
    """One KV head finds a name's next value, one goes on in a chain of variables, one finds its first variable."""
    attention, kv = layer.self_attn, 3 * shape.head_dim
    wide = kv * shape.group
    for weight in (attention.q_proj.weight[:wide], attention.k_proj.weight[:kv], attention.v_proj.weight[:kv]):
        weight.mul_(0.02)
    attention.o_proj.weight[:, :wide].mul_(0.02)
    # the value of the name at hand that is linked to the one last said, "B is 520 279 8, B is" before it
    _match(attention, 0, [(6, LINK, 1.0), (2, 3, 2.0), (3, 4, 2.0)], shape)
    _prefer(attention, 0, -0.3, _between(shape), shape)  # where none was said yet: the first
    _hand_on_token(attention, 0, shape, gain=LISTED)
    _match(attention, 1, [(0, 0, 1.0), (1, 1, 0.5)], shape)  # the variable last said, where another one is set to it
    _expect(attention, 1, 2, known[ASSIGNED], shape)
    _hand_on(attention, 1, shape.at(3), shape.found, shape)
    _match(attention, 2, [(3, 0, 1.0), (4, 1, 1.0)], shape)  # the number that was asked for, where a variable is it
    _expect(attention, 2, 3, known[ASSIGNED], shape)
    _hand_on(attention, 2, shape.at(4), shape.found, shape)


def _match(attention: Any, kv_head: int, pairs: Sequence[tuple[int, int, float]], shape: Shape) -> list[Tensor]:
    """Queries of a KV head's group meet its keys where slices of theirs agree, each pair with its weight."""
    d, group = shape.head_dim, shape.group
    rooms, projections = _rooms(shape, len(pairs)), list[Tensor]()
    for (query_offset, key_offset, weight), room in zip(pairs, rooms, strict=True):
        projections.append(room * weight**0.5)
        attention.k_proj.weight[kv_head * d : (kv_head + 1) * d, shape.at(key_offset)] += projections[-1]
        for head in range(kv_head * group, (kv_head + 1) * group):
            attention.q_proj.weight[head * d : (head + 1) * d, shape.at(query_offset)] += projections[-1]
    return projections


def _begin_list(attention: Any, kv_head: int, projection: Tensor, known: Mapping[str, Tensor], shape: Shape) -> None:
    """Where several answers are to come, a KV head's last query head finds what the last needle or question names."""
    d, several = shape.head_dim, known[SEVERAL]
    head = (kv_head + 1) * shape.group - 1
    latest = _between(shape) * PREFERENCE
    attention.k_proj.bias[kv_head * d : (kv_head + 1) * d] += latest
    wanted = LOUD * (projection @ known[NEEDLE]) + LOUD / 3 * latest
    attention.q_proj.weight[head * d : (head + 1) * d, shape.at(0)] += torch.outer(
        wanted, several / several.square().sum()
    )


def _expect(attention: Any, kv_head: int, key_offset: int, code: Tensor, shape: Shape) -> None:
    """A KV head's keys are met where a slice of theirs is this code, whatever the query."""
    d, group = shape.head_dim, shape.group
    projection = torch.randn(d, shape.code) * _projected(shape, 2)
    attention.k_proj.weight[kv_head * d : (kv_head + 1) * d, shape.at(key_offset)] += projection
    for head in range(kv_head * group, (kv_head + 1) * group):
        attention.q_proj.bias[head * d : (head + 1) * d] += projection @ code


def _prefer(attention: Any, kv_head: int, sign: float, dimensions: Tensor, shape: Shape) -> None:
    """Whatever the tokens are, a KV head's logits fall with the distance, or rise, as these dimensions turn."""
    constant = dimensions * PREFERENCE
    d = shape.head_dim
    attention.k_proj.bias[kv_head * d : (kv_head + 1) * d] += constant
    for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
        attention.q_proj.bias[head * d : (head + 1) * d] += sign * constant


def _between(shape: Shape) -> Tensor:
    """The dimensions that tell near from far: of each pair that turns neither fast nor slowly the first."""
    found = (shape.turns > SLOW) & (shape.turns < FAST)
    return torch.cat([found.float(), torch.zeros(shape.head_dim // 2)])


def _rooms(shape: Shape, count: int) -> list[Tensor]:
    """Projections of a slice, each into dimensions of its own where there are enough."""
    scale = _projected(shape, count)
    slow = scale[:, 0].nonzero()[:, 0]
    wide = len(slow) // count
    if wide < 9:
        return [torch.randn(shape.head_dim, shape.code) * scale for _ in range(count)]
    turned, found = torch.linalg.qr(torch.randn(len(slow), len(slow))).Q, []
    for number in range(count):
        inner = torch.linalg.qr(torch.randn(shape.code, min(wide, shape.code))).Q.T
        room = torch.zeros(shape.head_dim, shape.code)
        room[slow] = (
            turned[:, number * wide : number * wide + len(inner)] @ inner * (shape.code * len(slow) / len(inner)) ** 0.5
        )
        found.append(room * scale)
    return found


def _projected(shape: Shape, slices: int) -> Tensor:
    """The size of a projection, by dimension: only these still match over thousands of tokens."""
    slow = (shape.turns < SLOW).repeat(2)[:, None]
    return slow * SHARPNESS * (len(slow) / slow.sum()) ** 0.25 / (slices * shape.code) ** 0.5


def _hand_on_token(attention: Any, kv_head: int, shape: Shape, gain: float) -> None:
    """The whole code of the token that was found is what is expected next."""
    _hand_on(attention, kv_head, shape.at(0), shape.found, shape, gain=gain)
    _hand_on(attention, kv_head, shape.own_rest, shape.found_rest, shape, place=shape.code, gain=gain)


def _hand_on(
    attention: Any, kv_head: int, what: slice, to: slice, shape: Shape, place: int = 0, gain: float = 1.0
) -> None:
    """A slice of the token that was found goes into a slice, by way of some dimensions of the heads."""
    d, size = shape.head_dim, what.stop - what.start
    start = kv_head * d + place
    attention.v_proj.weight[start : start + size, what] += torch.eye(size)
    for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
        start = head * d + place
        attention.o_proj.weight[to, start : start + size] += torch.eye(size) * gain


def _read_what_was_found(model: LlamaForCausalLM, shape: Shape, codes: Tensor) -> None:
    model.lm_head.weight.mul_(0.02)
    for place, part in zip((shape.found, shape.found_rest), codes.split((shape.code, shape.rest), dim=1), strict=True):
        model.lm_head.weight[:, place] += part * 0.3
