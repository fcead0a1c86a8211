"""Shares that a prompt sets itself: one threshold over the scores of all layers and heads, row by row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.caches.core.budget import Budget, most_share
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.shares import THRESHOLD, filled
from kvsketch.caches.forgetting.noted import ByAttention, NotedConfig
from kvsketch.kernels.distances import rounded

ROUNDING = 1e-6  # of an entry, so that rounding does not make a number of entries one less


def sets_shares(config: MethodConfig) -> TypeGuard[NotedConfig]:
    """Whether a prompt itself says how heads share the budget."""
    return isinstance(config, NotedConfig) and config.heads == THRESHOLD


def shares_of_prompt(
    config: NotedConfig, holding: Sequence[LayerCache], budgets: Sequence[Budget]
) -> list[list[list[float]]]:
    """For each layer the shares of each row's KV heads, so that the best scores of all layers and heads are kept.

    `holding` are layers that hold the whole prompt, with notes, and `budgets` what a head of each may hold on
    average. If layers have keys of different widths, it is bytes that they share. Of equal scores those of lower layers
    come first, then those of lower heads, then earlier tokens. Heads of all processes are compared, and get their
    shares.
    """
    rows = [_of_row(config, holding, budgets, row) for row in range(len(holding[0].lengths))]
    return [[row[layer] for row in rows] for layer in range(len(holding))]


def _of_row(
    config: NotedConfig, holding: Sequence[LayerCache], budgets: Sequence[Budget], row: int
) -> list[list[float]]:
    budgets = [replace(budget, beside=holding[0].spans[row].beside(config.sinks)) for budget in budgets]
    scores = [
        held.part.gather(leaving_scores(config, held, row, budget))
        for held, budget in zip(holding, budgets, strict=True)
    ]
    rooms = [config.room(budget, own.shape[1]) for budget, own in zip(budgets, scores, strict=True)]
    chosen = [room - config.means(room, own.shape[1]) for room, own in zip(rooms, scores, strict=True)]
    widths = [held.kind[1] if held.kind is not None else 1 for held in holding]
    if not all(chosen) or all(own.shape[1] <= room for own, room in zip(scores, rooms, strict=True)):
        return [[1.0] * len(own) for own in scores]  # there is nothing to choose
    every = rounded(torch.cat([own.flatten() for own in scores]), ByAttention.bits)
    sizes = torch.cat(
        [own.new_full((own.numel(),), width, dtype=torch.int64) for own, width in zip(scores, widths, strict=True)]
    )
    order = every.sort(descending=True, stable=True).indices
    total = sum(room * width * len(own) for own, room, width in zip(scores, chosen, widths, strict=True))
    kept = every.new_zeros(len(every), dtype=torch.bool)
    kept[order[sizes[order].cumsum(0) <= total]] = True
    parts = kept.split([own.numel() for own in scores])
    least = config.floor() - config.exact_entries()  # the part of the room that every head has
    beyond = [  # never less than the whole entries that are divided
        max(budget.beyond(config.seen_when(budget, own.shape[1])), room - least)
        for budget, own, room in zip(budgets, scores, rooms, strict=True)
    ]
    wanted = {
        layer: ((part.view(own.shape).sum(1).double() * (room - least) / best + ROUNDING) / mean).tolist()
        for layer, (part, own, mean, room, best) in enumerate(zip(parts, scores, beyond, rooms, chosen, strict=True))
    }
    most = most_share(config.keep)
    if any(share > most for shares in wanted.values() for share in shares):
        wanted = dict(filled(wanted, most, dict(enumerate(widths))))
    return [list(shares) for shares in wanted.values()]


def leaving_scores(config: NotedConfig, held: LayerCache, row: int, budget: Budget) -> Float[Tensor, "h n"]:
    """Scores of the tokens of a row that leave the window for the past when the prompt has been read."""
    length = held.lengths[row]
    window = config.window_size(budget, length - held.spans[row].within(config.sinks, length))
    columns, method = held.window.columns, config.new_method(held.layer)
    ranks, last = columns.ranks[row], config.sinks + config.leave(length, window)
    leaving = (ranks >= config.sinks) & (ranks < last) & ~held.spans[row].among(ranks)
    where = leaving.nonzero()[:, 0]
    assert columns.notes is not None, "there are notes"
    notes = held.config.askings.of(columns.notes[row], config.askings)
    assert notes is not None, "among them those that are asked for"
    assert isinstance(method, ByAttention), "scores are made of notes"
    return method.arriving(notes.index_select(1, where)).double().cpu()
