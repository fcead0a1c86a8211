"""What README and docs show can be pasted: code runs, commands and their options exist, specs have golden rows."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from typer.main import get_command

import kvsketch
from browser import seen_in_chromium
from golden import rows
from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.registry import METHODS, parse_spec
from kvsketch.cli.commands import app
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface.naming import as_argument

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "recipes.md"
# Shorthands of tables (r is the window, in tokens), and a signature.
NO_SPECS = {
    "uniform(r=2048)", "uniform(r=3072)", "clustergen(r=2048)", "clustergen(r=3072)",
    "clustergen(r=2048, weights='none')", "clustergen(r=3072, weights='none')", "subgen(growth=1.25, r=2048)",
}  # fmt: skip
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    found = ["\n".join(line.removeprefix(indent) for line in code.split("\n")) for indent, code in found]
    (name,) = as_argument(LlamaForCausalLM.forward, None)  # as they say that it is to be called before 5.24
    return [re.sub(r"(?<=generate\()(.*)\bcache=", rf"\1{name}=", code) for code in found]


def commands():
    """Lines of code, and code in sentences, that begin with `kvsketch`."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").split("\n"):
            shown = [line.strip()] if line.startswith("    kvsketch ") else re.findall(r"`(kvsketch [^`]+)`", line)
            yield from ((page.name, one) for one in shown)


