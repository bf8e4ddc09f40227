"""One file a kind of task: its inputs, sizes, conditions and clips."""
