"""Studies that are killed while they write their rows."""

import signal
import subprocess
import time


def kill_on_the_way(command, path, total, counts=(3, 90)):
    """Run the command and kill it, again and again, each time as soon as there are so many lines, and not all."""
    for wanted in counts:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while (not path.exists() or path.read_bytes().count(b"\n") < wanted) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wanted <= path.read_bytes().count(b"\n") < total
