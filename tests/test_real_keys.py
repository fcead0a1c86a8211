"""What is said of a real model's layers: ways to look up, text by text, where as much is read."""

import pytest
from benchmarks.real_keys import by_layer_picture, difference, of_texts

from kvsketch.evaluation.results.panels import save


def a_row(prompt, method, aim, error):
    row = {"prompt": prompt, "layer": 2, "method": method, "index": "a#1", "knob": 4, "aim": aim, "read": aim}
    return row | {"mse": error**2, "error": error, "recall": 1 - error, "buckets": 8}


ROWS = [
    a_row(prompt, method, aim, error * (2 - number))
    for number, prompt in enumerate(("a", "b"))
    for method, error in (("saap", 0.1), ("kmeans", 0.2))
    for aim in (0.01, 0.25)
]


def test_ways_are_compared_where_as_much_is_read():
    found = of_texts(ROWS, 0.05, "error")
    assert found == {
        "saap": pytest.approx({"a": 0.2, "b": 0.1}),
        "kmeans": pytest.approx({"a": 0.4, "b": 0.2}),
    }
    assert of_texts(ROWS, 0.5, "error") == {}, "nothing was measured where as much is read"


def test_a_difference_is_that_of_pairs():
    mean, half = difference({"a": 0.2, "b": 0.1, "c": 9.0}, {"a": 0.4, "b": 0.2})
    assert mean == pytest.approx(-0.15)
    assert half == pytest.approx(12.706 * 0.05, rel=1e-3)  # two pairs: one degree of freedom, s/√2 = .05
    assert difference({"a": 0.2}, {"a": 0.4}) is None


def test_the_picture_has_a_panel_for_each_kind_and_share(tmp_path):
    recalls = {"saap": 0.7, "kmeans": 0.6}
    line = {"layer": 1, "texts": 4, "top": 256, "top_share": 0.8}
    line |= {"recall at 0.05": recalls, "recall at 0.1": recalls}
    figure = by_layer_picture([line | {"kind": "books"}, line | {"kind": "books", "layer": 2}, line | {"kind": "code"}])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"{kind}, {share} % read, 4 texts" for kind in ("books", "code") for share in (5, 10)
    ]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.7, 0.7]
    assert save(figure, tmp_path / "a.png").stat().st_size > 1000
