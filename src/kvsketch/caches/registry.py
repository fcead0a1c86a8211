"""The methods by name, and the specs that choose and configure them: "uniform(keep=0.25)"."""

import ast
import difflib
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from kvsketch.caches.core.budget import Keep
from kvsketch.caches.core.config import BudgetedConfig, MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.forgetting.balancekv import BalanceKV
from kvsketch.caches.forgetting.clustergen import ClusterGen
from kvsketch.caches.forgetting.expected_attention import ExpectedAttention
from kvsketch.caches.forgetting.h2o import H2O, Tova
from kvsketch.caches.forgetting.keydiff import KeyDiff
from kvsketch.caches.forgetting.kvzip import KVzip
from kvsketch.caches.forgetting.snapkv import PyramidKV, SnapKV
from kvsketch.caches.forgetting.streaming_heads import StreamingHeads
from kvsketch.caches.forgetting.streaming_llm import StreamingLLM
from kvsketch.caches.forgetting.subgen import SubGen
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.caches.lookup.kmeans import KMeans
from kvsketch.caches.lookup.lsh import LSH
from kvsketch.caches.lookup.random_buckets import RandomBuckets
from kvsketch.caches.lookup.retrieval import Retrieval
from kvsketch.caches.lookup.saap import Saap
from kvsketch.caches.recommended import recommended

KINDS: tuple[type[MethodConfig], ...] = (
    Exact, StreamingLLM, Uniform, ClusterGen, SubGen, BalanceKV, KeyDiff, H2O, Tova, SnapKV, PyramidKV, KVzip,
    ExpectedAttention, StreamingHeads, Saap, KMeans, LSH, RandomBuckets, Retrieval,
)  # fmt: skip
METHODS = {config.name: config for config in KINDS}


def methods() -> dict[str, str]:
    """Every method's name with one line on what it keeps."""
    return {name: (config.__doc__ or "").strip().split("\n")[0] for name, config in METHODS.items()}


def parse_spec(spec: str | MethodConfig) -> MethodConfig:
    """The config that a spec such as "uniform(keep=0.25, window=128)" names; str(config) parses back to it."""
    if isinstance(spec, MethodConfig):
        return spec
    if not isinstance(spec, str):
        budget = f"; a budget is written keep={spec!r}" * (type(spec) in (int, float))
        raise ValueError(f'a spec is text such as "uniform(keep=0.25)", got {spec!r}{budget}')
    name, options = read_call(spec)
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r} in {spec!r}; {_suggest(name, METHODS)}")
    config = METHODS[name]
    known = [field.name for field in fields(config)]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r} (in {spec!r}); {_suggest(option, known)}")
    return config(**options)


def chosen_method(method: str | MethodConfig | None, keep: Keep | None) -> MethodConfig:
    """The method a user means: exact if nothing is given, the recommended one for `keep` alone, or this one with it."""
    if keep is None:
        return parse_spec("exact" if method is None else method)
    config = parse_spec(recommended(keep) if method is None else method)
    if isinstance(method, str) and "keep" in read_call(method)[1]:
        raise ValueError(f"{method} has a budget already, and keep={keep!r} is a second one: leave one of them out")
    if not isinstance(config, BudgetedConfig):
        raise ValueError(f"{config} forgets nothing, so keep={keep!r} has no meaning: leave it out, or name a method")
    return replace(config, keep=keep)


def read_call(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name(option=literal, ...)`."""
    wrong = (
        f'cannot read the spec {spec!r}: expected a name, or a name with options as in "uniform(keep=0.25)", where '
        "values are numbers or quoted text, as in keep='512MB' (several specs have ; between them)"
    )
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, {}
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(wrong)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(f"{wrong}; every option needs its name, as in keep=0.25")
        names = [str(keyword.arg) for keyword in call.keywords]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{wrong}; {name} is given {names.count(name)} times: leave one out")
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(wrong) from error
    except ValueError as error:
        if str(error).startswith(wrong):
            raise
        raise ValueError(f"{wrong}; values are numbers or quoted text") from error


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
