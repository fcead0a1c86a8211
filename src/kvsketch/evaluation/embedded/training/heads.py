"""Heads of the embedded model that match tokens before any training, so that a layer finds what repeats.

First come the heads of layers 1 and 2; then how queries are made to match keys, and how the token found is handed on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsketch.evaluation.embedded.training.shape import COMPARED, MARKED, NEARER, Shape
from kvsketch.evaluation.embedded.training.tokenizer import ASSIGNED, NEEDLE, PLACES, SEVERAL, VALUE

SLOW, FAST = 3e-4, 6e-3  # turns per token: slower pairs match at any distance, pairs between tell the distance
PREFERENCE = 9.0  # size of constants that prefer early or late tokens; decides among tokens that match equally
LOUD = 10.0  # how much stronger a query is if a single token triggers it
FOLLOWED, NAMED, NEXT = 1.0, 0.67, 0.33  # weight of what followed the latest tokens, a name, a list's item
SHARPNESS = 2.8  # size of projections that match: a name of two tokens must stand out among thousands

# For several values of a name, one after another. First: the values before one, and the value said last.
BEFORE = 5  # from layer 1 on, this offset's slice holds the values before one
LINKED, LATER = 3.0, 6.0  # their weight, and how much more nearer ones count
ALONE = 13.0  # size of query and key that find the first token if there is no value before
SAYING, SAID = 9.0, 3.0  # size of query and key that find places, and the weight of what stands before these
NEAR, NEARNESS = (0.015, 0.05), 15.0  # turns that tell nearer places from earlier ones, and their weight
# Then the next value: weights of names, the colon, values before, and of none before; LISTED: of the value itself.
SAME_NAME, SAME_COLON, SAME_VALUE, NO_VALUE = 2.0, 28.0, 3.0, 20.0
NOTHING = 29.0  # size of query and key that find the first token if there is no next value
LISTED = 2.0


def matching_heads(layer: Any, known: Mapping[str, Tensor], code: Tensor, size: float, shape: Shape) -> None:
    """Three KV heads find what followed the latest tokens, what followed a name, and a list's next name; one links."""
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.mul_(0.02)
    follows = [(offset, offset + 1, weight) for offset, weight in zip(range(shape.offsets), NEARER, strict=True)]
    named = [(0, 1, 0.5), (1, 2, 0.5), (2, 3, 2.0), (3, 4, 2.0)]  # what followed a name of two tokens, and two more
    listed = [(0, 1, 1.0), (6, 2, 1.0), (7, 3, 1.0)]  # the name before the last number, and what followed it
    _match(attention, 0, follows, shape)
    _hand_on_token(attention, 0, shape, gain=FOLLOWED)
    _match(attention, 1, named, shape)
    _hand_on_token(attention, 1, shape, gain=NAMED)
    projections = _match(attention, 2, listed, shape)
    _begin_list(attention, 2, projections[0], known, shape)
    _hand_on_token(attention, 2, shape, gain=NEXT)
    _link(attention, 3, size, shape)
    _say_nothing(attention, 3, code[: shape.code], shape)


def chain_heads(layer: Any, known: Mapping[str, Tensor], first: Tensor, shape: Shape) -> None:
    """One KV head finds a name's next value, one the next variable of a chain, and one its first variable."""
    attention, kv = layer.self_attn, 3 * shape.head_dim
    wide = kv * shape.group
    for weight in (attention.q_proj.weight[:wide], attention.k_proj.weight[:kv], attention.v_proj.weight[:kv]):
        weight.mul_(0.02)
    attention.o_proj.weight[:, :wide].mul_(0.02)
    # the current name's value after the one said last
    _next_value(attention, 0, known[VALUE], shape)
    _hand_on_token(attention, 0, shape, gain=LISTED)
    _say_nothing(attention, 0, first, shape)
    _match(attention, 1, [(0, 0, 1.0), (1, 1, 0.5)], shape)  # finds where another variable is set to the one said last
    _expect(attention, 1, 2, known[ASSIGNED], shape)
    _hand_on(attention, 1, shape.at(3), shape.found, shape)
    _match(attention, 2, [(3, 0, 1.0), (4, 1, 1.0)], shape)  # finds where a variable is set to the number asked for
    _expect(attention, 2, 3, known[ASSIGNED], shape)
    _hand_on(attention, 2, shape.at(4), shape.found, shape)


