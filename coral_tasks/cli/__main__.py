"""``python -m coral_tasks.cli``: the same as ``coral``."""

from coral_tasks.cli import main

main()
