"""All commands, by name."""

from kvsketch.cli.app import app
from kvsketch.cli.bench import SUITES, bench, bench_suite, report
from kvsketch.cli.bench_all import bench_all
from kvsketch.cli.bench_error import bench_error
from kvsketch.cli.bench_speed import bench_speed
from kvsketch.cli.bench_text import bench_text
from kvsketch.cli.demo import demo
from kvsketch.cli.fit import fit
from kvsketch.cli.generate import generate
from kvsketch.cli.import_model import import_model
from kvsketch.cli.inspect import inspect
from kvsketch.cli.profile import profile
from kvsketch.cli.sample import sample
from kvsketch.cli.train import train_demo

app.command()(generate)
app.command()(demo)
for suite, line in SUITES.items():
    bench.command(suite, help=f"{line}\n\n{bench_suite.__doc__}")(bench_suite)
bench.command("all")(bench_all)
bench.command("error")(bench_error)
bench.command("speed")(bench_speed)
bench.command("text")(bench_text)
bench.command("report")(report)
app.add_typer(bench, name="bench", help="Measure what methods do to a model: its answers, single layers, its speed.")
app.command()(inspect)
app.command("import")(import_model)
app.command()(fit)
app.command()(profile)
app.command()(sample)
app.command("train-demo")(train_demo)

__all__ = ["app"]