def _match(attention: Any, kv_head: int, pairs: Sequence[tuple[int, int, float]], shape: Shape) -> list[Tensor]:
    """Have queries of a KV head's group match its keys where tokens at offsets agree, each pair with its weight."""
    return _meet(attention, kv_head, [(shape.at(asked), shape.at(has), weight) for asked, has, weight in pairs], shape)


def _meet(attention: Any, kv_head: int, pairs: Sequence[tuple[slice, slice, float]], shape: Shape) -> list[Tensor]:
    """As `_match`, for any slices; both slices of a pair have one size."""
    d, group = shape.head_dim, shape.group
    rooms, projections = _rooms(shape, [has.stop - has.start for _, has, _ in pairs]), list[Tensor]()
    for (asked, has, weight), room in zip(pairs, rooms, strict=True):
        projections.append(room * weight**0.5)
        attention.k_proj.weight[kv_head * d : (kv_head + 1) * d, has] += projections[-1]
        for head in range(kv_head * group, (kv_head + 1) * group):
            attention.q_proj.weight[head * d : (head + 1) * d, asked] += projections[-1]
    return projections


def _link(attention: Any, kv_head: int, size: float, shape: Shape) -> None:
    """Where a value begins, one query head finds how earlier values of its name go on; another, the value said last.

    The latest match counts most. If several are found, the value after the one said last has that one among the fewest
    others, so it still matches best. If none is found, the head attends to the first token.
    """
    d = shape.head_dim
    kv, linking, saying = kv_head * d, kv_head * shape.group * d, (kv_head * shape.group + 1) * d
    first, place = d - 1, d - 2  # these two dimensions hardly turn
    for (query_offset, key_offset), room in zip([(3, 4), (4, 5)], _rooms(shape, [shape.code] * 2), strict=True):
        attention.k_proj.weight[kv : kv + d, shape.at(key_offset)] += room
        attention.q_proj.weight[linking : linking + d, shape.at(query_offset)] += room
    attention.k_proj.weight[kv + first, shape.mark] = attention.q_proj.weight[linking + first, shape.one] = ALONE
    attention.k_proj.weight[kv + place, shape.said.start + 1 : shape.said.stop] = SAYING
    attention.q_proj.weight[saying + place, shape.one] = SAYING
    for query, latest in ((linking, _between(shape) * LATER), (saying, _between(shape, *NEAR) * NEARNESS)):
        attention.k_proj.bias[kv : kv + d] += latest
        attention.q_proj.bias[query : query + d] += latest
    code = torch.eye(shape.code)
    attention.v_proj.weight[kv : kv + shape.code, shape.at(0)] += code
    attention.o_proj.weight[shape.at(BEFORE), linking : linking + shape.code] += code * LINKED
    kv, linking, saying = kv + shape.code, linking + shape.code, saying + shape.code
    attention.v_proj.weight[kv : kv + shape.code, shape.at(3)] += code
    attention.o_proj.weight[shape.value, saying : saying + COMPARED] += code[:COMPARED, :COMPARED] * SAID
    kv, linking, saying = kv + shape.code, linking + shape.code, saying + shape.code
    attention.v_proj.weight[kv, shape.mark] = size / MARKED
    attention.o_proj.weight[shape.share, linking] = 1.0
    for number in range(len(PLACES)):
        attention.v_proj.weight[kv + 1 + number, shape.said.start + number] = 2 / MARKED
        attention.o_proj.weight[shape.said.start + number, saying + 1 + number] = 1.0


def _next_value(attention: Any, kv_head: int, code: Tensor, shape: Shape) -> None:
    """Find the current name's value after the one said last, or its first value if none was said.

    A head that finds nothing rests on the first token.
    """
    value, before = shape.value, slice(shape.at(BEFORE).start, shape.at(BEFORE).start + COMPARED)
    pairs = [(shape.at(2), shape.at(3), SAME_NAME), (shape.at(3), shape.at(4), SAME_NAME), (value, before, SAME_VALUE)]
    _meet(attention, kv_head, pairs, shape)
    d = shape.head_dim
    colon = torch.zeros(shape.hidden)
    colon[shape.at(2)] = code / code.square().sum()
    alone, rest = torch.eye(shape.hidden)[shape.share], torch.eye(shape.hidden)[shape.mark]
    for number, (has, size) in enumerate([(colon, SAME_COLON), (alone, NO_VALUE), (rest, NOTHING)]):
        still = d - 1 - number
        attention.k_proj.weight[kv_head * d + still] = has * size
        for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
            attention.q_proj.weight[head * d + still, shape.one] = size


