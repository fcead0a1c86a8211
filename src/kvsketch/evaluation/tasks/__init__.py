"""The tasks, by name."""

from kvsketch.evaluation.tasks import infinite, lines, needle, ruler
from kvsketch.evaluation.tasks.base import WORDINGS, Question, Sample, Setting, Task, Wording

TASKS: dict[str, Task] = {task.name: task for task in (*lines.TASKS, *needle.TASKS, *ruler.TASKS, *infinite.TASKS)}

__all__ = ["TASKS", "WORDINGS", "Question", "Sample", "Setting", "Task", "Wording"]
