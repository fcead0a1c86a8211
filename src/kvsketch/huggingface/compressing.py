"""A cache of one method made from an exact one, as if it had read the text itself."""

import copy

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.spans import Protected
from kvsketch.caches.exact import Exact, noting_for
from kvsketch.caches.forgetting.threshold import sets_shares, shares_of_prompt
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack
from kvsketch.huggingface.prompt import Prompt
from kvsketch.huggingface.protecting import prepare


def check_can_become(old: MethodConfig, new: MethodConfig, prompt: Prompt) -> None:
    """Refuse a `new` method if the old cache does not hold the text as a cache of that method would have read it."""
    if not isinstance(old, Exact):
        raise ValueError(f"only an exact cache can be compressed by another method, this one is {old}")
    if new.prefill != "exact":
        raise ValueError(
            f"{new} reads a prompt in chunks, each of which sees earlier ones compressed: have it read the text itself"
        )
    if new.before_rotation:
        raise ValueError(
            f"{new.name} goes by queries or keys as they are before rotation, and an exact cache holds keys rotated: "
            "have a cache of this method read the text itself"
        )
    missing = [asking for asking in new.askings.each if asking not in old.askings.each]
    if missing:
        beside = [own for own in old.askings.each if not (own.behind and new.askings.behind)]  # only one can be behind
        wanted = [noting_for(asking) for asking in (*beside, *missing)]
        noting = ", ".join(name for name in wanted if name is not None)
        how = "" if None in wanted else f'read it with make_cache(model, "exact(noting={noting!r})"), or '
        raise ValueError(
            f"{new} goes by the attention of queries that this exact cache did not note: {how}have a cache of this "
            "method read the text itself"
        )
    if new.askings.behind:
        prompt.check_noted()


def hold_again(config: MethodConfig, exact: LayerStack, new: LayerStack) -> None:
    """Have new layers hold the text that exact ones hold: layers of ours compressed, transformers' own as they are."""
    new.whole.protected = exact.whole.protected
    if exact.sketch and exact.sketch[0].held.started:
        first = exact.sketch[0].held
        new.whole.protected = Protected(tuple(first.spans), alike=False)
        prepare(new, first.lengths)
    if sets_shares(config) and exact.sketch and exact.sketch[0].held.started:
        held = [layer.held for layer in exact.sketch]
        budgets = [layer.held.budget_of_layer(own) for layer, own in zip(new.sketch, held, strict=True)]
        for layer, shares in zip(new.sketch, shares_of_prompt(config, held, budgets), strict=True):
            layer.held.row_shares = shares
    for old, layer in zip(exact.layers, new.layers, strict=True):
        if isinstance(layer, SketchLayer):
            layer.read_again(old)
        else:
            layer.__dict__.update(copy.deepcopy(old.__dict__))
