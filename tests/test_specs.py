"""Specs and budgets as a user writes them."""

import numpy as np
import pytest

import kvsketch
from kvsketch.caches.core.budget import Budget, parse_bytes
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.caches.registry import METHODS, chosen_method


def test_a_spec_is_a_typed_frozen_config():
    config = kvsketch.parse_spec("uniform(keep=0.125, window=32, weights='none')")
    assert config == Uniform(keep=0.125, window=32, weights="none")
    assert kvsketch.parse_spec(config) is config
    with pytest.raises(AttributeError):
        config.keep = 0.5


def test_a_spec_shows_the_budget_and_what_differs_from_the_defaults():
    assert str(Uniform()) == "uniform(keep=0.25)"
    assert str(Uniform(sinks=2)) == "uniform(keep=0.25, sinks=2)"
    assert str(Uniform(keep="512MB", seed=3)) == "uniform(keep='512MB', seed=3)"
    assert kvsketch.parse_spec(" uniform ( keep = 4096 ) ") == Uniform(keep=4096)
    assert str(Uniform(keep=np.float64(0.5))) == "uniform(keep=0.5)"  # as it comes out of numpy.linspace


def test_a_budget_alone_is_the_recommended_method():
    assert chosen_method(None, None) == kvsketch.Exact()
    assert [chosen_method(None, keep) for keep in (0.5, 0.25)] == [
        kvsketch.KVzip(keep=keep, window=0.25) for keep in (0.5, 0.25)
    ]
    for little in (0.24, 0.125, 4096, "512MB"):
        assert chosen_method(None, little) == kvsketch.KVzip(keep=little)
    assert chosen_method("uniform(window=16)", "1MB") == Uniform(keep="1MB", window=16)
    assert chosen_method(kvsketch.KeyDiff(heads="pyramid"), 4096) == kvsketch.KeyDiff(heads="pyramid", keep=4096)
    with pytest.raises(ValueError, match=r"exact forgets nothing, so keep=0\.25 has no meaning"):
        chosen_method("exact", 0.25)
    with pytest.raises(ValueError, match="keep must be a fraction"):
        chosen_method(None, 0)
    with pytest.raises(ValueError, match=r"has a budget already, and keep=0\.25 is a second one"):
        chosen_method("uniform(keep=0.5)", 0.25)


def test_every_config_has_a_public_name():
    for config in METHODS.values():
        assert getattr(kvsketch, config.__name__) is config


def test_methods_are_listed_with_one_line_each():
    listed = kvsketch.methods()
    assert {"exact", "streaming_llm", "uniform"} <= set(listed)
    assert all("\n" not in line for line in listed.values())


@pytest.mark.parametrize(
    ("text", "size"),
    [("1B", 1), ("512MB", 512_000_000), ("1.5 GiB", 3 << 29), (" 2kib ", 2048), ("10kb", 10_000), ("3GB", 3 * 10**9)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_a_fraction_never_goes_below_what_the_method_needs():
    budget = Budget(0.25, None, least=100)
    assert [budget.entries(n) for n in (0, 100, 400, 401, 4000)] == [100, 100, 100, 100, 1000]
    assert Budget(None, 512, least=100).entries(10**6) == 512