def record(folder):
    """A model's folder, its tokenizer, and a text with questions about it."""
    model, tokenizer = load_embedded(torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    count = lambda sample: len(tokenizer(sample.context)["input_ids"])  # noqa: E731
    setting = Setting(size=1, wording="compact", questions=3)
    sample = Fitter(TASKS["lines"], setting, count).sample(600, "0")
    return str(folder / "model"), tokenizer, sample


def test_the_code_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, tokenizer, sample = record(tmp_path)
    ids = tokenizer(sample.context, return_tensors="pt")["input_ids"]
    questions = [
        tokenizer(q.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"] for q in sample.questions
    ]
    known = {"name": name, "text": sample.context, "ids": ids, "questions": questions}
    first, second, third = blocks(ROOT / "README.md", "python")
    known["text"] = sample.context + sample.questions[0].prompt  # a prompt as a user has it, its question at its end
    exec(first, known)
    assert re.search(r"bytes \(2\d\.\d%\)", capsys.readouterr().out)
    assert known["out"].shape[1] > ids.shape[1]
    assert said(known, tokenizer) == sample.questions[0].answers[0]
    assert known["model"].config._attn_implementation != "kvsketch"
    known["text"] = sample.context
    exec(second, known)
    assert known["cache"].get_seq_length() == ids.shape[1]
    assert (tmp_path / "book.safetensors").exists()
    assert said(known, tokenizer) == sample.questions[-1].answers[0]
    exec(third, known)
    assert known["out"].shape[1] > ids.shape[1]
    assert known["cache"].config.learnt.layers == [0, 1, 2, 3]
    assert said(known, tokenizer) == sample.questions[0].answers[0]
    assert known["cache"].report().looked_up < 0.5  # of 600 tokens; what waits to be sorted in is a part of it


def said(known, tokenizer):
    """The number that was answered last."""
    text = tokenizer.decode(known["out"][0], skip_special_tokens=True)
    return re.findall(r"\d+", text)[-1]


def test_the_recipes_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, _, sample = record(tmp_path)
    known = {"name": name, "text": sample.context, "questions": [q.prompt for q in sample.questions]}
    said = []
    for code in blocks(RECIPES, "python"):
        exec(code, known)
        said.append(capsys.readouterr().out)
    _, _, less, many, faster, streamed, compressed, by_questions, turns, by_head, loaded = said
    assert re.search(r"bytes \(2\d\.\d%\)", less)
    read = [float(share) for share in re.findall(r"% +[\d.]+ +(0\.\d+) +0\.\d+$", faster, re.MULTILINE)]
    assert len(read) == 3  # layers of four, the first reads everything
    assert max(read) < 0.4
    assert len(turns.strip().splitlines()) == len(sample.questions)
    assert all(q.answers[0] in many for q in sample.questions)
    assert all(sample.questions[0].answers[0] in out for out in (streamed, compressed, by_questions, by_head, loaded))
    assert known["model"].config._attn_implementation != "kvsketch"
    template = "{% for one in messages %}<user>{{ one.content }}</user>{% endfor %}<reply>"
    known["tokenizer"].chat_template = template
    exec(blocks(RECIPES, "python")[1], known)
    read = [known["tokenizer"].decode(torch.cat([known["ids"], asked], 1)[0]) for asked in known["asked"]]
    assert read == [f"<user>{sample.context}{q.prompt}</user><reply>" for q in sample.questions]


def test_other_code_of_the_docs_runs(monkeypatch):
    """Given what every page speaks of: a model, its tokenizer, and the ids of a text."""
    monkeypatch.chdir(ROOT)
    model, tokenizer = load_embedded(torch.float32)
    ids = torch.randint(100, 3000, (1, 700), generator=torch.Generator().manual_seed(0))
    found = [code for page in PAGES[1:] if page != RECIPES for code in blocks(page, "python")]
    assert len(found) > 5
    for code in found:
        exec(code, {"kvsketch": kvsketch, "model": model, "tokenizer": tokenizer, "ids": ids})


def options_that_are_missing(line):
    """Of a command as it is shown; and the command itself, where there is none of this name."""
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name.isupper():  # it stands for any
            return set()
        if name not in command.commands:
            return {name}
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - known - {"--help"}


def test_commands_and_their_options_exist():
    shown = list(commands())
    assert len(shown) > 20
    assert not [(page, line, missing) for page, line in shown if (missing := options_that_are_missing(line))]
    assert options_that_are_missing("kvsketch generate --wrong 1") == {"--wrong"}


def test_every_method_has_a_card_with_its_options_and_their_defaults():
    shared = {field.name: field.default for field in fields(BudgetedConfig)}
    headings = set()
    for name, config in METHODS.items():
        card = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        headings.add(tuple(re.findall("^## .*", card, re.MULTILINE)))
        shown = card[card.index("## Options") : card.index("## Where it comes from")]
        for field in fields(config):
            default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
            told = field.name if shared.get(field.name, ...) == field.default else f"{field.name}={default}"
            assert f"`{told}`" in shown, f"the card of {name} does not tell {told}"
    assert len(headings) == 1


def test_the_reference_has_all_that_can_be_imported():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    names |= {name for found in re.findall(r"members: \[(.+)\]", page) for name in found.split(", ")}
    assert set(kvsketch.__all__) - {"__version__"} <= names


def test_every_spec_of_the_docs_has_a_row():
    named = {_without_index(spec) for spec in rows.NAMED}
    call = re.compile(rf"\b(?:{'|'.join(METHODS)})\([^()`]*=[^()`]*\)")
    for page in PAGES:
        for spec in call.findall(page.read_text(encoding="utf-8")):
            if spec not in NO_SPECS:
                assert _without_index(spec) in named, f"{page.name} names {spec}: give it a row in golden/rows.py"


def _without_index(spec):
    """A spec as all are written, and no index: tables leave it out."""
    return str(parse_spec(re.sub(r"""index=(['"]).*?\1(, )?""", "", spec)))


def test_what_pages_outside_of_the_site_link_to_is_there():
    """The site is built with links that lead nowhere as errors; these two pages are none of its own."""
    link = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
    links = [(page, *found) for page in PAGES[:2] for found in link.findall(page.read_text(encoding="utf-8"))]
    assert links
    for page, path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in headings_of(target), f"{page.name} links to {path}#{anchor}"


def headings_of(page):
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_the_search_of_the_site_finds_its_worker_where_pages_are_files(tmp_path):
    """Browsers start no workers there; ours answers what it is sent, also before it is loaded."""
    (tmp_path / "work.js").write_text("addEventListener('message', ({data}) => postMessage(data + 1));")
    asks = "const worker = new Worker('work.js'); worker.postMessage(1);"
    asks += "worker.addEventListener('message', ({data}) => { data < 4 ? worker.postMessage(data) : note(data); });"
    assert "polyfills: [iframe-worker.js]" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shim = (ROOT / "docs" / "iframe-worker.js").read_text(encoding="utf-8")
    note = "const note = data => document.title = 'had ' + data;"
    (tmp_path / "page.html").write_text(f"<script>{shim}</script><body><script>{note} {asks}</script>")
    assert "<title>had 4</title>" in seen_in_chromium(tmp_path / "page.html", tmp_path / "browser")
