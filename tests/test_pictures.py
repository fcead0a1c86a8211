"""Pictures and the page are made from rows alone."""

import re

import pytest
from matplotlib.collections import PathCollection
from PIL import Image

from kvsketch.evaluation.answers.able import able_part
from kvsketch.evaluation.answers.page import write_page
from kvsketch.evaluation.answers.pictures import draw_all, family, needle_map, score_against_bytes, score_against_length
from kvsketch.evaluation.answers.summary import summarise
from kvsketch.evaluation.results.panels import COLOURS, EXACT, heading
from kvsketch.evaluation.results.rows import RowsFile

METHODS = {"exact": 400, "uniform(keep=0.25)": 100, "uniform(keep=0.5)": 200, "uniform(keep=0.5, weights='none')": 200}


def made_rows():
    for task in ("lines", "needle", "kv"):
        for length in (500, 1000):
            for method, held in METHODS.items():
                for asked in ("before", "after"):
                    for sample in range(4):
                        yield {
                            "task": task,
                            "wording": "compact",
                            "cases": None,
                            "haystack": "noise",
                            "template": False,
                            "new_tokens": 100,
                            "tokens": length,
                            "asked": asked,
                            "length": length,
                            "depth": sample / 3 if task == "needle" else None,
                            "at": sample / 3,
                            "sample": sample,
                            "method": method,
                            "score": float(sample < held / 100),
                            "nbytes": held,
                            "full_nbytes": 400,
                            "seconds": 0.1,
                        }


ROWS = list(made_rows())


def test_the_page_has_what_the_model_can_do(tmp_path):
    """What it does with everything held comes first; where that is too little, nothing follows."""
    rows = [row | {"score": 0.0} if (row["task"], row["length"]) == ("kv", 1000) else row for row in ROWS]
    RowsFile(tmp_path / "rows.jsonl", {"model": "a", "fingerprint": "1", "kvsketch": "0"}).add(rows)
    page = write_page(tmp_path / "rows.jsonl", tmp_path, able=0.8).read_text()
    held, _, rest = page.partition("Question known before")
    assert "<td>kv</td><td>1,000</td><td>after</td><td>4</td><td>0.000 [0.00, 0.49]</td><td>no</td>" in held
    assert "<td>kv</td><td>500</td><td>after</td><td>4</td><td>1.000 [0.51, 1.00]</td><td>yes</td>" in held
    assert len(re.findall(r"<th>kv<br><small>500 ", rest)) == 2
    assert "<th>kv<br><small>1,000 " not in rest
    assert "<th>lines<br><small>500 " in rest
    exact = [row for row in rows if row["method"] == "exact"]
    assert able_part(exact, 0.8) == (summarise(exact), [])  # nothing to compare: no table but the first
    assert "everything held" not in write_page(tmp_path / "rows.jsonl", tmp_path).read_text()


def test_a_methods_family_leaves_out_its_budget():
    assert family("uniform(keep=0.25)") == family("uniform") == "uniform"
    assert family("uniform(keep=4096, weights='none')") == "uniform(weights='none')"


def test_score_against_bytes_has_a_point_for_each_budget():
    figure = score_against_bytes([mean for mean in summarise(ROWS) if mean.asked == "after"])
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [f"{t}, 1,000 tokens" for t in ("lines", "needle", "kv")]
    curve = panels[0].containers[0].lines[0]
    assert list(curve.get_xdata()) == [25.0, 50.0]
    assert list(curve.get_ydata()) == [0.25, 0.5]
    with_exact_alone = [
        *summarise(ROWS),
        *summarise([row | {"length": 8000} for row in ROWS if row["method"] == "exact"]),
    ]
    figure_again = score_against_bytes([mean for mean in with_exact_alone if mean.asked == "after"])
    assert figure_again.axes[0].get_title(loc="left") == "lines, 1,000 tokens"  # where there is something to compare
    assert [text.get_text() for text in figure.legends[0].texts] == ["exact", "uniform", "uniform(weights='none')"]


def test_score_against_length_has_a_curve_for_each_method():
    figure = score_against_length([mean for mean in summarise(ROWS) if mean.asked == "before"])
    panel = figure.axes[0]
    assert len(panel.containers) == len(METHODS)
    assert list(panel.containers[0].lines[0].get_xdata()) == [500, 1000]


@pytest.mark.parametrize("given", [True, False])
def test_a_needle_map_has_a_cell_for_each_length_and_depth(given):
    rows = [row | ({} if given else {"depth": None}) for row in ROWS if row["task"] == "needle"]
    figure = needle_map([row for row in rows if row["asked"] == "after"])
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == len(METHODS)
    quarter = panels[1]
    assert quarter.get_title(loc="left") == "uniform(keep=0.25)\n25% of the bytes"
    written = [text.get_text() for text in quarter.texts]
    assert written == ["1.00"] * 2 + [".00"] * 6  # found at depth 0 and nowhere else


def test_the_page_needs_no_other_file(tmp_path):
    RowsFile(tmp_path / "rows.jsonl", {"model": "tiny 1", "fingerprint": "1", "kvsketch": "0.1.0"}).add(ROWS)
    page = write_page(tmp_path / "rows.jsonl", tmp_path)
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "http" not in text
    assert text.count("data:image/png;base64,") == 6
    assert "0.250 [0.05, 0.70]" in text  # 1 of 4
    assert "n = 4, 25.0 %" in text
    assert "tiny 1" in text
    assert "weights=&#39;none&#39;" in text  # escaped


