"""What a page looks like to a person: opened as a file in Chromium, where there is one."""

import shutil
import subprocess

import pytest


def seen_in_chromium(page, profile):
    """The page after its scripts have run; `profile` is a folder for what the browser keeps."""
    if shutil.which("chromium") is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    line += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