def _say_nothing(attention: Any, kv_head: int, code: Tensor, shape: Shape) -> None:
    """If a head finds the first token, do not hand that token's code on."""
    start = kv_head * shape.head_dim
    attention.v_proj.weight[start : start + len(code), shape.mark] -= code / MARKED


def _begin_list(attention: Any, kv_head: int, projection: Tensor, known: Mapping[str, Tensor], shape: Shape) -> None:
    """Before several answers, have a KV head's last query head find what the last needle or question names."""
    d = shape.head_dim
    head = (kv_head + 1) * shape.group - 1
    latest = _between(shape) * PREFERENCE
    attention.k_proj.bias[kv_head * d : (kv_head + 1) * d] += latest
    wanted = LOUD * (projection @ known[NEEDLE]) + LOUD / 3 * latest
    for text in (SEVERAL, *PLACES):
        attention.q_proj.weight[head * d : (head + 1) * d, shape.at(0)] += torch.outer(
            wanted, known[text] / known[text].square().sum()
        )


def _expect(attention: Any, kv_head: int, key_offset: int, code: Tensor, shape: Shape) -> None:
    """Have a KV head's keys match if a slice of theirs is this code, whatever the query."""
    d, group = shape.head_dim, shape.group
    projection = torch.randn(d, shape.code) * _projected(shape, 2)
    attention.k_proj.weight[kv_head * d : (kv_head + 1) * d, shape.at(key_offset)] += projection
    for head in range(kv_head * group, (kv_head + 1) * group):
        attention.q_proj.bias[head * d : (head + 1) * d] += projection @ code


def _between(shape: Shape, slow: float = SLOW, fast: float = FAST) -> Tensor:
    """The dimensions that tell near from far: the first of each pair that turns neither fast nor slowly."""
    found = (shape.turns > slow) & (shape.turns < fast)
    return torch.cat([found.float(), torch.zeros(shape.head_dim // 2)])


def _rooms(shape: Shape, sizes: Sequence[int]) -> list[Tensor]:
    """Projections of slices, each into dimensions of its own if there are enough; the last three are left free."""
    scale = _projected(shape, len(sizes))
    slow = scale[:-3, 0].nonzero()[:, 0]
    wide = len(slow) // len(sizes)
    if wide < 9:
        return [torch.randn(shape.head_dim, size) * scale for size in sizes]
    turned, found = torch.linalg.qr(torch.randn(len(slow), len(slow))).Q, []
    for number, size in enumerate(sizes):
        inner = torch.linalg.qr(torch.randn(size, min(wide, size))).Q.T
        room = torch.zeros(shape.head_dim, size)
        room[slow] = (
            turned[:, number * wide : number * wide + len(inner)] @ inner * (size * len(slow) / len(inner)) ** 0.5
        )
        found.append(room * scale)
    return found


def _projected(shape: Shape, slices: int) -> Tensor:
    """The size of a projection by dimension; 0 but for those that still match over thousands of tokens."""
    slow = (shape.turns < SLOW).repeat(2)[:, None]
    return slow * SHARPNESS * (len(slow) / slow.sum()) ** 0.25 / (slices * shape.code) ** 0.5


def _hand_on_token(attention: Any, kv_head: int, shape: Shape, gain: float) -> None:
    """Have the whole code of the token that was found be expected next."""
    _hand_on(attention, kv_head, shape.at(0), shape.found, shape, gain=gain)
    _hand_on(attention, kv_head, shape.own_rest, shape.found_rest, shape, place=shape.code, gain=gain)


def _hand_on(
    attention: Any, kv_head: int, what: slice, to: slice, shape: Shape, place: int = 0, gain: float = 1.0
) -> None:
    """Copy a slice of the token that was found into slice `to`, through some dimensions of the heads."""
    d, size = shape.head_dim, what.stop - what.start
    start = kv_head * d + place
    attention.v_proj.weight[start : start + size, what] += torch.eye(size)
    for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
        start = head * d + place
        attention.o_proj.weight[to, start : start + size] += torch.eye(size) * gain