def test_pictures_are_what_their_names_say(tmp_path):
    pictures = draw_all(ROWS, tmp_path)
    names = {f"{kind}-{asked}" for kind in ("bytes", "length", "needle") for asked in ("before", "after")}
    assert {picture.path.stem for picture in pictures} == names
    for picture in pictures:
        with Image.open(picture.path) as image:
            assert image.width > 600
            colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
            if picture.path.stem.startswith("needle"):
                assert {(0, 104, 55), (165, 0, 38)} <= colours  # the two ends of the map's scale
            else:
                assert {tuple(bytes.fromhex(code[1:])) for code in (EXACT, COLOURS[0], COLOURS[1])} <= colours


def test_no_rows_no_page(tmp_path):
    RowsFile(tmp_path / "rows.jsonl", {"model": "tiny", "fingerprint": "1", "kvsketch": "0.1.0"})
    with pytest.raises(ValueError, match="has no rows yet"):
        write_page(tmp_path / "rows.jsonl", tmp_path)


def test_needles_in_other_texts_have_maps_of_their_own(tmp_path):
    """A map over both would show neither."""
    books = [row | {"haystack": "book.txt#12", "score": 0.0} for row in ROWS if row["task"] == "needle"]
    pictures = {picture.path.stem: picture.caption for picture in draw_all([*ROWS, *books], tmp_path)}
    maps = {name: caption for name, caption in pictures.items() if name.startswith("needle")}
    assert maps.keys() == {f"needle-{asked}{end}" for asked in ("before", "after") for end in ("", "-2")}
    assert maps["needle-after"].startswith("Found: needle (noise), question asked after compression; 1 prompts")
    assert maps["needle-after-2"].startswith("Found: needle (book.txt)")


def test_curves_that_lie_on_one_another_are_all_seen():
    """Three methods with the same answers at the same bytes: dashed in turn, and none of the markers is hidden."""
    twins = [row for row in ROWS if row["method"] == "uniform(keep=0.25)"]
    twins += [row | {"method": f"{name}(keep=0.25)"} for row in twins for name in ("second", "third")]
    lone = [row | {"method": "lone(keep=0.25)", "score": 0.0} for row in ROWS if row["method"] == "uniform(keep=0.25)"]
    figure = score_against_bytes([mean for mean in summarise([*twins, *lone]) if mean.asked == "after"])
    lines = {container.get_label(): container.lines[0] for container in figure.axes[0].containers}
    sizes = marker_sizes(figure)
    assert sizes["uniform"] > sizes["second"] > sizes["third"] == sizes["lone"]
    offsets = {lines[name]._unscaled_dash_pattern[0] for name in ("uniform", "second", "third")}
    assert len(offsets) == 3
    assert lines["lone"].get_linestyle() == "-"


def marker_sizes(figure):
    """Of every curve's markers, in the first panel."""
    panel = figure.axes[0]
    scatters = [found for found in panel.collections if isinstance(found, PathCollection)]
    names = [container.get_label() for container in panel.containers]
    return {name: list(scatter.get_sizes()) for name, scatter in zip(names, scatters, strict=True)}


def test_markers_that_lie_on_one_another_are_all_seen_where_curves_do_not():
    """One method has another budget more, and one is a little apart: less than a marker is wide, in this picture."""
    first = [row for row in ROWS if row["method"] == "uniform(keep=0.25)"]
    more = [row | {"method": "more(keep=0.25)"} for row in first]
    more += [row | {"method": "more(keep=1.0)", "nbytes": 400} for row in first]
    near = [row | {"method": "near(keep=0.25)", "nbytes": 102} for row in first]
    figure = score_against_bytes([mean for mean in summarise([*first, *more, *near]) if mean.asked == "after"])
    sizes = marker_sizes(figure)
    assert sizes["uniform"][0] > sizes["more"][0] > sizes["near"][0] == sizes["more"][1]


def test_a_long_heading_does_not_run_into_the_next_panel():
    title = heading("needle (one.txt#4d11bf59, depths drawn at random), 600 tokens\n" + "x" * 90)
    assert max(map(len, title.split("\n"))) <= 40
    assert title.replace("\n", "").replace(" ", "").endswith("x" * 90)


def test_letters_without_a_glyph_are_no_warning(tmp_path):
    odd = [row | {"cases": "\u8bb0\u5f55#12", "task": "lines"} for row in ROWS]
    assert draw_all(odd, tmp_path)


def test_a_dollar_in_a_name_is_no_mathematics(tmp_path):
    odd = [row | {"method": row["method"].replace("'none'", r"'$\\frac{x_1^$ $'"), "task": "needle"} for row in ROWS]
    odd = [row | {"cases": "$a_{$ b$#12", "wording": "official", "depth": 0.5} for row in odd]
    pictures = draw_all(odd, tmp_path)
    assert len(pictures) == 6
    figure = score_against_bytes([mean for mean in summarise(odd) if mean.asked == "after"])
    assert figure.axes[0].get_title(loc="left") == r"needle: \$a_{\$ b\$, 1,000 tokens"
