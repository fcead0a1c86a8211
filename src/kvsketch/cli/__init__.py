"""The command line: one file for each command."""

from kvsketch.cli.app import app, main
from kvsketch.cli.bench import bench
from kvsketch.cli.demo import demo
from kvsketch.cli.generate import generate
from kvsketch.cli.inspect import inspect
from kvsketch.cli.sample import sample
from kvsketch.cli.train import train_demo

app.command()(generate)
app.command()(demo)
app.command("bench")(bench)
app.command()(inspect)
app.command()(sample)
app.command("train-demo")(train_demo)

__all__ = ["app", "main"]
